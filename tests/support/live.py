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
    """The player's fake engine, which can also be stopped, and knows what it still answers.

    `serve` may be overridden to answer other than by the script of a case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._posts: dict[asyncio.Task[Any], tuple[list[dict[str, Any]], int]] = {}

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
        task = asyncio.current_task()
        assert task is not None
        self._posts[task] = (self.reqs, len(self.reqs))  # where `serve` will note the request
        try:
            return bool(await self.serve(*args))
        finally:
            del self._posts[task]

    async def serve(self, *args: Any) -> bool:
        """Answer one POST by the script of the case: (path, headers, body, reader, writer)."""
        return bool(await super().post(*args))

    def answering(self) -> int:
        """POST requests that are being answered and whose client has not hung up."""
        records = [reqs[n] for reqs, n in self._posts.values() if n < len(reqs)]
        return sum(1 for r in records if r["gone"] is None)

    async def hang_up(self) -> None:
        """Close all connections: the rest of a script is not for the next case."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> None:
        """Close everything."""
        self.srv.close()
        await self.hang_up()


def settings_for(engine_url: str, setup: dict[str, Any], kind: str = "vllm") -> Settings:
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
    backend = msgspec.convert({"url": engine_url, "engine": kind}, BackendSettings)
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
        dispatcher = Dispatcher(
            self.settings, self.broker, new_id("dispatcher"), CollectorRegistry(), seed=1
        )
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
            await self.engine.hang_up()

    async def _led_by(self, owner: str) -> bool:
        for model in MODELS:
            leader = await self.broker.command("HGET", ModelKeys(model).leader, "owner")
            if leader != owner.encode():
                return False
        return True

    async def at_rest(self) -> None:
        """Wait until no job is in Redis and none at the engine. Raises AssertionError."""

        async def clean() -> bool:
            nonlocal left
            left = await leaked_keys(self.broker)
            return not left and self.engine.answering() == 0

        left: list[str] = []
        try:
            await wait_until(clean, timeout=_REST_S)
        except AssertionError:
            at_engine = self.engine.answering()
            raise AssertionError(f"left behind: {left}, {at_engine} at the engine") from None

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

    async def get(self, setup: dict[str, Any] | None = None, kind: str = "vllm") -> Live:
        """The gateway with the settings of a case's `setup`, for this kind of engine."""
        settings = settings_for(self.engine.url, setup or {}, kind)
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
