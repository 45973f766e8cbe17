import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import Usage
from dispatcher import sse
from dispatcher.answer import Step, StreamRules
from dispatcher.dialects import error_event

DONE = b"data: [DONE]\n\n"
COUNTS = '{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}'
USAGE = Usage(input=5, cached=4, output=2)


def chunk(content: str = "", finish: str | None = None, index: int = 0, extra: str = "") -> bytes:
    """One chat event; `extra` is JSON text at the end of its top level."""
    delta = f'{{"content":{json.dumps(content, ensure_ascii=False)}}}'
    choice = f'{{"index":{index},"delta":{delta},"finish_reason":{json.dumps(finish)}}}'
    return f'data: {{"id":"x","choices":[{choice}]{extra}}}\n\n'.encode()


def error(body: str) -> bytes:
    return f'data: {{"error":{body}}}\n\n'.encode()


A, B, STOP = chunk("a"), chunk("b"), chunk(finish="stop")
USAGE_EVENT = f'data: {{"id":"x","choices":[],"usage":{COUNTS}}}\n\n'.encode()
FAILED = error('{"message":"engine failed","type":"server_error","param":null,"code":500}')


def play(
    *reads: bytes, wants_usage: bool = False, choices: int = 1, clean: bool = True
) -> tuple[Step, StreamRules]:
    """All steps of a stream as one, and the rules at its end."""
    rules = StreamRules("chat", wants_usage, choices)
    steps = []
    for data in reads:
        steps.append(rules.feed(data))
        if steps[-1].done or steps[-1].error:
            break
    else:
        steps.append(rules.finish(clean))
    assert sum(s.first_event for s in steps) == rules.started
    whole = Step(
        data=b"".join(s.data for s in steps),
        first_event=steps[0].first_event,
        error=steps[-1].error,
        done=steps[-1].done,
        output_estimate=sum(s.output_estimate for s in steps),
    )
    assert rules.sent is bool(whole.data)
    return whole, rules


def result(*reads: bytes, **how: Any) -> tuple[bytes, str | int | None, bool]:
    """(data, the error's code, done)."""
    step, _ = play(*reads, **how)
    return step.data, step.error and step.error.code, step.done


def test_plain_events_after_the_first_go_on_unread() -> None:
    rules = StreamRules("chat", wants_usage=False)
    rules.feed(A)
    broken = b'data: {"choices":[{"delta"\n\n' + B

    step = rules.feed(broken)

    assert step.data is broken
    assert step == Step(data=broken, output_estimate=2)


def test_a_whole_answer_ends_with_one_done_and_nothing_after_it() -> None:
    assert result(A, STOP, DONE) == (A + STOP + DONE, None, True)
    assert result(A + STOP + DONE + B + DONE) == (A + STOP + DONE, None, True)

    rules = StreamRules("chat", wants_usage=False)
    rules.feed(A + STOP + DONE)
    assert rules.feed(B) == rules.finish(clean=True) == Step(done=True)


def test_the_first_event_is_the_first_with_data() -> None:
    rules = StreamRules("chat", wants_usage=False)

    assert rules.feed(b": keep-alive\n\nretry: 3\n\ndata:\n\n") == Step()
    assert not rules.started
    assert rules.feed(A) == Step(data=A, first_event=True, output_estimate=1)
    assert rules.feed(B) == Step(data=B, output_estimate=1)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("cut", [b"", b'data: {"id":"x","choi', b"data: {}", b"dat", b": x"])
def test_an_end_before_the_choice_has_ended_is_an_error(clean: bool, cut: bytes) -> None:
    data, code, done = result(A, B, cut, clean=clean)

    assert (code, done) == ("incomplete_answer", False)
    assert data.removesuffix(b"data: {}\n\n") == A + B


@pytest.mark.parametrize("clean", [True, False])
def test_an_end_without_done_is_good_where_the_choice_has_ended(clean: bool) -> None:
    assert result(A, STOP, clean=clean) == (A + STOP + DONE, None, True)
    assert result(A, STOP, b'data: {"id', clean=clean) == (A + STOP + DONE, None, True)


def test_a_broken_connection_may_have_cost_the_usage_that_was_asked_for() -> None:
    wanting: dict[str, Any] = {"wants_usage": True}

    assert result(A, STOP, clean=False, **wanting) == (A + STOP, "incomplete_answer", False)
    assert result(A, STOP, clean=True, **wanting) == (A + STOP + DONE, None, True)
    assert result(A, STOP, USAGE_EVENT, clean=False, **wanting)[1:] == (None, True)


def test_each_choice_must_end() -> None:
    other = chunk("x", index=1)
    ended = [chunk("x", finish="length", index=1), STOP]

    assert result(A, other, STOP, choices=2)[1:] == ("incomplete_answer", False)
    assert result(A, other, *ended, choices=2)[1:] == (None, True)
    assert result(other, STOP, choices=1)[1:] == ("incomplete_answer", False)
    assert result(A, STOP, chunk("y", finish="", index=1))[1:] == ("incomplete_answer", False)


