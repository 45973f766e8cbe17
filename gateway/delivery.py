"""What a client gets of a job's frames: status, headers and bytes, decided step by step. Pure.

An event stream goes on as it comes. Any other body is held back up to HOLD_BYTES: sent whole it
has a length, and a failure in its midst can still be told with a status. Once bytes were sent, a
failure ends a stream with an error event and breaks any other body off, so that a truncation
never looks like success.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from common.intake.answers import TAIL_BYTES, Answer, Headers, ended, ending, error_event
from common.outcomes import Outcome
from common.wire import Data, End, Head

HOLD_BYTES = 256 << 10

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DROPPED = frozenset(
    {
        "connection", "content-encoding", "content-length", "date", "keep-alive",
        "proxy-authenticate", "server", "set-cookie", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers of an engine's answer that are about its own connection, not about the answer."""
_OF_STREAMS = _DROPPED | {"content-type", "cache-control", "x-accel-buffering"}
_WHOLE = (Outcome.FINISHED, Outcome.REFUSED)
"""Outcomes whose body is the engine's own, complete."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to send now."""

    status: int = 0
    """Not 0: status and headers come first."""
    headers: Headers = []
    data: bytes = b""
    last: bool = False
    """The answer ends with `data`."""
    broken: bool = False
    """The connection is to be cut after `data`."""
    forwards: bool = False
    """`data` is of the job's own answer."""
    taken: int = 0
    """Bytes of frames that are off our hands once this is sent."""


