"""The simulated engine as an httpx transport: real streaming in the event loop's time, no socket.

Works under virtual time. Closing a response or cancelling a request aborts it in the engine, as a
disconnect does. httpx's read timeout applies between chunks, as on a socket.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import httpx

from sim.engine import Engine
from sim.events import Gauges
from sim.exchange import Headers
from sim.host import Connection, Host, Received
from sim.settings import EngineSettings


class EngineTransport(httpx.AsyncBaseTransport):
    """One simulated engine behind httpx: `httpx.AsyncClient(transport=EngineTransport(…))`.

    `log` keeps the last `log_size` requests. Set `observer` to see the gauges after each change
    of the engine's state. All methods but `handle_async_request` and `aclose` are for tests.
    """

    def __init__(self, settings: EngineSettings, *, log_size: int = 1_000) -> None:
        self.host = Host(settings, log_size=log_size)

    @property
    def engine(self) -> Engine:
        """The model; a new one after `kill`."""
        return self.host.engine

    @property
    def log(self) -> deque[Received]:
        """The requests received, oldest first."""
        return self.host.log

    @property
    def peak_waiting(self) -> int:
        """The most requests ever seen in the engine's own queue."""
        return self.host.peak_waiting

    @property
    def observer(self) -> Callable[[Gauges], None] | None:
        """Called with the gauges after each submit, abort and step of the engine."""
        return self.host.observer

    @observer.setter
    def observer(self, observer: Callable[[Gauges], None] | None) -> None:
        self.host.observer = observer

    def running(self) -> int:
        """Sequences that hold a slot."""
        return self.host.engine.running()

    def waiting(self) -> int:
        """Requests in the engine's own queue."""
        return self.host.engine.waiting()

    def kill(self) -> None:
        """Open requests raise ReadError, new ones ConnectError; the engine's state is lost."""
        self.host.kill()

    def revive(self) -> None:
        """End all faults."""
        self.host.revive()

    def refuse(self, status: int, message: str | None = None) -> None:
        """Answer new calls with an error; open ones go on. 503: overloaded, 500: draining."""
        self.host.refuse(status, message)

    def freeze(self) -> None:
        """No byte moves and nothing is answered, until `revive` or `kill`."""
        self.host.freeze()

    def crash(self) -> None:
        """The engine dies under its server: streams end with an error event, calls get 500."""
        self.host.crash()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the engine; returns when the status and headers are there.

        Raises httpx.ConnectError when killed, ReadError when killed meanwhile, ReadTimeout.
        """
        body = await request.aread()
        if self.host.killed:
            raise httpx.ConnectError("All connection attempts failed", request=request)
        loop = asyncio.get_running_loop()
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in request.headers.raw
        }
        received = Received(
            at=loop.time(),
            method=request.method,
            path=request.url.path,
            headers=headers,
            body=body,
        )
        timeout = request.extensions.get("timeout", {}).get("read")
        pipe = _Pipe(request, timeout)
        connection = self.host.open(received, pipe)
        try:
            status, answered = await pipe.wait_head()
        except BaseException:
            connection.abort()
            raise
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answered]
        return httpx.Response(
            status,
            headers=[(b"server", b"uvicorn"), *raw],
            stream=_Body(pipe, connection),
            extensions={"http_version": b"HTTP/1.1"},
        )

    async def aclose(self) -> None:
        """Break all open requests. The transport can be used again."""
        self.host.close()


class _Pipe:
    """The sink of one answer: the host writes into it, one reader takes chunks out.

    Unread chunks are kept: at most one answer, which the engine's context bounds.
    """

    def __init__(self, request: httpx.Request, timeout: float | None) -> None:
        self._request = request
        self._timeout = timeout
        self._head: tuple[int, Headers] | None = None
        self._chunks: deque[bytes] = deque()
        self._ended = False
        self._broken = False
        self._waiter: asyncio.Future[None] | None = None

    def head(self, status: int, headers: Headers) -> None:
        self._head = (status, headers)
        self._wake()

    def chunk(self, data: bytes) -> None:
        self._chunks.append(data)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def broken(self) -> None:
        self._broken = True
        self._wake()

    async def wait_head(self) -> tuple[int, Headers]:
        """The status and headers. Raises httpx.ReadError, ReadTimeout."""
        while self._head is None:
            self._check()
            await self._wait()
        return self._head

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, one chunk for each write. Raises httpx.ReadError, ReadTimeout."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._ended:
                return
            self._check()
            await self._wait()

    def _check(self) -> None:
        if self._broken:
            raise httpx.ReadError("Connection reset by peer", request=self._request)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout):
                await self._waiter
        except TimeoutError:
            raise httpx.ReadTimeout("no bytes in time", request=self._request) from None
        finally:
            self._waiter = None


class _Body(httpx.AsyncByteStream):
    """A response's body; closing it early is a disconnect."""

    def __init__(self, pipe: _Pipe, connection: Connection) -> None:
        self._pipe = pipe
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._pipe.chunks():
            yield chunk

    async def aclose(self) -> None:
        self._connection.abort()
