"""A whole Fairlane behind the HTTP layer, in one event loop and in virtual time.

Real code of both sides, an embedded broker whose clock follows the loop's, simulated engines
behind an in-memory transport. Used with `@pytest.mark.looptime`.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import fakeredis
import httpx
import pytest
from prometheus_client import CollectorRegistry

from common.broker import Broker, open_link
from common.config import load
from common.cost import pricing
from common.errors import BrokerError
from common.follow import Follower
from common.intake.body import read_top
from common.intake.prefix import hashes
from common.jobs import Limits, NewJob
from common.keys import encode
from common.outcomes import Outcome
from common.queue import Queue, heartbeat
from common.settings import Settings
from common.wire import Data, End, Head, JobMeta, encode_meta
from dispatcher.server import Dispatcher
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.support.wait import pass_time

EPOCH = 1_700_000_000.0
LIMITS = Limits(100_000, 1 << 40, 100_000, 1 << 40, 1_000_000, 1 << 40)


def virtual_redis_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the embedded broker's clock follow the event loop's."""

    def now() -> float:
        return EPOCH + asyncio.get_running_loop().time()

    for module in ("fakeredis.commands_mixins.server_mixin", "fakeredis._helpers"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=now))


class Hosts(httpx.AsyncBaseTransport):
    """Sends each request to the engine of its host."""

    def __init__(self, engines: dict[str, EngineTransport]) -> None:
        self.engines = engines

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        engine = self.engines.get(request.url.host)
        if engine is None:
            raise httpx.ConnectError("no such engine")
        return await engine.handle_async_request(request)


class Asked:
    """One job and what came of it."""

    def __init__(self, job: str, user: str) -> None:
        self.job = job
        self.user = user
        self.status = 0
        self.data = b""
        self.end: End | None = None
        self.first_at: float | None = None
        self.asked_at = asyncio.get_running_loop().time()
        self.task: asyncio.Task[None] | None = None
        self.frames = 0

    @property
    def outcome(self) -> Outcome | None:
        return self.end.outcome if self.end else None


class Process:
    """One dispatcher or gateway of the world, with its own way to the broker."""

    def __init__(self, server: fakeredis.FakeServer, url: str | None) -> None:
        self.broker = Broker(open_link(url, server=server))
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, *coroutines: object) -> None:
        self.tasks += [asyncio.ensure_future(c) for c in coroutines]  # type: ignore[call-overload]

    async def kill(self) -> None:
        """Gone from one moment to the next: nothing is settled, nothing is said."""
        await self.broker.link.close()
        self.broker.link.connect = _never  # type: ignore[method-assign]
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def _never() -> None:
    await asyncio.Event().wait()


