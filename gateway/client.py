"""The client's end of one request, over raw ASGI: its headers and body in, bytes out, its leaving.

No request object of a framework stands between: this is the hot path, and leaving clients are
half of what a queue is about.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from common.intake.answers import COMPRESSED, TOO_SLOW, Answer, Headers, Refusal, too_large

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BODY_S = 300.0
"""A body may take so long to arrive."""
PART_S = 60.0
"""The next part of one that is read as it comes may take so long."""
_CLOSE = (b"connection", b"close")
_LINGER_S = 2.0
_LINGER_BYTES = 16 << 20
"""After an early answer the rest of the body is read and dropped up to here, for a connection
closed over unread bytes may lose the answer."""


class ClientGone(Exception):
    """The client left before its request was whole."""


class Client:
    """One request's client."""

    __slots__ = (
        "_encoding", "_length", "_receive", "_receiving", "_send", "_whole", "authorization", "cls",
        "complete", "gone", "method", "scope", "started",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._receiving: asyncio.Future[None] | None = None
        self.method: str = scope["method"]
        self.started = False
        """Whether the status was sent."""
        self.complete = False
        """Whether the whole answer was sent."""
        self.gone = False
        """Whether the client has left."""
        self.authorization: bytes | None = None
        self.cls: bytes | None = None
        """The header that names a class."""
        self._encoding: bytes | None = None
        self._length: int | None = None
        self._whole = True
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorization = value
            elif name == b"x-fairlane-class":
                self.cls = value
            elif name == b"content-encoding":
                self._encoding = value
            elif name == b"content-length":
                self._length = int(value) if value.isdigit() else None
                self._whole = self._length == 0
            elif name == b"transfer-encoding":
                self._whole = False

    @property
    def peer(self) -> str:
        """The other end's address."""
        client = self.scope.get("client")
        return str(client[0]) if client else "unknown"

    @property
    def headers(self) -> Iterable[tuple[bytes, bytes]]:
        """Names in lower case, and values, as they came."""
        headers: Iterable[tuple[bytes, bytes]] = self.scope["headers"]
        return headers

    async def read_body(self, limit: int) -> bytes:
        """The whole body. Raises Refusal for one that is compressed, larger than `limit` bytes (as
        soon as that is known) or too slow, ClientGone where the client leaves before its end."""
        self._expect(limit)
        try:
            async with asyncio.timeout(_BODY_S):
                return await self._read(limit)
        except TimeoutError:
            raise Refusal(TOO_SLOW) from None

    async def parts(self, limit: int, seconds: float) -> AsyncIterator[bytes]:
        """The body as it comes. Raises as `read_body`; it may take `seconds`, and be silent for
        PART_S."""
        self._expect(limit)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        size, more = 0, True
        while more:
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + PART_S)):
                    chunk, more = await self._part()
            except TimeoutError:
                raise Refusal(TOO_SLOW) from None
            size += len(chunk)
            if size > limit:
                raise Refusal(too_large(limit))
            yield chunk

    def _expect(self, limit: int) -> None:
        if self._encoding is not None and self._encoding.strip().lower() not in (b"", b"identity"):
            raise Refusal(COMPRESSED)
        if self._length is not None and self._length > limit:
            raise Refusal(too_large(limit))

    async def _part(self) -> tuple[bytes, bool]:
        """Some of the body, and whether more comes. Raises ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
            raise ClientGone
        more = message.get("more_body", False)
        if not more:
            self._whole = True
        return message.get("body", b""), more

    async def _read(self, limit: int) -> bytes:
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            chunk, more = await self._part()
            size += len(chunk)
            if size > limit:
                raise Refusal(too_large(limit))
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, more: bool) -> None:
        """Send a part of the body; without `more` it is the last. Returns once the bytes are on
        their way, which is what slows a reply down to its client."""
        if not more:
            self.complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        await self.start(status, headers)
        await self.write(b"" if self.method == "HEAD" else body, False)

    async def refuse(self, answer: Answer, extra: Headers | None = None) -> None:
        """Answer with an error; where the request's body is not read yet, the connection ends."""
        body = answer.body()
        head = answer.head(len(body)) + (extra or [])
        if self._whole:
            await self.respond(answer.status, head, body)
            return
        if _CLOSE not in head:
            head.append(_CLOSE)
        await self.start(answer.status, head)
        await self.write(b"" if self.method == "HEAD" else body, True)
        await self._linger()
        await self.write(b"", False)

    async def _linger(self) -> None:
        left = _LINGER_BYTES
        try:
            async with asyncio.timeout(_LINGER_S):
                while left > 0:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return

    def watch(self, left: Callable[[], None]) -> None:
        """From now on, call `left` once the client leaves; a second call changes nothing.
        `unwatch` must follow."""
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._until_gone(left))

    async def unwatch(self) -> None:
        """Stop watching; the watch is over when this returns."""
        receiving = self._receiving
        if receiving is not None:
            receiving.cancel()
            await asyncio.wait((receiving,))
            if not receiving.cancelled():
                receiving.result()

    async def _until_gone(self, left: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.complete:
            self.gone = True
            left()
