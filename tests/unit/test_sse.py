import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher import sse
from dispatcher.sse import (
    Event,
    EventTooLarge,
    NotEventStream,
    SseParser,
    encode,
    is_plain,
    plain_events,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"


def read(*reads: bytes) -> list[Event]:
    """The events of a stream cut as given, with what the end of its body leaves."""
    parser = SseParser()
    events = [event for data in reads for event in parser.events(data)]
    last = parser.flush()
    return events if last is None else [*events, last]


def payloads(*reads: bytes) -> list[bytes]:
    return [event.data for event in read(*reads)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_end_at_a_blank_line_whatever_the_line_ends(end: bytes) -> None:
    text = b"data: {1}\n\ndata: {2}\n\n".replace(b"\n", end)

    assert payloads(text) == [b"{1}", b"{2}"]


def test_a_carriage_return_ends_its_line_before_its_line_feed_has_come() -> None:
    parser = SseParser()

    assert list(parser.events(b"data: {1}\r\n\r")) == [Event(b"", b"{1}")]
    assert parser.at_boundary
    assert list(parser.events(b"\ndata: {2}\r")) == []
    assert list(parser.events(b"\r")) == [Event(b"", b"{2}")]
    assert list(parser.events(b"data: {3}\r\r")) == [Event(b"", b"{3}")]


def test_an_empty_read_between_the_halves_of_a_line_end_changes_nothing() -> None:
    assert payloads(b"data: {1}\r", b"", b"\ndata: {2}\r", b"", b"\n\r", b"", b"\n") == [
        b"{1}\n{2}"
    ]


@pytest.mark.parametrize(
    ("line", "payload"),
    [
        (b"data: {}", b"{}"),
        (b"data:{}", b"{}"),
        (b"data:  {}", b" {}"),
        (b"data: {} ", b"{} "),
        (b"data: a: b", b"a: b"),
    ],
)
def test_one_space_after_the_colon_is_no_part_of_the_value(line: bytes, payload: bytes) -> None:
    assert payloads(line + b"\n\n") == [payload]


def test_lines_of_data_are_joined_and_encoded_as_lines_again() -> None:
    text = b"data: {\ndata: \ndata: }\n\n"

    assert payloads(text) == [b"{\n\n}"]
    assert encode(b"{\n\n}") == text


def test_the_event_field_names_the_event_and_no_later_one() -> None:
    assert read(b"event: ping\nevent: error\ndata: {1}\n\ndata: {2}\n\n") == [
        Event(b"error", b"{1}"),
        Event(b"", b"{2}"),
    ]


def test_an_error_field_is_an_event_of_that_name() -> None:
    assert read(b'error: {"code":500}\n\n') == [Event(b"error", b'{"code":500}')]


@pytest.mark.parametrize(
    "noise",
    [
        b": ping\n\n",
        b":\n",
        b":no space\n",
        b"retry: 3000\n\n",
        b"id: 7\nevent: message\n\n",
        b"data:\n\n",
        b"data: \n\n",
        b"data\n\n",
        b"\n\n\n",
        b"x-other_1: what\n",
    ],
)
def test_comments_other_fields_and_empty_events_are_dropped(noise: bytes) -> None:
    assert payloads(noise + b"data: {1}\n\n" + noise + b"data: {2}\n\n" + noise) == [
        b"{1}",
        b"{2}",
    ]


def test_a_comment_inside_an_event_leaves_it_whole() -> None:
    assert payloads(b"data: {\n: ping\nid: 8\ndata: }\n\n") == [b"{\n}"]


def test_a_byte_order_mark_may_precede_the_first_line_only() -> None:
    mark = b"\xef\xbb\xbf"

    assert payloads(mark + b"data: {1}\n\n") == [b"{1}"]
    assert payloads(mark[:1], mark[1:], b"data: {1}\n\n") == [b"{1}"]
    with pytest.raises(NotEventStream):
        payloads(b"data: {1}\n\n", mark + b"data: {2}\n\n")


@pytest.mark.parametrize("tail", [b"", b"\n", b"\r"])
def test_the_end_of_the_body_ends_the_last_event(tail: bytes) -> None:
    assert payloads(b"data: {1}\n\ndata: [DONE]" + tail) == [b"{1}", b"[DONE]"]


def test_an_end_within_a_field_name_or_comment_leaves_nothing() -> None:
    for tail in (b"dat", b"id", b": pi", b"event: x"):
        assert payloads(b"data: {1}\n\n" + tail) == [b"{1}"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"error": {"code": 503}}',
        b"{",
        b' "error": {',
        b"<html>",
        b"Internal Server Error",
        b" data: {2}",
        b"upstream error: gone",
    ],
)
def test_text_that_is_no_field_is_an_error_after_the_events_before_it(line: bytes) -> None:
    seen = []
    with pytest.raises(NotEventStream):
        for event in SseParser().events(b"data: {1}\n\n" + line + b"\ndata: {3}\n\n"):
            seen.append(event.data)

    assert seen == [b"{1}"]


