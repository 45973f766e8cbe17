"""The lines of a batch's output: OpenAI's fields, one line each, the same when written again."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.batch_output import CANCELLED, EXPIRED, answered, error_line, line_id, response_line


def test_an_answer() -> None:
    body = b'{\r\n  "id": "x",\n  "n": 1.50, "t": "\xe6\xa8\xa1\\n"\n}'
    line = response_line("batch_req_1", "a\n\x00模", 200, "job", body)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert b'"n": 1.50' in line, "as the engine wrote it"
    assert json.loads(line) == {
        "id": "batch_req_1",
        "custom_id": "a\n\x00模",
        "response": {"status_code": 200, "request_id": "job", "body": json.loads(body)},
        "error": None,
    }


@pytest.mark.parametrize(("code", "message"), [EXPIRED, CANCELLED])
def test_a_request_without_an_answer(code: str, message: str) -> None:
    assert json.loads(error_line("batch_req_1", "a", code, message)) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": None,
        "error": {"code": code, "message": message},
    }


def test_which_file() -> None:
    assert [s for s in (200, 204, 400, 404, 429, 500, 503) if answered(s)] == [200, 204]


def test_ids_are_of_the_line() -> None:
    ids = {line_id(batch, n) for batch in ("batch_1", "batch_11") for n in (1, 11, 2)}
    assert len(ids) == 6 and line_id("batch_1", 1) == line_id("batch_1", 1)


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(max_size=20).map(str.encode),
        st.sampled_from([b"", b"null", b"{} {}"]),
    )
)
def test_any_body_is_one_line(body: bytes) -> None:
    line = response_line("i", "c", 502, "r", body)
    assert line.count(b"\n") == 1 and b"\r" not in line
    found = json.loads(line)["response"]["body"]
    try:
        assert found == json.loads(body.decode()) or found != found
    except (ValueError, AssertionError):
        assert found == body.decode(errors="replace") or msgspec.json.encode(found)
