"""From a job's frames to what its client gets, step by step."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.intake.answers import DONE, ending
from common.outcomes import Outcome
from common.wire import Data, End, Head
from gateway.delivery import HOLD_BYTES, Delivery, Step

A, B = b'data: {"a":1}\n\n', b'data: {"b":2}\n\n'
BAD = (Outcome.LOST, Outcome.ORPHANED, Outcome.DEADLINE, Outcome.TRIES, Outcome.FAILED,
       Outcome.TIMEOUT, Outcome.GATEWAY_DEAD)  # fmt: skip


def head(stream: bool = True, status: int = 200, headers: Any = ()) -> Head:
    return Head("j", 1, 0, status, list(headers), stream)


def data(value: bytes, more: bool = False) -> Data:
    return Data("j", 1, 1, value, more)


def end(outcome: Outcome = Outcome.FINISHED, message: str = "") -> End:
    return End("j", 1, 2, outcome, message, None)


def delivery() -> Delivery:
    return Delivery("job-1", lambda: 7)


def take(d: Delivery, *frames: Head | Data | End) -> Step:
    step = d.take(frames, 12)
    assert step is not None
    return step


def error_of(step: Step) -> Any:
    """The error event that ends this step's data."""
    text, done, rest = step.data.rsplit(b"\n\n", 2)
    assert (done, rest) == (b"data: [DONE]", b"") and step.last
    return json.loads(text.rpartition(b"data: ")[2])["error"]


# --- streams


def test_a_response_that_fails_and_one_that_is_whole() -> None:
    whole = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
    failed = Delivery("job-1", lambda: 7, "responses")
    step = take(failed, head(), data(A), end(Outcome.LOST))
    assert step.last and step.data.startswith(A + b"event: response.failed\n")
    assert b"[DONE]" not in step.data
    done = Delivery("job-1", lambda: 7, "responses")
    assert take(done, head(), data(whole[:-9])).data == whole[:-9]
    assert take(done, data(whole[-9:]), end(Outcome.LOST)).data == whole[-9:]


def test_a_stream_that_comes_at_once() -> None:
    step = take(delivery(), head(), data(A), data(DONE), end())
    assert (step.status, step.data, step.last, step.taken) == (200, A + DONE, True, len(A + DONE))
    assert dict(step.headers) == {
        b"content-type": b"text/event-stream; charset=utf-8", b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no", b"x-fairlane-job": b"job-1", b"x-fairlane-queue-ms": b"12",
    }  # fmt: skip


def test_a_stream_piece_by_piece() -> None:
    d = delivery()
    assert d.take([head()], 0) is None, "a head alone may still turn into an error status"
    first = take(d, data(A))
    assert (first.status, first.data, first.last, first.forwards) == (200, A, False, True)
    second = take(d, data(B))
    assert (second.status, second.data, second.last) == (0, B, False)
    assert take(d, data(DONE), end()).last


@pytest.mark.parametrize("outcome", BAD)
def test_a_stream_that_fails(outcome: Outcome) -> None:
    d = delivery()
    take(d, head(), data(A))
    step = take(d, end(outcome, "why"))
    assert error_of(step)["message"] == "why"
    assert not step.broken and step.data.count(b"data: ") == 2


@pytest.mark.parametrize("outcome", BAD)
@pytest.mark.parametrize("split", [False, True])
def test_a_stream_whose_dispatcher_wrote_the_error(outcome: Outcome, split: bool) -> None:
    d = delivery()
    take(d, head(), data(A))
    rest = [data(DONE)]
    if split:
        take(d, data(DONE[:5], more=True))
        rest = [data(DONE[5:])]
    step = take(d, *rest, end(outcome))
    assert step.data == rest[0].data and step.last


@pytest.mark.parametrize("outcome", [*BAD, Outcome.FINISHED])
def test_a_stream_without_a_byte_becomes_a_status(outcome: Outcome) -> None:
    step = take(delivery(), head(), end(outcome))
    assert step.status == ending(outcome).status and json.loads(step.data)["error"]
    assert dict(step.headers)[b"x-fairlane-job"] == b"job-1" and step.last


def test_a_break_inside_an_event_closes_it_first() -> None:
    d = delivery()
    take(d, head(), data(b'data: {"a":', more=True))
    assert d.comment(0) is None, "a comment inside an event would be part of it"
    step = take(d, end(Outcome.LOST))
    assert step.data.startswith(b"\n\ndata: ") and error_of(step)


def test_a_failure_before_anything() -> None:
    step = take(delivery(), end(Outcome.DEADLINE))
    assert step.status == 504 and step.last and not step.forwards
    assert dict(step.headers)[b"retry-after"] == b"7"


# --- comments


def test_comments_begin_the_stream() -> None:
    d = delivery()
    first, second = d.comment(3), d.comment(None)
    assert first and second
    assert (first.status, first.data) == (200, b": queued position=3\n")
    assert (second.status, second.data) == (0, b": queued\n")
    assert not d.forwarded and not first.forwards
    step = take(d, head(), data(A))
    assert (step.status, step.data) == (0, A)
    waiting = d.comment(4)
    assert waiting and waiting.data == b": waiting\n", "it runs: there is no place any more"


def test_a_comment_for_a_job_that_runs_without_a_byte() -> None:
    step = delivery().comment(0)
    assert step and step.data == b": waiting\n"


