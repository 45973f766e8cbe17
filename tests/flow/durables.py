"""Durable jobs in a world: put on the queue, and read back."""

import json

from common.broker import Broker
from common.durable import About, Durable, Status
from common.intake.body import read
from common.intake.job import job_id, new_job
from common.intake.policy import Policies
from common.intake.routes import ROWS
from common.joblog import Live
from common.jobs import NewJob
from common.queue import Queue
from common.wire import Data, Head, ServedModel
from tests.flow.world import LIMITS, Process, World
from tests.support.wait import pass_time

SERVED = ServedModel("m1", [], True, 0, 0.0)


class Durables:
    """One program that submits durable jobs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = Process(world.server, world.url)
        self.broker: Broker = self.process.broker
        self.durable = Durable(self.broker, self.queue_of)
        self.live = Live(self.broker)
        self.policies = Policies(world.settings.models, world.settings.gateway)
        world.gateways.append((self.process, None))  # type: ignore[arg-type]

    async def start(self) -> "Durables":
        self.process.start(self.broker.run(), self.live.run())
        await self.broker.up.wait()
        return self

    def queue_of(self, model: str) -> Queue:
        return Queue(self.broker, model, self.world.settings.models[model].class_policy)

    def job(
        self, *, output: int = 20, stream: bool = False, cls: str = "batch", user: str = "u",
        id: str = "", wait_ms: int = 600_000, sink: str = "", text: str = "hello",
    ) -> NewJob:  # fmt: skip
        body = json.dumps(
            {
                "model": "m1", "messages": [{"role": "user", "content": text}],
                "max_tokens": output, "ignore_eos": True, "stream": stream,
            }
        ).encode()  # fmt: skip
        return new_job(
            ROWS[0], read(body), body, SERVED, self.policies.of("m1"), user=user, sub="",
            weight=1.0, cls=cls, id=id or job_id(), wait_ms=wait_ms, keep_ms=60_000, sink=sink,
        )  # fmt: skip

    async def submit(self, new: NewJob, *, stream: bool = False, digest: str = "") -> About:
        about = About(
            id=new.id, model="m1", user=new.user, cls=new.cls, path=ROWS[0].path, stream=stream,
            created_ms=await self.broker.now_ms(), wait_ms=new.wait_ms, ttl_s=60, digest=digest,
        )  # fmt: skip
        word, about = await self.durable.submit(new, about, LIMITS)
        assert word in ("queued", "known"), word
        return about

    async def ended(self, about: About) -> Status:
        """How it ended, once it has."""
        async for _ in self.live.follow(self.queue_of("m1").keys, about.id):
            if (status := await self.durable.status(about)).over:
                return status
        return await self.durable.status(about)

    async def stream(self, about: About, after: str = "", every_s: float = 0.0) -> list[bytes]:
        """What a reader gets of each attempt; `every_s`: it takes so long for each piece."""
        found: dict[int, bytes] = {}
        async for entries in self.live.follow(self.queue_of("m1").keys, about.id, after):
            for entry in entries:
                for frame in entry.frames:
                    if isinstance(frame, Head | Data):
                        data = frame.data if isinstance(frame, Data) else b""
                        found[entry.attempt] = found.get(entry.attempt, b"") + data
            if every_s:
                await pass_time(every_s)
        return list(found.values())
