"""Fairlane on real sockets: a real Redis, gateways and dispatchers in the test's event loop, and
the fake engine of the case player behind them."""

import asyncio
import contextlib
import logging
import types
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Self, TypeVar

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
from tests.support.fake_engine import HOST, Engine, player
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

MODELS = ("m1", "org/m-2:beta", "模型-3")
ALICE, BOB = "sk-test-alice", "sk-test-bob"
ORIGIN = "http://ui.example:3000"
_DRAIN_S = 2.0
_REST_S = 5.0
"""All that a request leaves in Redis is gone so soon after its end."""

T = TypeVar("T")


def settings_for(engine_url: str, setup: dict[str, Any]) -> Settings:
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
        """The gateway's metrics."""
        self.dispatching_registry = CollectorRegistry()
        """Those of the dispatcher that runs now."""
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
    async def dispatching(self, models: Sequence[str] = MODELS) -> AsyncIterator[Dispatcher]:
        """A dispatcher of this block's own, so that no breaker or measurement is handed down.

        It leads `models` when the block begins; at the end it must leave nothing behind in Redis.
        """
        self.dispatching_registry = CollectorRegistry()
        dispatcher = Dispatcher(
            self.settings, self.broker, new_id("dispatcher"), self.dispatching_registry, seed=1
        )
        running = asyncio.create_task(dispatcher.run())
        try:
            await wait_until(
                lambda: dispatcher.ready() and self._led_by(dispatcher.owner, models),
                timeout=10, what="the dispatcher leads",
            )  # fmt: skip
            known = self.gateway.models
            await wait_until(
                lambda: not self.gateway.not_ready()
                and all((m := known.resolve(name)) and m.ready for name in models),
                timeout=10, what="the gateway knows of it",
            )  # fmt: skip
            yield dispatcher
            await self.at_rest()
        finally:
            await dispatcher.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self.engine.hang_up()

    async def _led_by(self, owner: str, models: Sequence[str]) -> bool:
        for model in models:
            leader = await self.broker.command("HGET", ModelKeys(model).board, "owner")
            if leader != owner.encode():
                return False
        return True

    async def at_rest(self) -> None:
        """Wait until no job is in Redis and none at the engine. Raises AssertionError."""

        left: list[str] = []

        async def clean() -> bool:
            nonlocal left
            left = await leaked_keys(self.broker)
            return not left and self.engine.answering() == 0

        try:
            await wait_until(clean, timeout=_REST_S)
        except AssertionError:
            at_engine = self.engine.answering()
            raise AssertionError(f"left behind: {left}, {at_engine} at the engine") from None

    def sample(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels, gateway's and dispatcher's."""
        registries = (self.registry, self.dispatching_registry)
        found = (s for r in registries for family in r.collect() for s in family.samples)
        return sum(s.value for s in found if s.name == name and labels.items() <= s.labels.items())

    async def waiting(self, model: str) -> int:
        """Jobs that wait in Redis."""
        return int(await self.broker.command("ZCARD", ModelKeys(model).deadlines))

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

    def __init__(self) -> None:
        self.redis = RedisServer()
        self.engine = Engine()
        self._lives: dict[bytes, Live] = {}

    async def __aenter__(self) -> Self:
        try:
            self.redis.start()
            await self.engine.begin()
        except BaseException:
            self.redis.close()
            raise
        return self

    async def get(self, setup: dict[str, Any] | None = None) -> Live:
        """The gateway with the settings of a case's `setup`."""
        return await self.open(settings_for(self.engine.url, setup or {}))

    async def open(self, settings: Settings) -> Live:
        """The gateway with these settings."""
        name = msgspec.msgpack.encode(settings)
        live = self._lives.get(name)
        if live is None:
            live = self._lives[name] = Live(settings, self.redis, self.engine)
            await live.start()
        return live

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        try:
            await asyncio.gather(*(live.close() for live in self._lives.values()))
            await self.engine.end()
        finally:
            self.redis.close()


async def _within(seconds: float, what: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await what


class Faults(logging.Handler):
    """Collects what is logged while it is entered, below a logger's name."""

    def __init__(self, name: str = "fairlane", level: int = logging.INFO) -> None:
        super().__init__(level)
        self._logger = logging.getLogger(name)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record, formatted as a log file would have it."""
        self.lines.append((record.levelno, self.format(record)))

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)

    def errors(self) -> list[str]:
        """Lines of level ERROR and above."""
        return [text for level, text in self.lines if level >= logging.ERROR]