@pytest.mark.parametrize("outcome", BAD)
def test_a_failure_after_comments_is_an_event(outcome: Outcome) -> None:
    for frames in ([end(outcome)], [head(), end(outcome)], [head(False), end(outcome)],
                   [head(False, 200), data(b"{"), end(outcome)]):  # fmt: skip
        d = delivery()
        d.comment(1)
        assert error_of(take(d, *frames))["code"] == ending(outcome).code


def test_an_engines_refusal_after_comments_is_an_event() -> None:
    d = delivery()
    d.comment(1)
    body = json.dumps({"error": {"message": "too long", "code": 400}}, indent=1).encode()
    assert error_of(take(d, head(False, 400), data(body), end(Outcome.REFUSED))) == {
        "message": "too long", "code": 400,
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b"{}", b"null", b"\xff", b"[" * 5000])
def test_whatever_an_engine_says_after_comments_becomes_an_event(body: bytes) -> None:
    d = delivery()
    d.comment(1)
    assert error_of(take(d, head(False, 500), data(body), end(Outcome.REFUSED)))["code"]


def test_a_long_body_after_comments_is_not_kept() -> None:
    d = delivery()
    d.comment(1)
    assert d.take([head(False, 500), data(b"x" * HOLD_BYTES)], 0) is None
    for _ in range(9):
        assert take(d, data(b"x" * 100_000)).taken == 100_000
    assert error_of(take(d, end(Outcome.REFUSED)))


# --- bodies


def test_a_body_is_sent_whole_with_its_length() -> None:
    d = delivery()
    assert (
        d.take([head(False, headers=[("Content-Type", "application/json")]), data(b"ab")], 0)
        is None
    )
    step = take(d, data(b"c"), end())
    assert (step.status, step.data, step.last, step.taken) == (200, b"abc", True, 3)
    assert dict(step.headers)[b"content-length"] == b"3"
    assert dict(step.headers)[b"content-type"] == b"application/json"


def test_an_engines_refusal_is_passed_on() -> None:
    step = take(delivery(), head(False, 422), data(b"no"), end(Outcome.REFUSED))
    assert (step.status, step.data, step.last) == (422, b"no", True)


def test_a_long_body_goes_on_as_it_comes() -> None:
    d = delivery()
    first = take(d, head(False), data(b"x" * HOLD_BYTES), data(b"y"))
    assert len(first.data) == HOLD_BYTES + 1 and not first.last and first.status == 200
    assert b"content-length" not in dict(first.headers)
    assert take(d, data(b"z")).data == b"z"
    last = take(d, end())
    assert (last.data, last.last, last.broken) == (b"", True, False)


@pytest.mark.parametrize("outcome", BAD)
def test_a_body_that_fails(outcome: Outcome) -> None:
    held = delivery()
    held.take([head(False), data(b"half")], 0)
    step = take(held, end(outcome))
    assert step.status == ending(outcome).status and b"half" not in step.data
    begun = delivery()
    take(begun, head(False), data(b"x" * (HOLD_BYTES + 1)))
    cut = take(begun, data(b"y"), end(outcome))
    assert cut.broken and not cut.last, "a truncation never looks like success"
    assert begun.comment(1) is None


def test_another_run_replaces_what_was_held() -> None:
    d = delivery()
    d.take([head(False), data(b"old")], 0)
    assert take(d, head(False), data(b"new"), end()).data == b"new"
    d = delivery()
    d.take([head(False), data(b"old")], 0)
    d.reset()
    assert d.head is None
    assert take(d, head(), data(A)).data == A


# --- headers


def test_headers_about_the_engines_connection_stay_behind() -> None:
    sent = [("Connection", "close"), ("Content-Length", "5"), ("Content-Encoding", "gzip"),
            ("Transfer-Encoding", "chunked"), ("Set-Cookie", "a=b"), ("X-Request-Id", "r1"),
            ("bad name", "x"), ("x-bad", "a\r\nb: c"), ("x-wide", "模"), ("", "x")]  # fmt: skip
    for stream in (False, True):
        headers = dict(take(delivery(), head(stream, 200, sent), data(A), end()).headers)
        assert headers[b"x-request-id"] == b"r1"
        assert not {b"connection", b"content-encoding", b"transfer-encoding", b"set-cookie",
                    b"bad name", b"x-bad", b"x-wide", b""} & headers.keys()  # fmt: skip


@example(["head", "done", "comment", "fail"])
@given(
    st.lists(st.sampled_from(["comment", "head", "body", "a", "more", "done", "fail", "end"]),
             max_size=9)
)  # fmt: skip
def test_whatever_comes_the_answer_is_well_formed(events: list[str]) -> None:
    """One status at the most, nothing after the end, and no success that is not the engine's."""
    d, status, ended, body = delivery(), 0, False, b""
    for event in events:
        if ended:
            break
        frames: dict[str, Head | Data | End] = {
            "head": head(), "body": head(False), "a": data(A), "done": data(DONE),
            "more": data(b"data: ", more=True), "fail": end(Outcome.LOST), "end": end(),
        }  # fmt: skip
        if event in ("head", "body") and d.head is not None:
            continue
        step = d.comment(1) if event == "comment" else d.take([frames[event]], 0)
        if step is None:
            continue
        assert not (step.status and status), "a second status"
        status = status or step.status
        assert status, "bytes before the status"
        body += step.data
        ended = step.last or step.broken
        if event == "fail":
            assert ended
            assert step.broken or status >= 400 or body.endswith(DONE)
