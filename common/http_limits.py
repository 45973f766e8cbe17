"""uvicorn's HTTP protocol with a bound on what it may be made to hold and to parse.

httptools has no limits of its own: an endless header, URL, chunk extension or trailer would be
kept, and parsed at quadratic cost, in a process that others wait for. What a client may send
without completing a head or delivering a part of a body is therefore limited, in bytes and time,
and so is how long it may leave untaken what it has asked for: nobody else would end that.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 << 10
"""Bytes of a head, a chunk's extension or trailers. What one read brings beyond it is parsed."""
HEAD_S = 30.0
"""A head that is not complete after so long ends its connection, as does one that never begins."""
UNTAKEN_S = 120.0
"""A client that takes nothing of what is held for it for so long is cut off."""


def _answer(status: bytes, code: bytes, message: bytes) -> bytes:
    body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"%s"}}' % (
        message,
        code,
    )
    head = b"connection: close\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
    return b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, head, body)


TOO_LARGE = _answer(
    b"431 Request Header Fields Too Large",
    b"head_too_large",
    b"The head of the request is too large, or came too slowly.",
)
NO_HTTP = _answer(b"400 Bad Request", b"invalid_http", b"The request is no valid HTTP/1.1.")


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    _unparsed = 0
    _advanced = False
    _late: asyncio.TimerHandle | None = None
    _untaken: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, self._refuse)

    def data_received(self, data: bytes) -> None:
        self._advanced = False
        super().data_received(data)
        if self._advanced:
            self._unparsed = 0
            self._in_time()
            return
        self._unparsed += len(data)
        if self._unparsed > HEAD_BYTES_MAX:
            self._refuse()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_S, self._refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def on_headers_complete(self) -> None:
        self._advanced = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        super().on_message_complete()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _look_later(self) -> None:
        held = self.transport.get_write_buffer_size()
        self._untaken = self.loop.call_later(UNTAKEN_S, self._look, held)

    def _look(self, before: int) -> None:
        """Cut the client off unless it has taken some of what was held for it. Closing would wait
        for it to take the rest."""
        if self.transport.get_write_buffer_size() < before:
            self._look_later()
        else:
            self.transport.abort()

    def _taken(self) -> None:
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _refuse(self) -> None:
        """Say why where a head has begun, and hang up."""
        self._hang_up(TOO_LARGE if self._unparsed else b"")

    def send_400_response(self, msg: str) -> None:
        self._hang_up(NO_HTTP)

    def _hang_up(self, answer: bytes) -> None:
        """With this answer, unless another one is under way."""
        self._in_time()
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle
        if answer and (cycle is None or cycle.response_complete):
            self.transport.write(answer)
        self.transport.close()
