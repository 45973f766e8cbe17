"""Redis as Fairlane uses it: verbs, plain commands, publish, subscriptions that come back.

A verb that may have run is never sent again here: the caller, who knows whether repeating is
harmless, decides (BrokerUncertain). NOSCRIPT means that nothing ran, so it is sent with its text at
once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import fakeredis

from common.errors import BrokerDown, BrokerError, BrokerRefused, ConfigError
from common.links import Argument, EmbeddedLink, Link, Message, RedisLink, Reply
from common.scripts import Value, load

log = logging.getLogger("fairlane.broker")

_BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
VERSION_MIN = (6, 2)


def open_link(
    url: str | None, *, timeout_s: float = 2.0, server: fakeredis.FakeServer | None = None
) -> Link:
    """A link to the Redis at `url`; without one, to the embedded broker `server`."""
    if url is not None:
        return RedisLink(url, timeout_s=timeout_s)
    return EmbeddedLink(server or fakeredis.FakeServer())


class Broker:
    """One process's way to Redis. `run` keeps the connection; everything else uses it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.scripts = load()
        self.epoch = 0
        """Raised with each connection made: whoever sees it change re-asserts what it holds."""
        self.up = asyncio.Event()
        self._epoch_changed: list[asyncio.Event] = []

    async def run(self) -> None:
        """Connect, serve, and connect again after a loss, with backoff, until cancelled."""
        attempt, told = 0, False
        while True:
            try:
                await self.link.connect()
                serving = asyncio.ensure_future(self.link.serve())
                try:
                    await self._load()
                    attempt, told = 0, False
                    self.epoch += 1
                    self.up.set()
                    for event in self._epoch_changed:
                        event.set()
                    await serving
                finally:
                    self.up.clear()
                    serving.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await serving
                    await self.link.close()
            except BrokerError as e:
                if not told:
                    log.warning("redis unavailable: %s", e)
                told = True
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            attempt += 1

    def epoch_event(self) -> asyncio.Event:
        """An event set at each new connection; the caller clears it."""
        event = asyncio.Event()
        self._epoch_changed.append(event)
        return event

    async def _load(self) -> None:
        for script in self.scripts.values():
            await self.link.execute(("SCRIPT", "LOAD", script.text))

    async def call(self, verb: str, **slots: Value | Sequence[Value]) -> Reply:
        """Run one verb. Raises BrokerDown, BrokerUncertain or BrokerRefused."""
        script = self.scripts[verb]
        keys, args = script.bind(slots)
        command = ("EVALSHA", script.sha, len(keys), *keys, *args)
        try:
            return await self.command(*command)
        except BrokerRefused as e:
            if not str(e).startswith("NOSCRIPT") and "No matching script" not in str(e):
                raise
            # With its text it runs whatever is flushed meanwhile, and is known again afterwards.
            return await self.command("EVAL", script.text, len(keys), *keys, *args)

    async def command(self, *args: Argument) -> Reply:
        """Run one plain command. Raises as `call`."""
        if not self.up.is_set():  # nothing runs on a new connection before its epoch is known
            raise BrokerDown("no connection to Redis")
        return await self.link.execute(args)

    async def back(self, again_s: float, until: float) -> bool:
        """Before what failed is tried again: wait `again_s`, and for a connection. False where it
        is `until`, of the loop's time, before that."""
        try:
            async with asyncio.timeout_at(until):
                await asyncio.sleep(again_s)
                await self.up.wait()
        except TimeoutError:
            return False
        return True

    async def publish(self, channel: str, data: bytes) -> int:
        """How many subscribers got it. Raises as `call`."""
        return int(await self.command("PUBLISH", channel, data))

    async def now_ms(self) -> int:
        """The Redis server's clock in milliseconds."""
        seconds, micros = await self.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def check(self) -> None:
        """Raises ConfigError where this Redis must not be used, BrokerError where it cannot be."""
        if isinstance(self.link, EmbeddedLink):
            return
        info = _info(await self.command("INFO"))
        version = tuple(int(p) for p in info.get("redis_version", "0").split(".")[:2])
        if version < VERSION_MIN:
            raise ConfigError(f"Redis {info.get('redis_version')} is too old: 6.2 or newer is used")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise ConfigError(
                f"Redis has maxmemory-policy {policy}, which may drop waiting jobs: "
                "set it to noeviction"
            )


def _info(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, _, value in lines}


class Subscriber:
    """One subscription that is made again whenever it breaks.

    Messages go to `deliver`, which only sorts and never waits; `subscribed` is told each time the
    subscription stands. What was published in between is lost: the contract's sequence numbers
    and `alive` frames find that out.
    """

    def __init__(
        self,
        broker: Broker,
        channels: Sequence[str],
        deliver: Callable[[Message], None],
        subscribed: Callable[[], None] = lambda: None,
    ) -> None:
        self._broker = broker
        self._channels = tuple(channels)
        self._deliver = deliver
        self._subscribed = subscribed
        self._drop = asyncio.Event()
        self.ready = asyncio.Event()

    def drop(self) -> None:
        """Give up the present connection and subscribe on a new one."""
        self._drop.set()

    def add(self, channel: str) -> None:
        """Subscribe to one more channel, on a new connection."""
        if channel not in self._channels:
            self._channels = (*self._channels, channel)
            self.drop()

    def remove(self, channel: str) -> None:
        """Subscribe to it no more, from the next connection on."""
        self._channels = tuple(c for c in self._channels if c != channel)

    async def run(self) -> None:
        """Subscribe and deliver until cancelled."""
        attempt = 0
        while True:
            self._drop.clear()
            reading = asyncio.ensure_future(self._read())
            dropping = asyncio.ensure_future(self._drop.wait())
            try:
                await asyncio.wait({reading, dropping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stood = self.ready.is_set()
                self.ready.clear()
                for task in (reading, dropping):
                    task.cancel()
                results = await asyncio.gather(reading, dropping, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception) and not isinstance(result, BrokerDown):
                    raise result
            attempt = 0 if stood else attempt + 1
            await asyncio.sleep(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])

    async def _read(self) -> None:
        async with contextlib.aclosing(self._broker.link.follow(self._channels)) as batches:  # type: ignore[type-var]
            async for messages in batches:
                if not messages:
                    self.ready.set()
                    self._subscribed()
                for message in messages:
                    self._deliver(message)
