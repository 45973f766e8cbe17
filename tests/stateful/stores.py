"""A queue on one server, driven step by step from outside of an event loop."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Self, TypeVar

import fakeredis

from common import keys
from common.broker import Broker, Subscriber, open_link
from common.links import Message
from common.queue import Queue
from common.scripts import Script
from tests.stateful.keyspace import DUMP, Raw, dump_embedded, restoring

MODEL = "m"
REPLICAS = ("g1", "g2", "")
"""Of gateways; a durable job has none."""
MARKER = "marker"
T = TypeVar("T")


class Store:
    """One queue, what its server holds, and all that it publishes. Closed by `with`."""

    def __init__(
        self,
        url: str | None,
        scripts: Mapping[str, Script] | None = None,
        policy: keys.Policy = "weighted",
    ) -> None:
        self._runner = asyncio.Runner()
        self._embedded = fakeredis.FakeServer() if url is None else None
        self.broker = Broker(open_link(url, server=self._embedded))
        self.broker.scripts.update(scripts or {})
        self.queue = Queue(self.broker, MODEL, policy)
        self._messages: list[Message] = []
        self._marked = asyncio.Event()
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        self._loop = self._runner.get_loop()
        self._loop.run_until_complete(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._close())
        self._runner.close()

    async def _open(self) -> None:
        k = self.queue.keys
        channels = [k.bell, k.live, *(keys.reply(r) for r in REPLICAS if r), MARKER]
        listener = Subscriber(self.broker, channels, self._deliver)
        self._tasks = [asyncio.ensure_future(w.run()) for w in (self.broker, listener)]
        async with asyncio.timeout(5):
            await self.broker.up.wait()
            await listener.ready.wait()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _deliver(self, message: Message) -> None:
        if message[0] != MARKER.encode():
            self._messages.append(message)
        elif message[1] == str(self._number).encode():
            self._marked.set()

    def run(self, step: Coroutine[Any, Any, T]) -> tuple[T, Raw, list[Message]]:
        """Its reply, then a dump of the server, and what was published meanwhile."""
        return self._loop.run_until_complete(self._step(step))

    async def _step(self, step: Coroutine[Any, Any, T]) -> tuple[T, Raw, list[Message]]:
        reply = await step
        self._marked.clear()
        self._number += 1
        await self.broker.publish(MARKER, str(self._number).encode())
        if self._embedded:
            raw = dump_embedded(self._embedded)
        else:
            raw = await self.broker.command("EVAL", DUMP, 0)
        async with asyncio.timeout(5):
            await self._marked.wait()
        messages, self._messages = self._messages, []
        return reply, raw, messages

    async def delete(self, key: str) -> None:
        """Lose one key."""
        await self.broker.command("DEL", key)

    async def roll_back(self, raw: Raw) -> None:
        """Lose all that happened after a dump."""
        for command in restoring(raw):
            await self.broker.command(*command)
