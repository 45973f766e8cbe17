"""From the log of a durable job to server-sent events that can be resumed at each. Pure.

An event's id is `<entry>.<number>`: the log's last entry that ended together with an event, and how
many events have come since. So who comes again is read from that entry on, and not from the first.
The event that ends all has `<entry>.end`.
"""

import re

import msgspec

from common.joblog import Entry
from common.wire import Data, End, Head

_ID = re.compile(r"([1-9][0-9]{0,15})-([0-9]{1,15})\.([0-9]{1,9}|end)\Z", re.ASCII)


class Place(msgspec.Struct, frozen=True):
    """How far a reader has got."""

    attempt: int
    number: int
    """Of the entry."""
    events: int | None
    """Events behind it; None: it has all there is."""

    @property
    def entry(self) -> str:
        """The entry's id."""
        return f"{self.attempt}-{self.number}"

    def beyond(self, last: Entry) -> bool:
        """Whether the log does not reach so far. `last`: its last entry."""
        attempt, _, number = last.id.partition("-")
        behind = self.events is not None and self.events > 0
        return (self.attempt, self.number + behind) > (int(attempt), int(number))


def parse(id: str) -> Place | None:
    """The place that an event's id tells; None where it is none."""
    found = _ID.match(id)
    if found is None:
        return None
    events = None if found[3] == "end" else int(found[3])
    return Place(int(found[1]), int(found[2]), events)


class Event(msgspec.Struct, frozen=True):
    """One event to be sent."""

    id: str
    data: bytes
    """As the engine wrote it, with the blank line at its end; of a restart, ours."""
    restarts: bool = False
    """Not the engine's: the answer begins anew."""

    def encoded(self) -> bytes:
        """With its id."""
        return b"id: " + self.id.encode() + b"\n" + self.data


class Cutter:
    """Cuts one reader's entries into events. What it holds back is less than an event, or the body
    of an answer that is no stream."""

    def __init__(self, place: Place | None = None) -> None:
        """`place`: where the reader has got, None: it has nothing."""
        self.after = place.entry if place else ""
        """The last entry that was read: the next is behind it."""
        self.head: Head | None = None
        self.end: End | None = None
        """What has ended it."""
        self._attempt = place.attempt if place else 0
        self._skip = (place.events or 0) if place else 0
        self._base = self.after
        self._count = 0
        self._held: list[bytes] = []

    @property
    def stream(self) -> bool:
        """Whether its answer is an event stream. Who resumes behind the first entry has one."""
        return self.head.stream if self.head else not self._base.endswith("-0")

    @property
    def body(self) -> bytes:
        """The body of an answer that is no stream, as far as it has come."""
        return b"" if self.stream else b"".join(self._held)

    def take(self, entry: Entry) -> list[Event]:
        """The events that an entry completes."""
        found: list[Event] = []
        for frame in entry.frames:
            if isinstance(frame, End):
                self.end = frame
                continue
            if entry.attempt != self._attempt:
                found += self._begin(entry.attempt)
            if isinstance(frame, Head):
                self.head = frame
            else:
                found += self._data(frame)
        self.after = entry.id
        if self.stream and not self._held and self.end is None:
            # A log whose end was written again has it in other entries: what is to be skipped may
            # be in several.
            self._skip = max(0, self._skip - self._count)
            self._base, self._count = entry.id, 0
        return found

    def next_id(self) -> str:
        """The id of one more event, which is not in the log."""
        self._count += 1
        return f"{self._base}.{self._count}"

    def last_id(self) -> str:
        """The id of the event that ends all."""
        return f"{self.after or '1-0'}.end"

    def has_result(self) -> bool:
        """Whether a reader that resumed has the body of an answer that is no stream."""
        return self._skip > 0 and not self.stream

    def _begin(self, attempt: int) -> list[Event]:
        again, self._attempt = self._attempt > 0, attempt
        self._base, self._count, self._skip = f"{attempt}-0", 0, 0
        self.head, self._held = None, []
        if not again:
            return []
        data = b'event: restart\ndata: {"attempt":%d}\n\n' % attempt
        return [Event(f"{self._base}.0", data, restarts=True)]

    def _data(self, frame: Data) -> list[Event]:
        self._held.append(frame.data)
        if not self.stream or frame.more:
            return []
        text, self._held = b"".join(self._held), []
        *whole, rest = text.split(b"\n\n")
        if rest:
            self._held.append(rest)
        found = []
        for event in whole:
            self._count += 1
            if self._count > self._skip:
                found.append(Event(f"{self._base}.{self._count}", event + b"\n\n"))
        return found
