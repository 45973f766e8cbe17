"""The dialects of event streams: one row for each way a path's events are read and written.

A row says which events must be decoded at all, what reads them, how an answer ends, how an error
looks inside a stream, and how a whole JSON answer becomes a stream.
"""

import re
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from common.wire import Usage
from dispatcher import responses
from dispatcher.bodies import (
    MALFORMED,
    ErrorInfo,
    decode_object,
    make_error,
    read_error,
    read_tokens,
)
from dispatcher.sse import encode

_CHOICES_MAX = 16_384
"""Choices of one answer whose ends are kept in mind."""

_FINISHED = re.compile(rb'"finish_reason"\s*+:\s*+"').search
_COUNTED = re.compile(rb'"usage"\s*+:\s*+(?!null)').search
_NULL = msgspec.Raw(b"null")
_EMPTY_LIST = msgspec.Raw(b"[]")
_NOTHING = (b"null", b"false", b'""', b"{}", b"[]")


class _Choice(msgspec.Struct):
    index: int | None = 0
    finish_reason: str | None = None


_choices = msgspec.json.Decoder(list[_Choice] | None)
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def says_more_than_text(data: bytes) -> bool:
    """Whether events of choices may hold an error, a usage or the end of a choice.

    The keys are looked for in the bytes: inside a string their quotes would be escaped, so a
    text cannot hide them, and one that names them costs a needless decoding at worst.
    """
    return (
        (b'"usage"' in data and _COUNTED(data) is not None)
        or b'"error"' in data
        or _FINISHED(data) is not None
    )


class ChoiceReader:
    """Reads the chunks of one chat or text completion."""

    def __init__(self, wants_usage: bool, choices: int) -> None:
        """`choices`: how many must end before the answer is whole."""
        self.usage: Usage | None = None
        """The last real usage; with continuous usage it grows with the stream."""
        self._wants_usage = wants_usage
        self._expected = max(1, choices)
        self._seen: set[int] = set()
        self._finished: set[int] = set()
        self._usage_event_sent = False

    def read(self, payload: bytes) -> bytes | ErrorInfo | None:
        """What the client gets of an event's data: itself, an edited one, None, or an error."""
        chunk = decode_object(payload)
        if chunk is None:
            return make_error("The engine sent an event that is no JSON.", code="bad_event")
        if _is_error(chunk):
            return read_error(payload)
        has_choices = self._note_choices(chunk.get("choices", _NULL))
        if "usage" not in chunk:
            return payload
        usage = read_tokens(chunk["usage"])
        if usage is not None:
            self.usage = usage
        if self._wants_usage:
            return payload if has_choices else self._usage_event(chunk, payload, usage)
        if not has_choices:
            return None
        if bytes(chunk.pop("usage")) == b"null":
            return payload
        return msgspec.json.encode(chunk)

    def complete(self, clean: bool) -> bool:
        """Whether nothing is missing from the answer but its final `[DONE]`.

        A broken connection (`clean` unset) may also have cost the usage the client asked for.
        """
        ended = len(self._finished) >= self._expected and self._seen <= self._finished
        return ended and (clean or not self._wants_usage or self.usage is not None)

    def _note_choices(self, raw: msgspec.Raw) -> bool:
        """Note which choices there are and which end; False where there are none."""
        try:
            choices = _choices.decode(raw)
        except MALFORMED:
            return True
        for choice in choices or ():
            index = choice.index or 0
            if len(self._seen) < _CHOICES_MAX:
                self._seen.add(index)
                if choice.finish_reason:
                    self._finished.add(index)
        return bool(choices)

    def _usage_event(
        self, chunk: dict[str, msgspec.Raw], payload: bytes, usage: Usage | None
    ) -> bytes | None:
        """The one event without choices that a client which asked for usage gets."""
        if usage is None or self._usage_event_sent:
            return None
        self._usage_event_sent = True
        if bytes(chunk.get("choices", _NULL)) != b"null":
            return payload
        chunk["choices"] = _EMPTY_LIST
        return msgspec.json.encode(chunk)


def _is_error(chunk: dict[str, msgspec.Raw]) -> bool:
    """`{"error": …}`, or an error without an envelope; an `error` that says nothing is none."""
    if "error" in chunk and bytes(chunk["error"]) not in _NOTHING:
        return True
    if "choices" in chunk:
        return False
    return b'"error"' in (bytes(chunk.get("object", _NULL)), bytes(chunk.get("type", _NULL)))


def _choice_error(error: ErrorInfo) -> bytes:
    fields = {"message": error.message, "type": error.type, "param": error.param}
    data = msgspec.json.encode({"error": {**fields, "code": error.code}})
    return encode(data) + encode(b"[DONE]")


Piece = dict[str, msgspec.Raw | dict[str, msgspec.Raw]]


