"""A queue at a moment, with short ways to bring jobs into each state."""

from typing import Any

import msgspec

from common.broker import Broker
from common.cost import Terms
from common.jobs import Enqueued, Lease, Limits, NewJob
from common.keys import path, reply
from common.outcomes import Outcome
from common.queue import Queue
from tests.stateful.keyspace import DUMP, Space, read

NOW = 1_790_000_000_000
LEADER, OTHER = "d1-host-aa", "d2-host-bb"
REPLICA = "g1-host-cc"
WIDE = Limits(100, 1 << 20, 1_000, 1 << 24, 1_000, 1 << 24)
COST = Terms(1000.0, 0.0, 0.0, 0)


class Scene:
    """`now` moves only by hand. The leader is LEADER, from `lead` on."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.queue = Queue(broker, "m")
        self.keys = self.queue.keys
        self.now = NOW
        self.term = 0

    async def lead(self, **more: int) -> int:
        led = await self.queue.lead("take", LEADER, now_ms=self.now, **more)
        assert led.word == "leader"
        self.term = led.term
        return led.term

    async def enqueue(
        self, job: str, user: str = "u", limits: Limits = WIDE, **changes: Any
    ) -> Enqueued:
        new = NewJob(
            id=job, user=user, cls="interactive", wait_ms=60_000, terms=COST, weight=1.0,
            replica=REPLICA, meta=b"meta", body=b"body",
        )  # fmt: skip
        new = msgspec.structs.replace(new, **changes)
        return await self.queue.enqueue(new, limits, now_ms=self.now)

    async def pop(self, n: int = 1, cls: str = "interactive") -> list[Lease]:
        if not self.term:
            await self.lead()
        popped = await self.queue.pop([cls], ["b1"] * n, LEADER, self.term, now_ms=self.now)
        assert popped.word == "popped"
        return popped.leases

    async def running(self, job: str = "j", user: str = "u", **changes: Any) -> Lease:
        """A job that LEADER runs."""
        assert (await self.enqueue(job, user, **changes)).word == "queued"
        (lease,) = await self.pop()
        assert lease.job == job
        return lease

    async def started(self, job: str = "j") -> Lease:
        lease = await self.running(job)
        word = await self.queue.start(job, LEADER, lease.attempt, lease.channel, b"first")
        assert word == "started"
        return lease

    async def settle(self, lease: Lease, outcome: Outcome = Outcome.FINISHED, **more: Any) -> str:
        return await self.queue.settle(
            lease, LEADER, outcome, b"end", now_ms=self.now, **more
        )  # fmt: skip

    async def cancel(
        self,
        job: str,
        user: str = "u",
        reason: Outcome = Outcome.CANCELLED,
        sub: str = "",
        **more: Any,
    ) -> tuple[str, str]:
        return await self.queue.cancel(
            job, "interactive", path(user, sub), REPLICA, reason, now_ms=self.now,
            **more,
        )  # fmt: skip

    async def dump(self) -> Space:
        return read(await self.broker.command("EVAL", DUMP, 0))

    async def field(self, job: str, name: str) -> bytes | None:
        value = await self.broker.command("HGET", self.keys.record(job), name)
        assert value is None or isinstance(value, bytes)
        return value

    async def counter(
        self, user: str = "u", cls: str = "interactive", sub: str | None = ""
    ) -> float:
        """The user's counter, wherever it is kept; of its key as a whole where `sub` is None."""
        side, down = self.keys.classes[cls], f":{user}" if sub else ""
        name = f"{user}:" if sub is None else path(user, sub)
        score = await self.broker.command("ZSCORE", side.backlog + down, name)
        idle = await self.broker.command("HGET", side.counter + down, name)
        assert (score is None) != (idle is None), "a counter kept twice, or not at all"
        return float(score if score is not None else idle)

    async def vtime(self, cls: str = "interactive") -> float:
        field = f"v:{self.keys.classes[cls].group}"
        return float(await self.broker.command("HGET", self.keys.board, field) or 0)

    async def lease_until(self, job: str = "j") -> float | None:
        score = await self.broker.command("ZSCORE", self.keys.running, job)
        return None if score is None else float(score)

    channel = reply(REPLICA)
