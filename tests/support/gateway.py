"""A gateway on the embedded broker, and a dispatcher of a few lines that the test drives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import fakeredis
import msgspec

from common import keys
from common.broker import Broker, open_link
from common.errors import BrokerDown
from common.jobs import Lease
from common.outcomes import Outcome
from common.queue import Queue
from common.settings import Settings
from common.wire import (
    VERSION,
    Ack,
    Alive,
    Announcement,
    Cancel,
    Control,
    Data,
    End,
    Frame,
    Head,
    ServedModel,
    decode_controls,
    encode_announcement,
    encode_batch,
    encode_frame,
)
from gateway.server import Gateway
from tests.support.asgi import ask
from tests.support.wait import wait_until

OWNER = "dispatcher-test-1"
MODEL = "m1"
SSE = [("content-type", "text/event-stream; charset=utf-8")]
JSON = [("content-type", "application/json")]


class Run:
    """One job that the dispatcher holds, and the frames it has sent of it."""

    def __init__(self, owner: "Dispatcher", lease: Lease) -> None:
        self._owner = owner
        self.lease = lease
        self.seq = 0

    @property
    def body(self) -> Any:
        """The request's body."""
        return msgspec.json.decode(self.lease.body)

    def head(self, status: int = 200, stream: bool = True, headers: Any = None) -> Head:
        """The next frame, a head."""
        kept = headers or (SSE if stream else JSON)
        frame = Head(self.lease.job, self.lease.attempt, self.seq, status, kept, stream)
        self.seq += 1
        return frame

    def data(self, data: bytes, more: bool = False) -> Data:
        """The next frame, of data."""
        frame = Data(self.lease.job, self.lease.attempt, self.seq, data, more)
        self.seq += 1
        return frame

    async def start(self, *frames: Frame) -> str:
        """Publish the first frames, as `start` does."""
        batch = self._owner.batch(frames)
        lease = self.lease
        return await self._owner.queue.start(
            lease.job, self._owner.name, lease.attempt, lease.channel, batch
        )

    async def send(self, *frames: Frame) -> None:
        """Publish more frames."""
        await self._owner.broker.publish(self.lease.channel, self._owner.batch(frames))

    async def stream(self, *events: bytes) -> None:
        """A whole stream that ends well."""
        head, *rest = (self.head(), *(self.data(e) for e in events))
        await self.start(head, *rest)
        await self.end()

    async def answer(self, body: bytes, status: int = 200, headers: Any = None) -> None:
        """A whole answer that is no stream."""
        outcome = Outcome.FINISHED if status < 400 else Outcome.REFUSED
        first = (self.head(status, False, headers), self.data(body))
        await self.start(*first)
        await self.end(outcome)

    async def end(self, outcome: Outcome = Outcome.FINISHED, message: str = "") -> str:
        """Settle the job."""
        end = End(self.lease.job, self.lease.attempt, self.seq, outcome, message, None)
        self._owner.runs.remove(self)
        batch = self._owner.batch([end])
        return await self._owner.queue.settle(self.lease, self._owner.name, outcome, batch)