def _chat_pieces(choice: dict[str, msgspec.Raw]) -> Iterator[Piece]:
    """A whole chat choice as one that brings its message and one that ends it."""
    message = decode_object(choice.get("message", _NULL))
    if message is None:
        raise ValueError("a choice without a message")
    delta = {k: v for k, v in message.items() if k == "content" or bytes(v) != b"null"}
    calls = _objects.decode(delta.pop("tool_calls", _EMPTY_LIST))
    if calls:
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        delta["tool_calls"] = msgspec.Raw(msgspec.json.encode(numbered))
    end_keys = ("finish_reason", "stop_reason")
    begun = {k: v for k, v in choice.items() if k not in ("message", *end_keys)}
    yield {**begun, "delta": delta, "finish_reason": _NULL}
    ended = {k: choice[k] for k in end_keys if k in choice}
    yield {"index": choice["index"], "delta": {}, "finish_reason": _NULL, **ended}


def _text_pieces(choice: dict[str, msgspec.Raw]) -> Iterator[Piece]:
    """A whole text choice is a chunk as it is."""
    if not bytes(choice.get("text", _NULL)).startswith(b'"'):
        raise ValueError("a choice without a text")
    yield {**choice}


def _choices_to_stream(
    body: bytes,
    wants_usage: bool,
    kind: str,
    pieces: Callable[[dict[str, msgspec.Raw]], Iterator[Piece]],
) -> bytes:
    answer = decode_object(body)
    if answer is None or _is_error(answer):
        raise ValueError("not a completion")
    usage = answer.pop("usage", _NULL)
    try:
        choices = _objects.decode(answer.get("choices", _EMPTY_LIST))
        if not choices:
            raise ValueError("a completion without choices")
        shown: list[list[Piece]] = []
        for number, choice in enumerate(choices):
            choice.setdefault("index", msgspec.Raw(b"%d" % number))
            shown += [[piece] for piece in pieces(choice)]
    except MALFORMED as e:
        raise ValueError(f"not a completion: {e}") from None
    base: dict[str, object] = {**answer, "object": kind}
    chunks = [{**base, "choices": choice} for choice in shown]
    if wants_usage and read_tokens(usage) is not None:
        chunks.append({**base, "choices": [], "usage": usage})
    # In JSON, line ends stand between tokens only; a data line must hold none.
    lines = (msgspec.json.encode(chunk).translate(_LINE_ENDS_TO_SPACES) for chunk in chunks)
    return b"".join(encode(line) for line in lines) + encode(b"[DONE]")


_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


def _chat_to_stream(body: bytes, wants_usage: bool) -> bytes:
    return _choices_to_stream(body, wants_usage, "chat.completion.chunk", _chat_pieces)


def _text_to_stream(body: bytes, wants_usage: bool) -> bytes:
    return _choices_to_stream(body, wants_usage, "text_completion", _text_pieces)


class Reader(Protocol):
    """Reads the events of one answer."""

    usage: Usage | None
    """The last real usage that the engine told."""

    def read(self, payload: bytes) -> bytes | ErrorInfo | None:
        """What the client gets of an event's data: itself, an edited one, None, or an error."""

    def complete(self, clean: bool) -> bool:
        """Whether nothing is missing from the answer but what ends all; `clean` is unset where the
        connection broke."""


class Dialect(msgspec.Struct, frozen=True):
    """One row: how a path's events are read and written."""

    needs_reading: Callable[[bytes], bool]
    """Whether events, by their bytes, must be decoded; the first one always is."""
    reader: Callable[[bool, int], Reader]
    """Made for an answer, of whether its client wants usage and how many choices it has."""
    done: bytes
    """The data of the event that ends every answer; empty: the one that completes it does."""
    error_event: Callable[[ErrorInfo], bytes]
    """An error and the end, for a client that has seen a part of the answer."""
    to_stream: Callable[[bytes, bool], bytes]
    named: bool = False
    """Whether its events have names."""


DIALECTS = {
    "chat": Dialect(says_more_than_text, ChoiceReader, b"[DONE]", _choice_error, _chat_to_stream),
    "completions": Dialect(
        says_more_than_text, ChoiceReader, b"[DONE]", _choice_error, _text_to_stream
    ),
    "responses": Dialect(
        responses.says_more, responses.ResponseReader, b"", responses.error_event,
        responses.to_stream, named=True,
    ),
}  # fmt: skip


def error_event(
    dialect: str, message: str, type: str, code: str | int | None, param: str | None = None
) -> bytes:
    """The bytes that end a begun stream with an error: one error event, then the end."""
    return DIALECTS[dialect].error_event(make_error(message, type=type, param=param, code=code))


def json_to_stream(dialect: str, body: bytes, wants_usage: bool) -> bytes:
    """A whole JSON answer as the stream that the client asked for, with its own values.

    Raises ValueError where it is no completion.
    """
    return DIALECTS[dialect].to_stream(body, wants_usage)
