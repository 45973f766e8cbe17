"""The rules for streams, over what a real vLLM sent."""

from pathlib import Path

import pytest

from common.wire import Usage
from dispatcher.answer import Step, StreamRules

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
DONE = b"data: [DONE]\n\n"


def read(body: bytes, wants_usage: bool = False) -> tuple[Step, StreamRules]:
    """What one read of a whole chat stream comes to."""
    rules = StreamRules("chat", wants_usage)
    return rules.feed(body), rules


def events_of(data: bytes) -> list[bytes]:
    assert data.endswith(b"\n\n")
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def dechunk(raw: bytes) -> bytes:
    body, rest = b"", raw.partition(b"\r\n\r\n")[2]
    while (size := int(rest.partition(b"\r\n")[0], 16)) > 0:
        rest = rest.partition(b"\r\n")[2]
        body, rest = body + rest[:size], rest[size + 2 :]
    return body


@pytest.mark.parametrize(
    ("name", "wants_usage", "usage"),
    [
        ("chat_stream_default", True, Usage(14, 0, 8)),
        ("chat_stream_include_usage", True, Usage(14, 0, 3)),
        ("chat_stream_n2", True, Usage(14, 0, 6)),
        ("plain_chat_stream", False, None),
        ("plain_chat_stream_include_usage", True, Usage(14, 0, 3)),
        ("plain_chat_stream_continuous_usage", True, Usage(14, 0, 3)),
        ("completions_stream", True, Usage(1, 0, 4)),
        ("plain_completions_stream", False, None),
        ("plain_completions_stream_include_usage", True, Usage(1, 0, 3)),
    ],
)
def test_a_real_stream_is_unchanged_where_the_client_asked_for_what_it_has(
    name: str, wants_usage: bool, usage: Usage | None
) -> None:
    body = (FIXTURES / f"{name}.body").read_bytes()
    for size in (len(body), 100, 1):
        dialect, choices = "completions" if "completions" in name else "chat", 1 + ("n2" in name)
        rules = StreamRules(dialect, wants_usage, choices)
        steps = [rules.feed(body[at : at + size]) for at in range(0, len(body), size)]
        assert b"".join(s.data for s in steps) == body
        assert steps[-1].done and rules.usage == usage


def test_a_real_stream_loses_its_usage_where_nobody_asked_for_it() -> None:
    body = (FIXTURES / "plain_chat_stream_include_usage.body").read_bytes()
    step, rules = read(body)
    assert step.data == b"".join(e for e in events_of(body) if b'"usage"' not in e)
    assert rules.usage == Usage(14, 0, 3)

    forced = (FIXTURES / "chat_stream_default.body").read_bytes()
    step, rules = read(forced)
    assert b'"usage"' not in step.data and step.done
    assert len(events_of(step.data)) == len(events_of(forced)) - 1
    assert rules.usage == Usage(14, 0, 8)


def test_comments_of_a_real_engine_are_dropped() -> None:
    body = (FIXTURES / "sse_keepalive_while_queued.body").read_bytes()

    assert read(body)[0].data == body.removeprefix(b": keep-alive\n\n")


def test_a_killed_engine_ends_its_stream_with_an_error() -> None:
    body = dechunk((FIXTURES / "enginekill_client_chat_stream.raw").read_bytes())
    *events, _, _ = events_of(body)
    step, _ = read(body)

    assert step.data == b"".join(events) and len(events) > 100
    assert step.error is not None and step.error.status == 500 and not step.done

    queued = dechunk((FIXTURES / "enginekill_client_queued_chat_stream.raw").read_bytes())
    step, rules = read(queued)
    assert step.error is not None and step.error.status == 500 and not rules.sent
    assert step.error.body == queued.removesuffix(DONE)[6:-2]


def test_an_error_in_the_middle_of_a_real_stream() -> None:
    body = (FIXTURES / "cont_echo_stream.body").read_bytes()
    step, _ = read(body, wants_usage=True)

    assert step.data == events_of(body)[0]
    assert step.error is not None and step.error.status == 400
