"""The events of `/v1/responses`: named and numbered; the one with the whole response is the last.

There is no `[DONE]`. Pure.
"""

import re

import msgspec

from common.intake import answers
from common.wire import Usage
from dispatcher.bodies import ErrorInfo, decode_object, make_error, read_error, read_tokens

_ENDS = re.compile(rb'"response\.(?:completed|incomplete|failed)"').search
_WHOLE = (b'"response.completed"', b'"response.incomplete"')
_FAILED = b'"response.failed"'
_NULL = msgspec.Raw(b"null")


def says_more(data: bytes) -> bool:
    """Whether events may hold an error or the end of the response.

    As in the other dialects a text cannot hide the words, for inside a string their quotes would be
    escaped.
    """
    return b'"error"' in data or _ENDS(data) is not None


class ResponseReader:
    """Reads the events of one response."""

    def __init__(self, wants_usage: bool, choices: int) -> None:
        self.usage: Usage | None = None
        """The usage of the whole response, once it is there."""
        self._complete = False

    def read(self, payload: bytes) -> bytes | ErrorInfo | None:
        """What the client gets of an event's data: the data, or an error."""
        event = decode_object(payload)
        if event is None:
            return make_error("The engine sent an event that is no JSON.", code="bad_event")
        kind = bytes(event.get("type", _NULL))
        response = decode_object(event.get("response", _NULL)) or {}
        if kind == b'"error"' or (kind == b"null" and "error" in event):
            return read_error(payload)
        if kind == _FAILED:
            return read_error(b'{"error":' + bytes(response.get("error", _NULL)) + b"}")
        if kind in _WHOLE:
            self._complete = True
            self.usage = read_tokens(response.get("usage", _NULL))
        return payload

    def complete(self, clean: bool) -> bool:
        """Whether the whole response has come."""
        return self._complete


def error_event(error: ErrorInfo) -> bytes:
    """`response.failed`, which ends a begun stream."""
    return answers.error_event(error.body, "responses")


def to_stream(body: bytes, wants_usage: bool) -> bytes:
    """Raises ValueError: the events of a response cannot be told from it alone."""
    raise ValueError("a response is no stream of events")
