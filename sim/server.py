"""The simulated engine as an HTTP server: an ASGI application, and uvicorn around it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any

from common.service import bind, serve_asgi
from sim.exchange import Headers
from sim.host import Host, Received
from sim.settings import EngineSettings

BODY_MAX = 128 * 1024 * 1024
BACKLOG = 2_048
KEEP_ALIVE_S = 5

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]


class EngineApp:
    """An ASGI application that is one simulated engine; `host` is the engine behind it."""

    def __init__(self, settings: EngineSettings, *, log_size: int = 0) -> None:
        """`log_size` requests are kept in `host.log`, with their bodies."""
        self.host = Host(settings, log_size=log_size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; returns when it is answered or its client has gone."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        body = await _read_body(receive)
        if body is None:
            return
        received = Received(
            at=asyncio.get_running_loop().time(),
            method=scope["method"],
            path=scope["path"],
            headers={k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]},
            body=body,
        )
        sink = _AsgiSink(send)
        connection = self.host.open(received, sink)
        try:
            # ASGI says "disconnect" after a complete answer too.
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            if not sink.is_broken:
                raise
        finally:
            connection.abort()
            await sink.aclose()


def app(settings: EngineSettings, *, log_size: int = 0) -> EngineApp:
    """The ASGI application of one simulated engine; `log_size` requests are kept."""
    return EngineApp(settings, log_size=log_size)


async def serve(
    settings: EngineSettings,
    host: str = "127.0.0.1",
    port: int = 8_000,
    *,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve a simulated engine until cancelled; `on_ready` gets the port (0 chooses a free one).

    Needs a running event loop, best uvloop's; leaves signals and logging alone. Raises ConfigError
    when the address cannot be bound.
    """
    listener = bind(host, port)
    application = app(settings)
    if on_ready is not None:
        on_ready(listener.getsockname()[1])
    try:
        await serve_asgi(application, listener, keep_alive_s=KEEP_ALIVE_S, server_header=True)
    finally:
        application.host.close()


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body; None when the client went away or sent more than BODY_MAX."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_MAX:
            return None
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


class _AsgiSink:
    """Writes an answer through ASGI's `send` from plain callbacks.

    `send` is a coroutine that suspends only while the client's socket is full. It is run here up
    to that point without a task, so one engine step writes to all its streams in a row; only a
    write that does suspend is finished by a task of its own, later ones wait behind it (at most
    one answer, which the engine's context bounds).
    """

    def __init__(self, send: Send) -> None:
        self.is_broken = False
        self._send = send
        self._task = asyncio.current_task()
        self._queue: deque[Message] = deque()
        self._writer: asyncio.Task[None] | None = None

    def head(self, status: int, headers: Headers) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self._write({"type": "http.response.start", "status": status, "headers": raw})

    def chunk(self, data: bytes) -> None:
        self._write({"type": "http.response.body", "body": data, "more_body": True})

    def end(self) -> None:
        self._write({"type": "http.response.body", "body": b"", "more_body": False})

    def broken(self) -> None:
        """ASGI cannot cut a connection; a server does it when the application just stops."""
        self.is_broken = True
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Stop a write that still waits for the client."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.cancel()
            await asyncio.wait([writer])

    def _write(self, message: Message) -> None:
        if self._writer is not None:
            self._queue.append(message)
            return
        started = _Started(self._send(message))
        if not started.done:
            self._writer = asyncio.get_running_loop().create_task(self._drain(started))

    async def _drain(self, started: _Started) -> None:
        await started
        while self._queue:
            await self._send(self._queue.popleft())
        self._writer = None


class _Started:
    """A coroutine begun at once, outside of any task; where it suspends, a task may await it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self.done = False
        try:
            self._blocked_on = coroutine.send(None)
        except StopIteration:
            self.done = True

    def __await__(self) -> Generator[Any, None, None]:
        # The awaiting task takes over the future that the coroutine yielded to nobody.
        yield self._blocked_on
        yield from self._coroutine.__await__()