def test_the_last_event_needs_no_line_end() -> None:
    assert result(A, STOP[:-2]) == (A + STOP + DONE, None, True)
    assert result(A, STOP[:-1]) == (A + STOP + DONE, None, True)
    assert result(A, STOP, DONE[:-2]) == (A + STOP + DONE, None, True)
    assert result(A, STOP[:-2], clean=False) == (A, "incomplete_answer", False)


def test_an_error_event_ends_the_answer_and_is_told_not_sent() -> None:
    step, rules = play(A, B + FAILED + DONE)

    assert step.data == A + B
    assert step.error is not None and not step.done
    assert (step.error.message, step.error.type) == ("engine failed", "server_error")
    assert (step.error.code, step.error.status) == (500, 500)
    assert rules.feed(DONE) == Step(error=step.error)
    assert rules.finish(clean=True) == Step(error=step.error)


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        (error('{"message":"too long","type":"t","param":null,"code":400}'), 400, "too long"),
        (error('{"message":"too long","type":"t","code":null}'), None, "too long"),
        (b'data: {"error":"too long","error_type":"validation"}\n\n', None, "too long"),
        (b'event: error\ndata: {"message":"too long","code":422}\n\n', 422, "too long"),
        (b'error: {"code":503,"message":"loading"}\n\n', 503, "loading"),
        (b'data: {"object":"error","message":"no","code":404}\n\n', 404, "no"),
    ],
)
def test_an_error_as_first_event_can_become_a_status(
    event: bytes, status: int | None, message: str
) -> None:
    step, rules = play(b": ping\n\n" + event)

    assert step.data == b"" and not rules.sent
    assert step.error is not None
    assert (step.error.status, step.error.message) == (status, message)
    assert json.loads(step.error.body)["error"]["message"] == message


@pytest.mark.parametrize("nothing", ["null", "{}", '""', "false"])
def test_an_error_that_says_nothing_is_none(nothing: str) -> None:
    event = chunk("a", extra=f',"error":{nothing}')

    assert result(event, event, STOP, DONE) == (event + event + STOP + DONE, None, True)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("body", [b"", b": ping\n\n", DONE, b"data:\n\n" + DONE])
def test_a_stream_without_an_event_is_an_error(body: bytes, clean: bool) -> None:
    assert result(body, clean=clean) == (b"", "empty_answer", False)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{\n  "error": {\n    "code": 503\n  }\n}\n', "bad_event_stream"),
        (b"<html>", "bad_event_stream"),
        (b"data: overloaded\n\n", "bad_event"),
        (b"data: [1]\n\n", "bad_event"),
        (b'data: {"finish_reason":"stop"\n\n', "bad_event"),
        (b'data: {"error":' + b"[" * 100_000 + b"\n\n", "bad_event"),
    ],
)
def test_what_breaks_the_format_is_an_error_after_what_came_before(data: bytes, code: str) -> None:
    for reads in ([A, B, data], [A + B + data]):
        step, _ = play(*reads)
        assert (step.data, step.done) == (A + B, False)
        assert step.error is not None and (step.error.code, step.error.status) == (code, 502)


def test_an_event_over_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 200)
    large = chunk("x" * 200)

    assert result(A, large) == result(A, large[:100], large[100:]) == (A, "event_too_large", False)


def test_without_a_wish_for_usage_none_is_seen() -> None:
    before = chunk("b", extra=f',"usage":{COUNTS},"n":1.50')
    after = chunk("b", extra=',"n":1.50')
    null = chunk("c", extra=',"usage": null')
    empty = chunk("d", extra=',"usage":{}')
    bare = f'data: {{"id":"x","usage":{COUNTS}}}\n\n'.encode()

    stop = chunk(finish="stop", extra=',"usage": null')

    step, rules = play(A, before, null, empty, stop, USAGE_EVENT, bare, DONE)

    assert step.data == A + after + null + chunk("d") + stop + DONE
    assert step.output_estimate == 5
    assert rules.usage == USAGE


def test_with_a_wish_for_usage_chunks_pass_unchanged_and_one_event_tells_it() -> None:
    reads = [A, chunk("b", extra=f',"usage":{COUNTS}'), STOP, USAGE_EVENT]

    none = b'data: {"choices":[],"usage":{}}\n\n'
    step, rules = play(*reads[:3], none, USAGE_EVENT, USAGE_EVENT, DONE, wants_usage=True)

    assert step.data == b"".join(reads) + DONE
    assert rules.usage == USAGE


