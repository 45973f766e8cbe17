"""Fairlane on real sockets: a real Redis, gateways and dispatchers in the test's event loop, and the
fake engine of the case player between which everything passes."""

import asyncio
import contextlib
import importlib.util
import logging
import types
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from common.broker import Broker, open_link
from common.keys import ModelKeys
from common.service import new_id
from common.settings import (
    BackendSettings,
    DispatcherSettings,
    GatewaySettings,
    KeySettings,
    ModelSettings,
    Settings,
)
from dispatcher.server import Dispatcher
from gateway.server import Gateway, listen, serve
from tests.conftest import leaked_keys
from tests.support.redis_server import RedisServer, free_port
from tests.support.wait import wait_until

CASES = Path(__file__).parent.parent / "cases"
HOST = "127.0.0.1"
MODELS = ("m1", "org/m-2:beta", "模型-3")
ALICE, BOB = "sk-test-alice", "sk-test-bob"
ORIGIN = "http://ui.example:3000"
_DRAIN_S = 2.0
_REST_S = 5.0
"""All that a request leaves in Redis is gone so soon after its end."""

T = TypeVar("T")


def _load_player() -> types.ModuleType:
    """`tests/cases/_tools/play.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("play", CASES / "_tools" / "play.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


player = _load_player()


class Engine(player.Backend):  # type: ignore[misc,name-defined]
    """The player's fake engine, which can also be stopped and counts what is open.

    `answer` (method `serve`) may be overridden to answer other than by a script.
    """

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.posting = 0
        """POST requests being answered at this moment."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        """Its address as a backend's setting."""
        return f"http://{HOST}:{self.port}"

    async def begin(self) -> None:
        """Listen on a free port."""
        self.port = free_port()
        await self.start(self.port)

    async def conn(self, rd: asyncio.StreamReader, wr: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await super().conn(rd, wr)
        except asyncio.CancelledError:
            return  # the server's own task: it is `end` that cancels it
        finally:
            self._tasks.discard(task)
            wr.close()

    async def post(self, *args: Any) -> bool:
        """One POST request; whether the connection is kept."""
        self.posting += 1
        try:
            return bool(await self.serve(*args))
        finally:
            self.posting -= 1

    async def serve(
        self, path: str, headers: dict[str, str], body: bytes,
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        """By the script of the case."""
        return bool(await super().post(path, headers, body, reader, writer))

    async def end(self) -> None:
        """Close everything."""
        self.srv.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def settings_for(engine_url: str, redis_url: str, setup: dict[str, Any]) -> Settings:
    """The settings that a case's `setup` asks for, in the neutral names of the cases."""
    config = dict(setup.get("config", {}))
    gateway: dict[str, Any] = {"port": 0, "cors_origins": [ORIGIN], "drain_s": _DRAIN_S}
    dispatcher: dict[str, Any] = {"drain_s": _DRAIN_S}
    if (ms := config.pop("keepalive_ms", None)) is not None:
        names = ("comment_first_s", "comment_first_interactive_s", "comment_every_s")
        gateway.update(dict.fromkeys(names, ms / 1000))
    if (ms := config.pop("header_timeout_ms", None)) is not None:
        dispatcher["first_byte_s"] = ms / 1000
    if (ms := config.pop("metrics_interval_ms", None)) is not None:
        dispatcher.update(poll_busy_ms=ms, poll_idle_ms=ms)
    if (size := config.pop("max_body_bytes", None)) is not None:
        gateway["body_max_bytes"] = size
    assert not config, f"a case asks for settings that nobody here knows: {config}"
    assert set(setup.get("models", ())) <= set(MODELS)
    backend = BackendSettings(url=engine_url)
    return Settings(
        gateway=GatewaySettings(**gateway),
        dispatcher=DispatcherSettings(**dispatcher),
        keys=[KeySettings(secret=ALICE, user="alice"),
              KeySettings(secret=BOB, user="bob", models=["m1"])],
        models={name: ModelSettings(backends=[backend]) for name in MODELS},
    )  # fmt: skip


class Live:
    """One gateway replica on a free port, for the time of several tests."""

    def __init__(self, settings: Settings, redis: RedisServer, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.registry = CollectorRegistry()
        self.port = 0
        self.broker = Broker(open_link(redis.url))
        self._stop = asyncio.Event()
        self._running: list[asyncio.Task[Any]] = []
        self._serving: asyncio.Task[None] | None = None
        self.gateway: Gateway

    async def start(self) -> None:
        """Serve. Not ready before a dispatcher runs."""
        bound = listen(self.settings)
        self.port = bound.getsockname()[1]
        self._running.append(asyncio.create_task(self.broker.run()))
        await _within(10, self.broker.up.wait())
        self.gateway = Gateway(self.settings, self.broker, new_id("gateway"), self.registry)
        self._running.append(asyncio.create_task(self.gateway.run()))
        self._serving = asyncio.create_task(serve(self.gateway, bound, self._stop))

    async def close(self) -> None:
        """Drain and end."""
        self._stop.set()
        if self._serving is not None:
            await _within(_DRAIN_S + 10, self._serving)
        for task in reversed(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def dispatching(self) -> AsyncIterator[Dispatcher]:
        """A dispatcher of this block's own, so that no breaker or measurement is handed down.

        It leads when the block begins; at the end it must leave nothing behind in Redis.
        """
        broker = self.broker
        registry = CollectorRegistry()
        dispatcher = Dispatcher(self.settings, broker, new_id("dispatcher"), registry, seed=1)
        running = asyncio.create_task(dispatcher.run())
        try:
            await wait_until(
                lambda: dispatcher.ready() and self._led_by(dispatcher.owner),
                timeout=10, what="the dispatcher leads",
            )  # fmt: skip
            await wait_until(lambda: not self.gateway.not_ready(), timeout=10, what="ready")
            yield dispatcher
            await self.at_rest()
        finally:
            await dispatcher.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _led_by(self, owner: str) -> bool:
        for model in MODELS:
            leader = await self.broker.command("HGET", ModelKeys(model).leader, "owner")
            if leader != owner.encode():
                return False
        return True

    async def at_rest(self) -> None:
        """Wait until no job is in Redis and none at the engine. Raises AssertionError."""

        async def clean() -> bool:
            self._left = await leaked_keys(self.broker)
            return not self._left and self.engine.posting == 0

        try:
            await wait_until(clean, timeout=_REST_S)
        except AssertionError:
            raise AssertionError(
                f"left behind: {self._left}, {self.engine.posting} at the engine"
            ) from None

    async def play(self, case: dict[str, Any]) -> list[str]:
        """Play one variant; what went wrong."""
        return list(await player.play(case, HOST, self.port, self.engine))

    async def ask(self, request: dict[str, Any], seconds: float = 15.0) -> dict[str, Any]:
        """One request, in the cases' terms; its first response: status, headers, body, complete."""
        result = await player.do_request(request, HOST, self.port, seconds)
        assert result["responses"], f"no response: {result['error']}"
        return dict(result["responses"][0])


class Lives:
    """The gateways of a test module, one for each set of settings."""

    def __init__(self, engine_type: type[Engine] = Engine) -> None:
        self.redis = RedisServer()
        self.engine = engine_type()
        self._lives: dict[bytes, Live] = {}

    async def start(self) -> None:
        """Redis and the engine."""
        self.redis.start()
        await self.engine.begin()

    async def get(self, setup: dict[str, Any] | None = None) -> Live:
        """The gateway with the settings of a case's `setup`."""
        settings = settings_for(self.engine.url, self.redis.url, setup or {})
        name = msgspec.msgpack.encode(settings)
        live = self._lives.get(name)
        if live is None:
            live = self._lives[name] = Live(settings, self.redis, self.engine)
            await live.start()
        return live

    async def close(self) -> None:
        """End all."""
        await asyncio.gather(*(live.close() for live in self._lives.values()))
        await self.engine.end()
        self.redis.close()


async def _within(seconds: float, what: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await what


class Faults(logging.Handler):
    """Collects what the product logs as an error, and anything that a marker must not be in."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record, formatted as a log file would have it."""
        self.lines.append((record.levelno, self.format(record)))

    def errors(self) -> list[str]:
        """Lines of level ERROR and above."""
        return [text for level, text in self.lines if level >= logging.ERROR]
