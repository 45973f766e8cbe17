"""The rules for one streaming answer: what of an engine's bytes goes on to the client.

Whole events only, each exactly as it came or, where a rule says so, edited or dropped; exactly one
`[DONE]`, at the end of an answer that is whole; never an end that hides a truncation. What of a
read needs no look goes on byte for byte (DESIGN: the relay's fast path).
"""

from collections.abc import Iterable, Iterator

import msgspec

from common.wire import Usage
from dispatcher.bodies import ErrorInfo, decode_object, make_error, read_error
from dispatcher.dialects import DIALECTS
from dispatcher.sse import Event, EventTooLarge, SseError, SseParser, encode, is_plain, plain_events


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one read, or the end of the body, comes to."""

    data: bytes = b""
    """To be handed on: whole events, never a comment, never the error below."""
    first_event: bool = False
    """The first event of the stream is among those read, whether or not it is handed on."""
    error: ErrorInfo | None = None
    """The answer failed after `data`: nothing more comes of it. With `StreamRules.sent` unset
    it can still become an HTTP status (`error.status`, else 502, and `error.body`); otherwise
    it ends the stream as `dialects.error_event` writes it."""
    done: bool = False
    """The answer is whole; `data` ends with the dialect's last event."""
    output_estimate: int = 0
    """Events handed on: a rough count of tokens, until the engine tells its usage."""


class StreamRules:
    """Reads one engine stream to its end, an error, or the end of its body."""

    def __init__(self, dialect: str, wants_usage: bool, choices: int = 1) -> None:
        """`choices`: how many the request asks for (`n`, times its prompts).

        Raises KeyError where the dialect is none of `dialects.DIALECTS`.
        """
        self._dialect = DIALECTS[dialect]
        self._needs_reading = self._dialect.needs_reading
        self._reader = self._dialect.reader(wants_usage, choices)
        self._parser = SseParser()
        self.started = False
        """Whether an event has come; comments are none."""
        self.sent = False
        """Whether any data was handed on."""
        self._error: ErrorInfo | None = None
        self._done = False

    @property
    def usage(self) -> Usage | None:
        """The last real usage that the engine told."""
        return self._reader.usage

    def feed(self, data: bytes) -> Step:
        """The next bytes of the body. After the end or an error they are dropped."""
        if self._done or self._error is not None:
            return self._over()
        if not (self._parser.at_boundary and is_plain(data)):
            return self._step(self._parser.events(data))
        if self.sent and not self._needs_reading(data):
            return Step(data=data, output_estimate=data.count(b"\n\n"))
        return self._step(plain_events(data))

    def finish(self, clean: bool) -> Step:
        """The end of the body: `clean` where HTTP says so, unset where the connection broke."""
        if self._done or self._error is not None:
            return self._over()
        step = self._step(self._flushed() if clean else ())
        if self._done or self._error is not None:
            return step
        if self._reader.complete(clean):
            self._done = True
            data = step.data + (encode(self._dialect.done) if self._dialect.done else b"")
            return msgspec.structs.replace(step, data=data, done=True)
        if self.started:
            self._error = make_error(
                "The engine's answer ended before it was complete.", code="incomplete_answer"
            )
        else:
            self._error = _no_answer()
        return msgspec.structs.replace(step, error=self._error)

    def _over(self) -> Step:
        return Step(error=self._error, done=self._done)

    def _flushed(self) -> Iterator[Event]:
        """The event at the end of the body that lacks only its line ends, if it is whole."""
        event = self._parser.flush()
        if event is not None and (
            event.data.strip() == self._dialect.done or decode_object(event.data) is not None
        ):
            yield event

    def _step(self, events: Iterable[Event]) -> Step:
        had_started = self.started
        pieces: list[bytes] = []
        try:
            for event in events:
                piece = self._read(event)
                if piece:
                    pieces.append(piece)
                if self._done or self._error is not None:
                    break
        except SseError as e:
            code = "event_too_large" if isinstance(e, EventTooLarge) else "bad_event_stream"
            self._error = make_error(f"The engine's stream is broken: {e}.", code=code)
        self.sent = self.sent or bool(pieces)
        return Step(
            data=b"".join(pieces),
            first_event=self.started and not had_started,
            error=self._error,
            done=self._done,
            output_estimate=max(0, len(pieces) - self._done),
        )

    def _read(self, event: Event) -> bytes:
        """What goes on of one event, nothing where it is dropped or an error."""
        text = event.data.strip()
        if not text:
            return b""
        if text == self._dialect.done:
            return self._read_done()
        first, self.started = not self.started, True
        if event.name == b"error":
            self._error = read_error(text)
            return b""
        if not first and text.startswith(b"{") and not self._needs_reading(text):
            return self._encoded(event, event.data)
        verdict = self._reader.read(event.data)
        if isinstance(verdict, ErrorInfo):
            self._error = verdict
            return b""
        # Where nothing follows the event that completes an answer, that event is its end.
        self._done = not self._dialect.done and self._reader.complete(True)
        return b"" if verdict is None else self._encoded(event, verdict)

    def _encoded(self, event: Event, data: bytes) -> bytes:
        return encode(data, event.name if self._dialect.named else b"")

    def _read_done(self) -> bytes:
        if not self.started:
            self._error = _no_answer()
            return b""
        self._done = True
        return encode(self._dialect.done)


def _no_answer() -> ErrorInfo:
    return make_error("The engine ended its stream without an answer.", code="empty_answer")