@pytest.mark.parametrize("choices", ["", ',"choices":null'])
def test_a_usage_event_without_choices_gets_them(choices: str) -> None:
    event = f'data: {{"id":"x"{choices},"usage":{COUNTS}}}\n\n'.encode()
    step, _ = play(A, STOP, event, DONE, wants_usage=True)

    shown = step.data.removeprefix(A + STOP).removesuffix(DONE)
    assert json.loads(shown[6:]) == {"id": "x", "choices": [], "usage": json.loads(COUNTS)}


def test_an_empty_usage_never_replaces_a_real_one() -> None:
    later = [
        chunk("b", extra=f',"usage":{none}') for none in ("null", "{}", '{"prompt_tokens":null}')
    ]
    _, rules = play(chunk("a", extra=f',"usage":{COUNTS}'), *later, STOP, DONE)

    assert rules.usage == USAGE


def test_events_before_a_dropped_first_one_do_not_count_as_sent() -> None:
    step, rules = play(USAGE_EVENT, FAILED)

    assert step.first_event and step.data == b"" and not rules.sent


def test_fields_other_than_data_never_reach_the_client() -> None:
    noisy = b"id: 8\n" + A + b"event: message\n" + B + b": c\n\nid: 7\n\nretry: 1\n\ndata: \n\n"

    assert result(noisy, STOP, DONE) == (A + B + STOP + DONE, None, True)


def test_tool_calls_of_one_chunk_stay_in_their_order() -> None:
    calls = '"tool_calls":[{"index":0,"id":"c1"},{"index":0,"function":{"arguments":" {"}}]'
    event = f'data: {{"choices":[{{"index":0,"delta":{{{calls}}},"finish_reason":null}}]}}\n\n'

    assert result(event.encode(), STOP, DONE)[0] == event.encode() + STOP + DONE


def test_an_unknown_dialect_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        StreamRules("morse", wants_usage=False)


# --- any stream, cut anywhere


def events_of(data: bytes) -> list[bytes]:
    assert not data or data.endswith(b"\n\n")
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


NOISE = [b": ping\n\n", b":\n", b"id: 7\nevent: message\n", b"retry: 3\n\n", b"data:\n\n", b"\n"]
LINES = [
    chunk('é👩‍👧 \\n"usage"'),
    B,
    B,
    B[:5] + B[6:],
    b"data: {\ndata: }\n\n",
    b"data:  {}\n\n",
    b"data: {} \n\n",
]
USAGES = [USAGE_EVENT, chunk(extra=f',"usage":{COUNTS}'), chunk(extra=',"usage":{}')]
ENDS = [STOP, chunk(finish="length", index=1), DONE, FAILED, b"<x>\n", b"data: x\n\n", STOP[:-2]]
STREAMS = st.lists(st.sampled_from([*NOISE, *LINES, *USAGES, *ENDS]), max_size=12)
CUTS = st.lists(st.integers(0, 1500), max_size=40)


@settings(deadline=None, max_examples=300)
@given(STREAMS, CUTS, st.booleans(), st.booleans())
def test_how_a_stream_is_cut_into_reads_never_matters(
    events: list[bytes], at: list[int], wants_usage: bool, clean: bool
) -> None:
    text = b"".join(events)
    how: dict[str, Any] = {"wants_usage": wants_usage, "clean": clean}
    step, rules = play(text, **how)
    assert play(*events, **how)[0].data == step.data  # cut at boundaries: the fast path
    for end in (b"\n", b"\r\n", b"\r"):
        other = text.replace(b"\n", end)
        edges = [0, *sorted(min(place, len(other)) for place in at), len(other)]
        cut_step, cut_rules = play(*(other[a:b] for a, b in pairwise(edges)), **how)

        assert cut_rules.usage == rules.usage
        assert (cut_step.data, cut_step.error) == (step.data, step.error)
        assert (cut_step.done, cut_step.output_estimate) == (step.done, step.output_estimate)


@settings(deadline=None, max_examples=300)
@given(STREAMS, st.booleans(), st.booleans())
def test_what_a_client_gets_is_always_well_formed(
    events: list[bytes], wants_usage: bool, clean: bool
) -> None:
    step, _ = play(*events, wants_usage=wants_usage, clean=clean)

    assert step.done is (step.error is None)
    assert step.data.count(DONE) == step.done and step.data.endswith(DONE) is step.done
    told = 0
    for event in events_of(step.data.removesuffix(DONE)):
        shown = json.loads(event.replace(b"\ndata: ", b"\n").removeprefix(b"data: "))
        told += shown.get("choices") == []
        assert wants_usage or not ("usage" in shown or shown.get("choices") == [])
    assert told <= 1
    if step.error is not None:
        ending = error_event("chat", step.error.message, step.error.type, step.error.code)
        assert ending.endswith(DONE) and json.loads(events_of(ending)[0][6:])
