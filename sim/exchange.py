"""One call in progress: turns what the engine produces into the bytes that a client reads."""

from __future__ import annotations

from typing import Protocol

from sim.fields import ApiError
from sim.openai import Call
from sim.replies import DONE, StreamReply, embeddings_body, error_event, whole_body
from sim.responses import ResponseReply, response_body
from sim.text import FinishReason, text_base, token_text

Headers = list[tuple[str, str]]
JSON_HEADERS: Headers = [("content-type", "application/json"), ("vary", "Origin")]
SSE_HEADERS: Headers = [("content-type", "text/event-stream; charset=utf-8"), ("vary", "Origin")]


class Sink(Protocol):
    """Where an answer goes. Calls never block; `head` comes first, `end` or `broken` last."""

    def head(self, status: int, headers: Headers) -> None:
        """The status line and headers."""

    def chunk(self, data: bytes) -> None:
        """Bytes of the body: one event of a stream, or all of it."""

    def end(self) -> None:
        """The body is complete."""

    def broken(self) -> None:
        """The connection is lost before the end."""


def answer(sink: Sink, status: int, body: bytes, headers: Headers) -> None:
    """Send a whole answer."""
    sink.head(status, [("content-length", str(len(body))), *headers])
    if body:
        sink.chunk(body)
    sink.end()


class Exchange:
    """Collects the tokens of a call's choices and writes the answer to a sink.

    Holds at most the call's own output, which `max_model_len` bounds.
    """

    def __init__(
        self, call: Call, sink: Sink, request_id: str, created: int, seed: int, extra: Headers
    ) -> None:
        """`extra` are headers to add; `created` is Unix seconds."""
        self.call = call
        self.started = False
        self._sink = sink
        self._id = request_id
        self._created = created
        self._seed = seed
        self._extra = extra
        self._bases = [text_base(seed, choice.fingerprint) for choice in call.choices]
        make = ResponseReply if call.kind == "responses" else StreamReply
        self._reply = make(call, request_id, created) if call.stream else None
        self._open_choices = len(call.choices)
        self._texts: list[list[str]] = [[] for _ in call.choices]
        self._reasons: list[FinishReason] = ["stop"] * len(call.choices)

    def open(self) -> None:
        """A stream's headers go out at once, long before its first token."""
        if self._reply is not None:
            self._sink.head(200, [*SSE_HEADERS, *self._extra])

    def comment(self, line: bytes) -> None:
        """Write a comment into a stream that has not started."""
        if self._reply is not None and not self.started:
            self._sink.chunk(line)

    def token(self, index: int, number: int) -> None:
        """Token `number` (from 0) of choice `index`; the last one comes with `finished`."""
        if number + 1 < self.call.choices[index].sequence.output_tokens:
            self._put(index, number, None)

    def finished(self, index: int, tokens: int, reason: FinishReason) -> bool:
        """Choice `index` is complete; True when the whole call is."""
        self._reasons[index] = reason
        if tokens:
            self._put(index, tokens - 1, reason)
        self._open_choices -= 1
        if self._open_choices:
            return False
        self._finish()
        return True

    def fail(self, error: ApiError) -> None:
        """The engine died: an error status, or an event in an open stream and its usual end."""
        if self._reply is None:
            answer(self._sink, error.status, error.body, [*JSON_HEADERS, *self._extra])
            return
        if self.call.kind != "responses":  # whose streams just end
            self._sink.chunk(error_event(error.status, str(error), error.kind))
            self._sink.chunk(DONE)
        self._sink.end()

    def _put(self, index: int, number: int, finish: FinishReason | None) -> None:
        choice = self.call.choices[index]
        text = "" if choice.silent else token_text(self._bases[index], choice.first_token + number)
        if self._reply is None:
            self._texts[index].append(text)
            return
        if not self.started:
            self.started = True
            for event in self._reply.begin():
                self._sink.chunk(event)
        self._sink.chunk(self._reply.token(index, text, number + 1, finish))

    def _finish(self) -> None:
        produced = [choice.sequence.output_tokens for choice in self.call.choices]
        if self._reply is not None:
            for event in self._reply.end(sum(produced)):
                self._sink.chunk(event)
            self._sink.end()
            return
        if self.call.kind == "embeddings":
            body = embeddings_body(self.call, self._id, self._created, self._seed)
        elif self.call.kind == "responses":
            text, (tokens,), (why,) = "".join(self._texts[0]), produced, self._reasons
            body = response_body(self.call, self._id, self._created, text, tokens, why)
        else:
            texts = ["".join(words) for words in self._texts]
            body = whole_body(self.call, self._id, self._created, texts, produced, self._reasons)
        answer(self._sink, 200, body, [*JSON_HEADERS, *self._extra])