class World:
    """See `world`."""

    def __init__(
        self, settings: Settings, engines: dict[str, EngineTransport], url: str | None = None
    ) -> None:
        """`url`: of a real Redis, then on the real clock."""
        self.settings = settings
        self.url = url
        self.engines = engines
        self.server = fakeredis.FakeServer()
        self.dispatchers: list[tuple[Process, Dispatcher]] = []
        self.gateways: list[tuple[Process, Follower]] = []
        self.asked: list[Asked] = []
        self.registries: dict[str, CollectorRegistry] = {}
        """Metrics of each dispatcher."""
        self.names: dict[str, list[str]] = {}
        """Addresses of the names that are looked up."""

    async def add_dispatcher(self, name: str) -> Dispatcher:
        process = Process(self.server, self.url)
        self.registries[name] = CollectorRegistry()
        dispatcher = Dispatcher(
            self.settings, process.broker, name, self.registries[name],
            transport=Hosts(self.engines), resolve=self._resolve, seed=1,
        )  # fmt: skip
        process.start(process.broker.run(), dispatcher.run())
        self.dispatchers.append((process, dispatcher))
        await process.broker.up.wait()
        return dispatcher

    async def _resolve(self, host: str, port: int) -> list[str]:
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]

    async def add_gateway(self, name: str) -> Follower:
        process = Process(self.server, self.url)
        follower = Follower(process.broker, name)
        process.start(process.broker.run(), follower.run(), self._beat(process.broker, name))
        self.gateways.append((process, follower))
        await process.broker.up.wait()
        await follower.ready.wait()
        return follower

    async def _beat(self, broker: Broker, name: str) -> None:
        await broker.up.wait()
        while True:
            with contextlib.suppress(BrokerError):
                await heartbeat(broker, name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 1.0)

    def leader(self, model: str = "m1") -> Dispatcher | None:
        for _, dispatcher in self.dispatchers:
            if dispatcher._loops[model].election.leads:
                return dispatcher
        return None

    async def ask(
        self, user: str, *, output: int = 20, stream: bool = True, cls: str = "standard",
        gateway: int = 0, model: str = "m1", wait_ms: int = 600_000, text: str = "hello",
        sub: str = "",
    ) -> Asked:  # fmt: skip
        """Enqueue one job and follow it in the background."""
        process, follower = self.gateways[gateway]
        asked = Asked(secrets.token_hex(16), user)
        body: dict[str, object] = {
            "model": model, "messages": [{"role": "user", "content": f"{text} {asked.job}"}],
            "max_tokens": output, "ignore_eos": True, "stream": stream,
        }  # fmt: skip
        if stream:
            body["stream_options"] = {"include_usage": True}
        meta = JobMeta(
            path="/v1/chat/completions", dialect="chat", stream=stream, wants_usage=False,
            choices=1, input=10, max_output=output,
            prefix=hashes(model, read_top(json.dumps(body).encode()), ("messages",)),
        )  # fmt: skip
        settings = self.settings.models[model]
        urgent = cls == "interactive" and settings.class_policy == "weighted"
        job = NewJob(
            id=asked.job, user=user, sub=sub, cls=cls, wait_ms=wait_ms,
            weight=settings.interactive_weight if urgent else 1.0,
            terms=pricing(settings).terms(10, output), replica=follower.replica,
            meta=encode_meta(meta), body=json.dumps(body).encode(),
        )  # fmt: skip
        reply = follower.open(asked.job, model)
        self.asked.append(asked)
        queue = Queue(process.broker, model, settings.class_policy)
        enqueued = await queue.enqueue(job, LIMITS)
        assert enqueued.word == "queued"
        asked.task = asyncio.ensure_future(self._follow(asked, reply))
        return asked

    async def _follow(self, asked: Asked, reply: object) -> None:
        while asked.end is None:
            for frame in await reply.next():  # type: ignore[attr-defined]
                if asked.first_at is None:
                    asked.first_at = asyncio.get_running_loop().time()
                asked.frames += 1
                match frame:
                    case Head():
                        asked.status = frame.status
                    case Data():
                        reply.forwarded = True  # type: ignore[attr-defined]
                        asked.data += frame.data
                        reply.taken(len(frame.data))  # type: ignore[attr-defined]
                    case End():
                        asked.end = frame
        reply.close()  # type: ignore[attr-defined]

    async def answers(self, *asked: Asked) -> None:
        """Until these (all, when none is named) have ended."""
        await asyncio.gather(*(a.task for a in asked or self.asked if a.task))

    async def cancel(self, asked: Asked, *, cls: str = "standard", gateway: int = 0) -> str:
        """As a gateway does for a client that left."""
        process, follower = self.gateways[gateway]
        assert asked.task is not None
        asked.task.cancel()
        queue = Queue(process.broker, "m1", self.settings.models["m1"].class_policy)
        word, _ = await queue.cancel(
            asked.job, cls, encode(asked.user), follower.replica, Outcome.CANCELLED
        )
        follower._replies[asked.job].close()
        return word

    async def keys(self) -> set[str]:
        """What is in Redis."""
        names = await self.gateways[0][0].broker.command("KEYS", "*")
        return {n.decode() for n in names}

    async def close(self) -> None:
        for asked in self.asked:
            if asked.task is not None:
                asked.task.cancel()
        for process, _ in [*self.dispatchers, *self.gateways]:
            for task in process.tasks:
                task.cancel()
            results = await asyncio.gather(*process.tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result


@asynccontextmanager
async def world(
    monkeypatch: pytest.MonkeyPatch,
    engines: dict[str, EngineSettings],
    *,
    dispatchers: int = 1,
    gateways: int = 1,
    model: dict[str, object] | None = None,
    dispatcher: dict[str, object] | None = None,
    leads: bool = True,
) -> AsyncIterator[World]:
    """A running world of one model, `m1`, whose backends are the engines by host name; once a
    dispatcher `leads`."""
    virtual_redis_clock(monkeypatch)
    backends = [{"url": f"http://{h}", "max_num_seqs": e.max_num_seqs} for h, e in engines.items()]
    options = {
        "models": {"m1": {"backends": backends, **(model or {})}},
        "dispatcher": dispatcher or {},
    }
    settings = load(options=options, environment={})
    world = World(settings, {h: EngineTransport(e) for h, e in engines.items()})
    try:
        for n in range(gateways):
            await world.add_gateway(f"g{n}")
        for n in range(dispatchers):
            await world.add_dispatcher(f"d{n}")
        while leads and world.leader() is None:
            await pass_time(0.05)
        yield world
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await world.close()
