"""A load generator's HTTP: a plain protocol over sockets, cheap enough not to be the limit.

It knows only what the answers here can be: a head, then a body with a length or in chunks. The
bytes of a body are not kept: what counts is when they came and how many events there were.
"""

import asyncio
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import msgspec

EVENT = b"data: "
_KEEP = len(EVENT) - 1
_LAST = b"0\r\n\r\n"
_HEAD_MAX = 64 * 1024
COMMENTS_MAX = 256


class Gone(Exception):
    """The connection ended before the answer did."""


class Answer(msgspec.Struct):
    """What is known of one answer; times are of time.monotonic: uvloop's own clock has whole ms."""

    sent: float
    status: int = 0
    first: float = 0.0
    """When the first event came; of a body without events, its first byte. 0: it did not."""
    last: float = 0.0
    """When it was over."""
    events: int = 0
    comments: list[tuple[float, bytes]] = msgspec.field(default_factory=list)
    """What came before the first event, and when: at most COMMENTS_MAX pieces."""

    @property
    def first_s(self) -> float:
        """Time to the first event."""
        return self.first - self.sent

    @property
    def whole_s(self) -> float:
        """Time to the end."""
        return self.last - self.sent


class Target(msgspec.Struct, frozen=True):
    """A server, and how to ask it."""

    host: str
    port: int
    path: str = "/v1/chat/completions"
    tls: bool = False

    @classmethod
    def of(cls, url: str, path: str = "/v1/chat/completions") -> "Target":
        """From `http://host:port`, with or without `/v1`. Raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"no http:// or https:// URL: {url!r}")
        tls = parts.scheme == "https"
        before = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), before + path, tls)

    def request(self, body: bytes, key: str = "", cls: str = "") -> bytes:
        """The bytes of a POST."""
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        if cls:
            lines.append(f"X-Fairlane-Class: {cls}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class Connection(asyncio.Protocol):
    """One kept connection, one request at a time."""

    def __init__(self) -> None:
        self.events = 0
        """All events that came in."""
        self.answer: Answer | None = None
        """The one that is under way, or the last."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._head = bytearray()
        self._in_head = True
        self._left = 0
        """Bytes of the body still to come; -1: it is in chunks."""
        self._tail = b""

    @property
    def open(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Answer:
        """Send a request; returns when its answer is over. Raises Gone."""
        if self._transport is None or self._transport.is_closing():
            raise Gone("closed before the request")
        self._done = self._loop.create_future()
        self._head.clear()
        self._in_head, self._tail = True, b""
        self.answer = Answer(monotonic())
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        """Cut the connection, and the answer with it."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self._transport = None
        self._fail("the connection was closed")

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        answer = self.answer
        if answer is None or self._done is None:
            return
        if self._in_head:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > _HEAD_MAX:
                    self.close()
                return
            data = bytes(self._head[end + 4 :])
            self._read_head(answer, bytes(self._head[:end]))
        if data:
            self._read_body(answer, data)
        elif self._left == 0:
            self._finish(answer)

    def _read_head(self, answer: Answer, head: bytes) -> None:
        self._in_head = False
        answer.status = int(head[9:12])
        lowered = head.lower()
        at = lowered.find(b"\r\ncontent-length:")
        if at >= 0:
            self._left = int(lowered[at + 17 :].split(b"\r\n", 1)[0])
        else:
            self._left = -1 if b"\r\ntransfer-encoding: chunked" in lowered else 0

    def _read_body(self, answer: Answer, data: bytes) -> None:
        if self._left >= 0:
            answer.first = answer.first or monotonic()
            self._left -= len(data)
            if self._left <= 0:
                self._finish(answer)
            return
        # The end of what came before may hold the beginning of a mark, never a whole one.
        joined = self._tail + data
        found = joined.count(EVENT)
        if found:
            if not answer.events:
                answer.first = monotonic()
            answer.events += found
            self.events += found
        elif not answer.events and len(answer.comments) < COMMENTS_MAX:
            answer.comments.append((monotonic(), data))
        self._tail = joined[-_KEEP:]
        if self._tail == _LAST:
            self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        answer.last = monotonic()
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_result(answer)

    def _fail(self, why: str) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(Gone(why))


async def connect(target: Target) -> Connection:
    """A new connection. Raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        Connection, target.host, target.port, ssl=True if target.tls else None
    )
    return connection


class Client:
    """A connection that is made anew where the server has closed it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.connection: Connection | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the answer under way has had its first event."""
        answer = self.connection.answer if self.connection is not None else None
        return answer is not None and bool(answer.first)

    async def ask(self, request: bytes) -> Answer:
        """As Connection.ask; once more on a new connection where a kept one was closed."""
        for again in (True, False):
            kept = self.connection is not None and self.connection.open
            if not kept:
                self.connection = await connect(self.target)
            assert self.connection is not None
            try:
                return await self.connection.ask(request)
            except Gone:
                if not (kept and again):
                    raise
        raise AssertionError("not reached")

    def close(self) -> None:
        """Cut the connection."""
        if self.connection is not None:
            self.connection.close()