class Delivery:
    """One answer. Steps must be sent in the order in which they are made."""

    def __init__(self, job: str, retry_after_s: Callable[[], int], dialect: str = "chat") -> None:
        """`retry_after_s`: for failures that a later try may mend. `dialect`: how its stream ends,
        well or with an error."""
        self._dialect = dialect
        self._retry_after_s = retry_after_s
        self._job = (b"x-fairlane-job", job.encode())
        self.head: Head | None = None
        self.forwarded = False
        """Whether anything of the job's own answer was given out."""
        self._begun = False
        self._as_stream = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._inside_event = False
        self._flows = False
        self._tail = b""

    def reset(self) -> None:
        """The run so far is void: another one follows. Only where nothing was forwarded."""
        self.head = None
        self._held, self._held_bytes, self._inside_event = [], 0, False

    def take(self, frames: Sequence[Head | Data | End], queue_ms: int) -> Step | None:
        """The step that these frames make possible, if any. `queue_ms`: for its header."""
        chunks: list[bytes] = []
        end: End | None = None
        for frame in frames:
            if type(frame) is Data:
                chunks.append(frame.data)
                self._inside_event = frame.more
            elif type(frame) is Head:
                self.reset()
                chunks = []
                self.head = frame
            elif type(frame) is End:
                end = frame
        if self.head is None:
            return None if end is None else self.fail(self._ending(end))
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if self.head.stream:
            return self._stream(self.head, data, end, queue_ms)
        return self._body(self.head, data, end, queue_ms)

    def flow(self, frames: Sequence[Head | Data | End]) -> bytes | None:
        """The bytes of frames in the midst of a stream, to be sent as they are and taken when
        sent; None where `take` must look at them. The fast way for most of all frames."""
        if not self._flows:
            return None
        if len(frames) == 1:
            frame = frames[0]
            if type(frame) is not Data:
                return None
            data = frame.data
        else:
            chunks = [frame.data for frame in frames if type(frame) is Data]
            frame = frames[-1]
            if type(frame) is not Data or len(chunks) != len(frames):
                return None
            data = b"".join(chunks)
        self._inside_event = frame.more
        self._note_tail(data)
        return data

    def comment(self, place: int | None, eta_s: float | None = None) -> Step | None:
        """A comment line, which begins the stream where nothing was sent. None inside an event, and
        after the event that ends the stream.

        `eta_s`: seconds until its turn, where known; told in whole ones, never less than one.
        """
        if self._inside_event or (self._begun and not self._as_stream):
            return None
        if ended(self._tail, self._dialect):
            return None
        if self.head is not None or place == 0:
            text = b": waiting\n"
        else:
            text = b": queued"
            if place is not None:
                text += b" position=%d" % place
                text += b"" if eta_s is None else b" eta=%d" % max(1, round(eta_s))
            text += b"\n"
        if self._begun:
            return Step(data=text)
        self._begun = self._as_stream = True
        return Step(status=200, headers=[*_STREAM_HEADERS, self._job], data=text)

    def fail(self, answer: Answer) -> Step:
        """The end of an answer that failed, in whatever form is still possible."""
        if not self._begun:
            self._begun = True
            body = answer.body()
            head = [*answer.head(len(body)), self._job]
            return Step(status=answer.status, headers=head, data=body, last=True)
        if not self._as_stream:
            return Step(broken=True)
        return Step(data=self._closing(answer.body()), last=True)

    def _ending(self, end: End) -> Answer:
        return ending(end.outcome, end.message, self._retry_after_s())

    def _closing(self, error: bytes) -> bytes:
        """The bytes that end a stream with an error, unless its end was sent already."""
        if ended(self._tail, self._dialect):
            return b""
        event = error_event(error, self._dialect)
        return (b"\n\n" if self._inside_event else b"") + event

    def _note_tail(self, data: bytes) -> None:
        """Keep the last bytes sent, in which the stream's own end would show."""
        short = len(data) < TAIL_BYTES
        self._tail = (self._tail + data if short else data)[-TAIL_BYTES:]

    def _stream(self, head: Head, data: bytes, end: End | None, queue_ms: int) -> Step | None:
        size = len(data)
        if end is not None and not (end.outcome is Outcome.FINISHED and (data or self.forwarded)):
            if not (self._begun or data):
                return self.fail(self._ending(end))
            self._note_tail(data)
            data += self._closing(self._ending(end).body())
        elif not data and end is None:
            return None
        else:
            self._note_tail(data)
        begins, self._begun, self._as_stream = not self._begun, True, True
        self.forwarded = self._flows = self.forwarded or size > 0
        return Step(
            status=head.status if begins else 0,
            headers=self._headers(head, queue_ms) if begins else [],
            data=data,
            last=end is not None,
            forwards=size > 0,
            taken=size,
        )

    def _body(self, head: Head, data: bytes, end: End | None, queue_ms: int) -> Step | None:
        if self._as_stream:
            return self._body_after_comments(head, data, end)
        if self._begun:
            broken = end is not None and end.outcome not in _WHOLE
            last = end is not None and not broken
            return Step(data=data, last=last, broken=broken, forwards=True, taken=len(data))
        if end is not None and end.outcome not in _WHOLE:
            return self.fail(self._ending(end))
        self._held.append(data)
        self._held_bytes += len(data)
        if end is None and self._held_bytes <= HOLD_BYTES:
            return None
        body, self._held = b"".join(self._held), []
        headers = self._headers(head, queue_ms)
        if end is not None:
            headers.append((b"content-length", b"%d" % len(body)))
        self._begun = self.forwarded = True
        return Step(
            status=head.status, headers=headers, data=body, last=end is not None, forwards=True,
            taken=len(body),
        )  # fmt: skip

    def _body_after_comments(self, head: Head, data: bytes, end: End | None) -> Step | None:
        """A body that is no stream, whose status comes too late: told as an error event."""
        if self._held_bytes <= HOLD_BYTES:
            self._held.append(data)
            self._held_bytes += len(data)
        if end is None:
            return Step(taken=len(data)) if self._held_bytes > HOLD_BYTES else None
        body = b"".join(self._held)
        own = end.outcome in _WHOLE and head.status >= 400 and self._held_bytes <= HOLD_BYTES
        if not own or not _is_error(body):
            outcome = Outcome.REFUSED if end.outcome in _WHOLE else end.outcome
            body = ending(outcome, end.message).body()
        self.forwarded = True
        return Step(data=error_event(body, self._dialect), last=True, forwards=True)

    def _headers(self, head: Head, queue_ms: int) -> Headers:
        passed = (_passed(name, value, head.stream) for name, value in head.headers)
        kept = [header for header in passed if header is not None]
        ours = [self._job, (b"x-fairlane-queue-ms", b"%d" % queue_ms)]
        return [*_STREAM_HEADERS, *kept, *ours] if head.stream else [*kept, *ours]


@lru_cache(maxsize=512)
def _passed(name: str, value: str, stream: bool) -> tuple[bytes, bytes] | None:
    """A header as it is sent, None where it stays behind: one that an HTTP server refuses would
    cost the answer."""
    name = name.lower()
    token = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    if not token or not all(" " <= c <= "\xff" and c != "\x7f" for c in value):
        return None
    if name in (_OF_STREAMS if stream else _DROPPED):
        return None
    return name.encode(), value.encode("latin-1")


def _is_error(body: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(body).get("error"), dict | str)
    except (msgspec.MsgspecError, UnicodeError, AttributeError, RecursionError):
        return False
