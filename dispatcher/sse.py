"""Server-sent events: bytes from an engine in, whole events out.

The rules are the WHATWG event stream format's (HTML standard, section 9.2.6), stricter in one
point: a line whose field name is no plain word (a JSON text or an HTML page pasted into the
stream) ends the stream with an error, where the standard would skip it.

`is_plain` is the fast path: what it accepts is already in the form that `encode` gives and holds
whole events only, so it may be handed on as it is while the parser stands at a boundary.
"""

import re
from collections.abc import Iterator

import msgspec

from common.errors import FairlaneError

EVENT_BYTES_MAX = 32 * 1024 * 1024
"""The largest event, and the most that the parser holds back."""

_BOM = b"\xef\xbb\xbf"
_FIELD_NAME = re.compile(rb"[A-Za-z][A-Za-z0-9_-]*")


class SseError(FairlaneError):
    """An event stream that cannot be read on."""


class EventTooLarge(SseError):
    """An event, or a line of one, is larger than EVENT_BYTES_MAX."""


class NotEventStream(SseError):
    """A line that is neither a comment nor a field."""


class Event(msgspec.Struct, frozen=True):
    """One event with data."""

    name: bytes
    """Its `event:` field, empty where it has none."""
    data: bytes
    """Its data lines, joined by LF; never empty."""


def is_plain(data: bytes) -> bool:
    """Whether `data` is nothing but whole events of one `data: {…}` line each, ended by LF LF.

    Every LF is then one of a pair that ends an event, so counting them is enough: a few linear
    scans in C, and no copy.
    """
    return (
        data.startswith(b"data: {")
        and data.endswith(b"\n\n")
        and data.count(b"\n") == 2 * data.count(b"\n\ndata: {") + 2
        and b"\r" not in data
        and len(data) <= EVENT_BYTES_MAX
    )


def plain_events(data: bytes) -> list[Event]:
    """The events of bytes that `is_plain` accepts."""
    return [Event(b"", payload) for payload in data[6:-2].split(b"\n\ndata: ")]


def encode(data: bytes, name: bytes = b"") -> bytes:
    """An event that carries `data`, each line of which becomes a data line; with its name, if it
    has one."""
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    if name:
        return b"event: " + name + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"


class SseParser:
    """Reads one event stream, however it is cut into reads.

    Line ends may be LF, CRLF or CR; a CR ends its line at once, and an LF that follows it in a
    later read belongs to it. Comments, `id`, `retry` and unknown fields are dropped.
    """

    def __init__(self) -> None:
        self.at_boundary = False
        """Whether the next byte begins a line outside of any event, and not the first line (which
        a byte order mark may precede)."""
        self._line_parts: list[bytes] = []
        self._line_bytes = 0
        self._name = b""
        self._data: bytearray | None = None
        self._after_cr = False
        self._first_line = True

    def events(self, data: bytes) -> Iterator[Event]:
        """The events that `data` completes, to be iterated to the end or to an error.

        Raises EventTooLarge or NotEventStream after the events before the fault; the parser
        must not be used after that.
        """
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if not data:
            return
        self.at_boundary = False
        self._after_cr = data.endswith(b"\r")
        lines = data.splitlines()
        rest = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
        for line in lines:
            event = self._read_line(self._with_parts(line))
            if event is not None:
                yield event
        if rest:
            self._line_parts.append(rest)
            self._line_bytes += len(rest)
            self._check_size(self._line_bytes)
        held = self._line_parts or self._data is not None or self._name
        self.at_boundary = not held and not self._first_line

    def flush(self) -> Event | None:
        """The event that the end of the body leaves without its blank line or line end.

        Whether it is whole, only its reader can tell. Raises as `events` does.
        """
        if self._line_parts:
            self._read_line(self._with_parts(b""))
        return self._take_event()

    def _with_parts(self, line: bytes) -> bytes:
        if not self._line_parts:
            return line
        whole = b"".join((*self._line_parts, line))
        self._line_parts.clear()
        self._line_bytes = 0
        return whole

    def _check_size(self, line_bytes: int) -> None:
        held = 0 if self._data is None else len(self._data)
        if held + line_bytes > EVENT_BYTES_MAX:
            raise EventTooLarge(f"an event of more than {EVENT_BYTES_MAX} bytes")

    def _read_line(self, line: bytes) -> Event | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._take_event()
        self._check_size(len(line))
        colon = line.find(b":")
        name = line if colon < 0 else line[:colon]
        value_at = len(line) if colon < 0 else colon + 1
        if line.startswith(b" ", value_at):
            value_at += 1
        if name == b"data":
            self._add_data(line, value_at)
        elif name == b"event":
            self._name = line[value_at:]
        elif name == b"error":  # llama.cpp's server writes its errors as a field of this name
            self._name = name
            self._add_data(line, value_at)
        elif name and not _FIELD_NAME.fullmatch(name):
            raise NotEventStream("a line that is no field of an event stream")
        return None

    def _add_data(self, line: bytes, value_at: int) -> None:
        if self._data is None:
            self._data = bytearray()
        else:
            self._data += b"\n"
        self._data += memoryview(line)[value_at:]

    def _take_event(self) -> Event | None:
        name, data = self._name, self._data
        self._name, self._data = b"", None
        return Event(name, bytes(data)) if data else None
