"""What every process of Fairlane does alike: sockets, serving ASGI, signals, ids."""

import asyncio
import contextlib
import errno
import re
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any

import uvicorn

from common.errors import ConfigError
from common.http_limits import LimitedProtocol

BACKLOG = 2_048
KEEP_ALIVE_S = 75

AsgiApp = Callable[..., Awaitable[None]]
"""scope, receive, send."""


def new_id(role: str) -> str:
    """The name of one process start: role, host and a nonce, so that no two are ever the same."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:24]
    return f"{role}-{host}-{secrets.token_hex(4)}"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses a free one. Raises ConfigError naming what is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except socket.gaierror:
        raise ConfigError(f"cannot listen on {host}: unknown host") from None
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            text = f"port {port} on {host} is taken: stop what uses it, or choose another (--port)"
            raise ConfigError(text) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {e.strerror}") from None


async def serve_asgi(
    app: AsgiApp,
    listener: socket.socket,
    *,
    keep_alive_s: int = KEEP_ALIVE_S,
    server_header: bool = False,
) -> None:
    """Serve an application on a bound socket until cancelled. Leaves signals alone.

    Forwarded-for headers are not believed: who stands in front is not known here.
    """
    config = uvicorn.Config(
        app, http=LimitedProtocol, ws="none", lifespan="off", access_log=False, log_config=None,
        server_header=server_header, proxy_headers=False, backlog=BACKLOG,
        timeout_keep_alive=keep_alive_s,
    )  # fmt: skip
    server = _Server(config)
    try:
        await server.serve(sockets=[listener])
    finally:
        server.should_exit = server.force_exit = True
        if server.started:
            await server.shutdown(sockets=[listener])
        listener.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def running(service: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A service beside the block: cancelled and awaited at its end."""
    task = asyncio.create_task(service)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def stop_event() -> asyncio.Event:
    """An event set at SIGINT or SIGTERM; a second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    return stop
