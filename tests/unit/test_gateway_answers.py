"""Errors as OpenAI's clients expect them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.intake import answers
from common.intake.answers import Answer, ending, error_event, retry_after, unknown_model
from common.outcomes import HTTP_STATUS, Outcome

FIXED = [answers.UNAUTHORIZED, answers.NO_ROUTE, answers.INTERNAL, answers.COMPRESSED,
         answers.too_large(5), answers.wrong_method(("POST",)), unknown_model("x", ["m1"]),
         answers.unavailable(3), answers.bad_request("x", "model").answer]  # fmt: skip


@pytest.mark.parametrize("answer", [*FIXED, *map(ending, Outcome)], ids=lambda a: str(a.status))
def test_every_error_has_the_same_shape(answer: Answer) -> None:
    error: Any = json.loads(answer.body())
    assert list(error) == ["error"] and list(error["error"]) == ["message", "type", "param", "code"]
    assert error["error"]["message"] and isinstance(error["error"]["type"], str)
    for optional in ("param", "code"):
        assert error["error"][optional] is None or isinstance(error["error"][optional], str)
    head = dict(answer.head(len(answer.body())))
    assert head[b"content-type"] == b"application/json"
    assert int(head[b"content-length"]) == len(answer.body())
    assert 400 <= answer.status <= 599
    if answer.status in (429, 503, 504):
        assert 1 <= int(head[b"retry-after"]) <= 60
    if answer.status == 429:
        assert answer.type == "rate_limit_error"
    if answer.status == 401:
        assert head[b"www-authenticate"]


def test_endings_have_the_status_of_their_outcome() -> None:
    for outcome in Outcome:
        expected = HTTP_STATUS[outcome]
        assert ending(outcome).status == (502 if expected == 200 else expected)


def test_an_end_brings_its_own_words() -> None:
    assert ending(Outcome.TRIES, "three backends broke").message == "three backends broke"
    assert ending(Outcome.TRIES).message


@pytest.mark.parametrize(
    ("waiting", "drain", "seconds"),
    [(10, 2.0, 5), (0, 2.0, 1), (1, 100.0, 1), (20_000, 1.0, 60), (7, 0.0, 7), (256, 0.0, 60),
     (5, 1e-300, 60)],
)  # fmt: skip
def test_retry_after(waiting: int, drain: float, seconds: int) -> None:
    assert retry_after(waiting, drain) == seconds


@given(st.integers(0, 10**9), st.floats(0, 1e9))
def test_retry_after_stays_in_bounds(waiting: int, drain: float) -> None:
    assert 1 <= retry_after(waiting, drain) <= 60


def test_unknown_models_list_what_there_is() -> None:
    answer = unknown_model("n" * 10_000, [f"model-{i}" for i in range(1_000)])
    assert answer.status == 404 and answer.code == "model_not_found" and answer.param == "model"
    assert "model-0" in answer.message and len(answer.message) < 2_000
    assert "No model" in unknown_model("x", []).message


def test_an_error_event_is_one_line_and_the_end() -> None:
    body = json.dumps({"error": {"message": "a\nb"}}, indent=2).replace("\n", "\r\n").encode()
    event = error_event(body)
    data, done, rest = event.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert b"\r" not in data and b"\n" not in data
    assert json.loads(data.removeprefix(b"data: ")) == {"error": {"message": "a\nb"}}