def test_such_text_without_a_line_end_is_an_error_at_the_end_of_the_body() -> None:
    parser = SseParser()
    list(parser.events(b"<html>"))

    with pytest.raises(NotEventStream):
        parser.flush()


@pytest.mark.parametrize("step", [1, 7, 64])
def test_an_event_may_be_as_large_as_the_limit(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    line = b"data: " + b"x" * 94
    text = line + b"\n\n"

    assert payloads(*cut(text, range(step, len(text), step))) == [b"x" * 94]
    with pytest.raises(EventTooLarge):
        payloads(*cut(b"data: x" + text[6:], range(step, len(text), step)))


def test_the_limit_holds_over_all_lines_of_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)

    with pytest.raises(EventTooLarge):
        payloads(b"data: 0123456789\n" * 11)


def test_the_limit_holds_for_a_comment_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)

    parser = SseParser()

    for _ in range(8):
        assert list(parser.events(b": still here")) == []
    with pytest.raises(EventTooLarge):
        list(parser.events(b": still here"))


def test_sixteen_mebibytes_come_whole() -> None:
    text = b"data: {" + b"x" * (16 << 20) + b"}\n\n"

    assert payloads(*cut(text, range(65_536, len(text), 65_536))) == [text[6:-2]]


def test_the_parser_is_at_a_boundary_between_events_only() -> None:
    parser = SseParser()
    assert not parser.at_boundary
    for data, boundary in [
        (b"data: {1}\n", False),
        (b"\n", True),
        (b": comment\n", True),
        (b": com", False),
        (b"ment\n", True),
        (b"event: x\n", False),
        (b"\n", True),
        (b"id: 3\n", True),
    ]:
        list(parser.events(data))
        assert parser.at_boundary is boundary, data


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (b"data: {1}\n\n", True),
        (b"data: {1}\n\ndata: {2}\n\n", True),
        (b"", False),
        (b"data: {1}\n", False),
        (b"data: {1}", False),
        (b"data: {1}\n\n\n", False),
        (b"data: {1}\n\n\n\n", False),
        (b"\n\ndata: {1}\n\n", False),
        (b"data: {1}\n\ndata: {2}\n", False),
        (b"data: {1}\ndata: {2}\n\n", False),
        (b"data: {1}\n: ping\n\n", False),
        (b"data: {1}\n\n: ping\n\n", False),
        (b"data: {1}\nid: 7\n\n", False),
        (b"data: {1}\r\n\r\n", False),
        (b"data: {1\r}\n\n", False),
        (b"data:{1}\n\n", False),
        (b"data: [DONE]\n\n", False),
        (b"data: {1}\n\ndata: [DONE]\n\n", False),
        (b"data: \n\n", False),
        (b"event: x\ndata: {1}\n\n", False),
        (b"\xef\xbb\xbfdata: {1}\n\n", False),
    ],
)
def test_plain_bytes_are_whole_events_of_one_line(data: bytes, plain: bool) -> None:
    assert is_plain(data) is plain


def test_nothing_over_the_limit_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 10)

    assert is_plain(b"data: {}\n\n")
    assert not is_plain(b"data: {1}\n\n")


PIECES = st.sampled_from(
    [
        *(b"data: {", b"data:", b"}", b"\n", b"\n\n", b"\r", b"\r\n", b": c", b"id: 1", b" "),
        *(
            b"event: e",
            b"x",
            "é👩‍👧".encode(),
            b"data: {1}\n\n",
            b"[DONE]",
            b"error: e",
            b"\xef\xbb\xbf",
        ),
    ]
)
CUTS = st.lists(st.integers(0, 200), max_size=30)


def cut(text: bytes, at: list[int] | range) -> list[bytes]:
    edges = [0, *sorted(min(place, len(text)) for place in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def read_or_fail(reads: list[bytes]) -> tuple[list[Event], bool]:
    parser, events = SseParser(), []
    try:
        for data in reads:
            for event in parser.events(data):
                events.append(event)
        last = parser.flush()
    except NotEventStream:
        return events, True
    return events if last is None else [*events, last], False


@settings(deadline=None)
@given(st.lists(PIECES, max_size=20).map(b"".join), CUTS)
def test_how_a_stream_is_cut_into_reads_never_matters(text: bytes, at: list[int]) -> None:
    assert read_or_fail(cut(text, at)) == read_or_fail([text])


@settings(deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=8).map(b"".join))
def test_plain_bytes_read_and_encoded_again_are_the_same(text: bytes) -> None:
    text = b"data: {" + text + b"\n\n"
    if is_plain(text):
        events = read(text)
        assert plain_events(text) == events
        assert b"".join(encode(event.data) for event in events) == text


@pytest.mark.parametrize("name", ["responses_stream", "messages_stream"])
def test_named_events_of_a_real_engine(name: str) -> None:
    events = read((FIXTURES / f"{name}.body").read_bytes())

    assert len(events) > 5
    assert all(json.loads(event.data)["type"].encode() == event.name for event in events)
