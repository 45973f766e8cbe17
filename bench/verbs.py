"""Part `verbs`: time inside Redis of the three scripts that every job runs, as lanes grow."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import redis

from bench.fleet import Cores, redis_alone
from bench.load import body
from bench.report import Budget, Figure, Part
from common.broker import Broker, open_link
from common.cost import terms
from common.jobs import Lease, Limits, NewJob
from common.outcomes import Outcome
from common.queue import Queue
from common.wire import JobMeta, Usage

MODEL = "bench"
OWNER = "dispatcher-bench"
REPLICA = "gateway-bench"
JOBS_A_USER = 4
AT_ONCE = 32
LIMITS = Limits(10_000_000, 1 << 40, 10_000_000, 1 << 40)
BUDGET = Budget(80, 40)
LONG_MS = 3_600_000


async def measure(cores: Cores, *, quick: bool) -> Part:
    """Mean time of a call by Redis's own statistics, with few and with many users waiting."""
    few, many, calls = (10, 200, 200) if quick else (100, 10_000, 4_000)
    with redis_alone(cores) as server:
        counts = redis.Redis.from_url(server.url)
        broker = Broker(open_link(server.url, timeout_s=30.0))
        running = asyncio.create_task(broker.run())
        try:
            async with asyncio.timeout(10):
                await broker.up.wait()
            small = await Verbs(broker, counts).run(few, min(calls, few * JOBS_A_USER))
            counts.flushall()
            large = await Verbs(broker, counts).run(many, calls)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            counts.close()
    figures = [
        Figure(name=f"{verb} at {many:,} users × {JOBS_A_USER} jobs", unit="µs",
               value=large[verb], budget=BUDGET)
        for verb in large
    ] + [
        Figure(name=f"{verb} at {few} users, for its growth", unit="µs", value=small[verb])
        for verb in small
    ]  # fmt: skip
    return Part(name="verbs", title="mean time of a script inside Redis", figures=figures)


class Verbs:
    """Fills one model's queue and takes from it again."""

    def __init__(self, broker: Broker, counts: "redis.Redis") -> None:
        self._queue = Queue(broker, MODEL)
        self._counts = counts
        self._made = 0
        self._leases: list[Lease] = []

    async def run(self, users: int, calls: int) -> dict[str, float]:
        """µs of a call by verb; `users` wait the whole time with their jobs."""
        led = await self._queue.lead("take", OWNER, lease_ms=LONG_MS, grace_ms=0)
        for user in range(users):
            await self._many(JOBS_A_USER, lambda user=user: self._enqueue(user))  # type: ignore[misc]
        taken = {}
        taken["enqueue"] = await self._timed(calls, lambda: self._enqueue(self._made % users))
        taken["pop"] = await self._timed(calls, lambda: self._pop(led.term))
        taken["settle"] = await self._timed(calls, self._settle)
        return taken

    async def _timed(self, calls: int, call: Callable[[], Awaitable[None]]) -> float:
        self._counts.config_resetstat()
        await self._many(calls, call)
        found: Any = self._counts.info("commandstats")
        return float(found["cmdstat_evalsha"]["usec_per_call"])

    async def _many(self, calls: int, call: Callable[[], Awaitable[None]]) -> None:
        for done in range(0, calls, AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, calls - done)):
                    group.create_task(_awaited(call))

    async def _enqueue(self, user: int) -> None:
        self._made += 1
        asked = body(MODEL, stream=True, tokens=128, seed=self._made)
        meta = JobMeta(
            path="/v1/chat/completions", dialect="chat", stream=True, wants_usage=False,
            choices=1, input=8, max_output=128,
        )  # fmt: skip
        job = NewJob(
            id=f"{self._made:032x}", user=f"user{user}", cls="standard", wait_ms=LONG_MS,
            terms=terms("tokens", 8, 128), weight=1.0, replica=REPLICA,
            meta=msgspec.msgpack.encode(meta), body=asked,
        )  # fmt: skip
        answer = await self._queue.enqueue(job, LIMITS)
        assert answer.word == "queued", answer

    async def _pop(self, term: int) -> None:
        backends: Sequence[str] = ["http://127.0.0.1:8000"]
        popped = await self._queue.pop("standard", backends, OWNER, term, lease_ms=LONG_MS)
        assert len(popped.leases) == 1, popped
        self._leases += popped.leases

    async def _settle(self) -> None:
        run = self._leases.pop()
        word = await self._queue.settle(
            run, OWNER, Outcome.FINISHED, b"x" * 100, cost=200.0, learn=96,
            usage=Usage(8, 0, 96), seq=3,
        )  # fmt: skip
        assert word == "settled", word


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()