class Dispatcher:
    """Pops and publishes what a test tells it to, through the real verbs and the real wire."""

    def __init__(self, broker: Broker, model: str = MODEL, name: str = OWNER) -> None:
        self.broker = broker
        self.queue = Queue(broker, model)
        self.model = model
        self.name = name
        self.term = 0
        self.controls: list[Control] = []
        self.runs: list[Run] = []

    async def announce(
        self, *, ready: bool = True, aliases: Sequence[str] = (), drain: float = 2.0,
        backends: int = 1, closed: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Say that the model is served, from now on for 6 s."""
        served = ServedModel(
            self.model, list(aliases), ready, 1_700_000_000, drain, backends, dict(closed or {})
        )
        data = Announcement(VERSION, await self.broker.now_ms() + 10_000_000, [served])
        await self.broker.command("HSET", keys.MODELS, self.name, encode_announcement(data))

    def batch(self, frames: Sequence[Frame]) -> bytes:
        """Frames as one message."""
        return encode_batch(self.name, [encode_frame(f) for f in frames])

    async def pop(self, cls: str = "standard") -> Run:
        """The next job; waits for it."""

        async def popped() -> Run | None:
            led = await self.queue.lead("take", self.name, lease_ms=600_000)
            leases = (await self.queue.pop([cls], ["b1"], self.name, led.term)).leases
            return Run(self, leases[0]) if leases else None

        run = await wait_until(popped, timeout=60, what="a job")
        assert run is not None
        self.runs.append(run)
        return run

    async def beat(self, replica: str) -> None:
        """Send alive frames for the runs that have not ended, until cancelled."""
        while True:
            jobs = [(r.lease.job, r.lease.attempt, r.seq - 1) for r in self.runs if r.seq]
            if jobs:
                await self.broker.publish(keys.reply(replica), self.batch([Alive(jobs)]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 1.0)

    async def listen(self) -> None:
        """Note the controls that gateways send, until cancelled."""
        channels = [keys.control(self.name)]
        async with contextlib.aclosing(self.broker.link.follow(channels)) as messages:  # type: ignore[type-var]
            async for batch in messages:
                for _, data in batch:
                    self.controls.extend(decode_controls(data).controls)

    def cancels(self) -> list[Cancel]:
        """The cancels it was told of."""
        return [c for c in self.controls if isinstance(c, Cancel)]

    def taken(self, job: str) -> int:
        """Bytes that the job's client has taken, as far as told."""
        acks = [c for c in self.controls if isinstance(c, Ack)]
        return max((n for a in acks for j, _, n in a.taken if j == job), default=0)


class Site:
    """A gateway and a dispatcher that share a broker."""

    def __init__(self, server: fakeredis.FakeServer, broker: Broker, gateway: Gateway) -> None:
        self.server = server
        self.broker = broker
        self.gateway = gateway
        self.app = gateway.app
        self.dispatcher = Dispatcher(broker)

    @property
    def replica(self) -> str:
        """The gateway's id."""
        return self.gateway.replica

    async def queued(self) -> int:
        """Jobs that wait, by Redis; -1 while it is away."""
        deadlines = self.dispatcher.queue.keys.deadlines
        try:
            return int(await self.broker.command("ZCARD", deadlines))
        except BrokerDown:
            return -1

    async def one_waits(self, n: int = 1) -> None:
        """Wait until this many jobs wait."""

        async def waits() -> bool:
            return await self.queued() == n

        await wait_until(waits, what=f"{n} waiting jobs")

    async def at_rest(self) -> None:
        """Wait until nothing is kept of any job, here or in Redis."""

        async def clean() -> bool:
            left = await self.broker.command("KEYS", "*:owned:*")
            here = len(self.gateway.desk) + len(self.gateway.follower)
            return not left and not here and await self.queued() == 0

        await wait_until(clean, what="no open job")
        metrics = (await ask(self.app, "GET", "/metrics")).body.decode()
        assert "fairlane_gateway_bodies_bytes 0.0" in metrics
        opened = [x for x in metrics.splitlines() if x.startswith("fairlane_gateway_open{")]
        assert all(line.endswith(" 0.0") for line in opened)


@contextlib.asynccontextmanager
async def site(settings: Settings | None = None, **announced: Any) -> AsyncIterator[Site]:
    """A running gateway that knows the model MODEL."""
    server = fakeredis.FakeServer()
    broker = Broker(open_link(None, server=server))
    running = [asyncio.ensure_future(broker.run())]
    await broker.up.wait()
    gateway = Gateway(settings or Settings(), broker, "gateway-test-1")
    here = Site(server, broker, gateway)
    await here.dispatcher.announce(**announced)
    loops = (gateway.run(), here.dispatcher.listen(), here.dispatcher.beat(gateway.replica))
    running += [asyncio.ensure_future(loop) for loop in loops]
    try:
        await wait_until(lambda: gateway.up, timeout=30, what="the gateway's first look at Redis")
        yield here
    finally:
        for task in reversed(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
