"""`/v1/responses` between engine and client: its events, usage and errors; and the simulator's."""

import json
from typing import Any

import pytest

from common.intake import answers, estimate
from common.intake.answers import Refusal
from common.intake.body import read
from common.intake.routes import RESPONSES, ROWS, max_output
from common.wire import Usage
from dispatcher.answer import StreamRules
from dispatcher.bodies import make_error, read_usage
from dispatcher.dialects import error_event
from tests.unit.test_sim_shapes import body_of, captured, replay

ROW = next(r for r in ROWS if r.path == RESPONSES)
DELTA = (
    b'event: response.output_text.delta\ndata: {"content_index":0,"delta":" a","item_id":"msg_1",'
    b'"logprobs":[],"output_index":0,"sequence_number":4,"type":"response.output_text.delta"}\n\n'
)


def event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({**fields, "sequence_number": 0, "type": kind}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


USAGE = {"input_tokens": 6, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 4}
CREATED = event("response.created", response={"id": "resp_1", "error": None})
COMPLETED = event("response.completed", response={"id": "resp_1", "usage": USAGE})


def fields(**body: Any) -> Any:
    return read(json.dumps({"model": "m", **body}).encode())


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_go_on_with_their_names_byte_for_byte(size: int) -> None:
    sent = CREATED + DELTA * 3 + COMPLETED
    rules, got = StreamRules("responses", False), b""
    for at in range(0, len(sent), size):
        step = rules.feed(sent[at : at + size])
        got += step.data
        assert step.error is None
    assert got == sent
    assert step.done, "the event that completes it is its end"
    assert rules.usage == Usage(6, 2, 4)
    assert rules.finish(True).data == b""


@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_real_stream_goes_on_byte_for_byte(size: int) -> None:
    sent, got = body_of("responses_stream"), b""
    rules = StreamRules("responses", False)
    for at in range(0, len(sent), size):
        got += rules.feed(sent[at : at + size]).data
    assert got == sent and rules.usage == Usage(6, 0, 4)
    assert answers.ended(sent, "responses")


def test_a_stream_that_ends_before_is_no_success() -> None:
    rules = StreamRules("responses", False)
    rules.feed(CREATED + DELTA)
    error = rules.finish(True).error
    assert error is not None and error.code == "incomplete_answer"


@pytest.mark.parametrize(
    "last",
    [
        event("response.failed", response={"error": {"code": "server_error", "message": "no"}}),
        event("error", code="server_error", message="no", param=None),
        b'data: {"error":{"message":"no","type":"x","param":null,"code":500}}\n\n',
    ],
)
def test_an_engine_says_that_it_failed(last: bytes) -> None:
    rules = StreamRules("responses", False)
    assert rules.feed(CREATED + DELTA).error is None
    error = rules.feed(last).error
    assert error is not None and error.message == "no"


def test_an_error_ends_a_stream_as_a_failed_response() -> None:
    stream = error_event("responses", 'a "b"\n', "server_error", 500)
    assert answers.ended(stream, "responses") and not answers.ended(stream, "chat")
    name, data = stream.decode().rstrip("\n").split("\n")
    assert name == "event: response.failed"
    shown = json.loads(data.removeprefix("data: "))
    assert shown["response"]["error"] == {"code": "server_error", "message": 'a "b"\n'}
    assert shown["response"]["status"] == "failed"
    assert answers.error_event(b"not JSON", "responses").startswith(b"event: response.failed")
    assert make_error("x").body in answers.error_event(make_error("x").body)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (400, "invalid_prompt"), ("404", "invalid_prompt"), (429, "rate_limit_exceeded"),
        (503, "server_error"), (None, "server_error"), ("engine_error", "engine_error"),
    ],
)  # fmt: skip
def test_the_code_of_a_failed_response_is_a_word(code: object, said: str) -> None:
    """vLLM gives the status as a number."""
    assert answers.response_code(code) == said


def test_what_ends_a_stream() -> None:
    assert answers.ended(CREATED + COMPLETED, "responses")
    assert not answers.ended(CREATED + DELTA, "responses")


def test_usage_of_a_whole_response() -> None:
    assert read_usage(json.dumps({"usage": USAGE}).encode()) == Usage(6, 2, 4)
    assert read_usage(b'{"usage":{"input_tokens":null}}') is None


def test_how_much_is_asked() -> None:
    assert estimate.responses(fields(input="a" * 40)).input == 14
    parts = [{"type": "input_text", "text": "a" * 38}, {"type": "input_image", "image_url": "x"}]
    items = [{"role": "user", "content": parts}, {"type": "function_call_output", "output": "ok"}]
    assert estimate.responses(fields(input=items)).input == 1_000 + 10 + 2 * 4 + 1
    assert estimate.responses(fields(previous_response_id="resp_1")).choices == 1
    with pytest.raises(Refusal):
        estimate.responses(fields(input=[1]))
    with pytest.raises(Refusal):
        max_output(ROW, fields(input="a", max_output_tokens=0), 1)
    assert max_output(ROW, fields(input="a", max_output_tokens=7, max_tokens=9), 1) == 7


def shape(value: object) -> object:
    """Keys, their order, and what is null."""
    if isinstance(value, dict):
        return [(k, shape(v)) for k, v in value.items()]
    if isinstance(value, list):
        return [shape(v) for v in value]
    return None if value is None else type(value).__name__


def events(stream: bytes) -> list[tuple[str, Any]]:
    pieces = [e.split("\n") for e in stream.decode().removesuffix("\n\n").split("\n\n")]
    return [(name, json.loads(data.removeprefix("data: "))) for name, data in pieces]


async def test_the_simulator_answers_as_vllm_does() -> None:
    whole = (await replay(captured("responses_nonstream"))).content
    assert shape(json.loads(whole)) == shape(json.loads(body_of("responses_nonstream")))


async def test_the_simulator_streams_as_vllm_does() -> None:
    real = events(body_of("responses_stream"))
    stream = (await replay(captured("responses_stream"))).content
    made = [e for n, e in enumerate(events(stream)) if n not in (5, 6)]  # vLLM merged its deltas
    assert [shape(e) for e in made] == [shape(e) for e in real]
    rules = StreamRules("responses", False)
    step = rules.feed(stream)
    assert step.done and step.data == stream and rules.usage is not None and rules.usage.output == 4
