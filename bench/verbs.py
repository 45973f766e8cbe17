"""Part `verbs`: time inside Redis of the three scripts that every job runs, as lanes grow."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import redis

from bench.fleet import Cores, redis_alone
from bench.load import body
from bench.report import Budget, Figure, Part, percentile
from common.broker import Broker, open_link
from common.cost import pricing
from common.jobs import Lease, Limits, NewJob
from common.outcomes import Outcome
from common.queue import Queue
from common.settings import ModelSettings
from common.wire import JobMeta

MODEL = "bench"
OWNER = "dispatcher-bench"
CLASSES = ["interactive", "standard"]
"""Of one order, as a dispatcher asks for them."""
REPLICA = "gateway-bench"
JOBS_A_USER = 4
AT_ONCE = 32
LIMITS = Limits(10_000_000, 1 << 40, 10_000_000, 1 << 40, 10_000_000, 1 << 40)
BUDGET = Budget(80, 40)
LONG_MS = 3_600_000
TERMS = pricing(ModelSettings()).terms(8, 128)
LOG_ABOVE_US = 15
"""Redis's slow log takes what lasts longer: scripts, but not the commands that they call."""
USERS_TOLD = 10_000
"""So many users wait with their jobs where the budget holds."""


class Times(msgspec.Struct, frozen=True):
    """What calls of one script took inside Redis, in µs; one that took less than LOG_ABOVE_US
    counts as that."""

    median: float
    p95: float


async def measure(cores: Cores, *, quick: bool) -> Part:
    """Times by Redis's own clock as more and more users wait."""
    levels, calls = ((10, 200), 200) if quick else ((100, 1_000, 10_000, 50_000), 4_000)
    with redis_alone(cores) as server:
        counts = redis.Redis.from_url(server.url)
        counts.config_set("slowlog-log-slower-than", LOG_ABOVE_US)
        counts.config_set("slowlog-max-len", 2 * calls)
        broker = Broker(open_link(server.url, timeout_s=30.0))
        running = asyncio.create_task(broker.run())
        try:
            async with asyncio.timeout(10):
                await broker.up.wait()
            verbs = Verbs(broker, counts)
            taken = {users: await verbs.run(users, calls) for users in levels}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            counts.close()
    told = min(USERS_TOLD, levels[-1])
    figures = [
        Figure(name=f"{verb} at {told:,} users × {JOBS_A_USER} jobs, {what}", unit="µs",
               value=getattr(times, what), budget=BUDGET if what == "median" else None)
        for verb, times in taken[told].items()
        for what in ("median", "p95")
    ]  # fmt: skip
    return Part(name="verbs", title="time of a script inside Redis", figures=figures,
                notes=growth(taken))  # fmt: skip


def growth(taken: Mapping[int, Mapping[str, Times]]) -> list[str]:
    """A table of the medians by the number of jobs that wait."""
    verbs = list(next(iter(taken.values())))
    lines = ["median µs as more wait", f"{'users':>8}{'jobs':>10}"
             + "".join(f"{v:>10}" for v in verbs)]  # fmt: skip
    for users, times in taken.items():
        cells = "".join(f"{times[v].median:>10.0f}" for v in verbs)
        lines.append(f"{users:>8,}{users * JOBS_A_USER:>10,}{cells}")
    return lines


class Verbs:
    """Fills one model's queue and takes from it again."""

    def __init__(self, broker: Broker, counts: "redis.Redis") -> None:
        self._queue = Queue(broker, MODEL)
        self._counts = counts
        self._made = 0
        self._users = 0
        self._term: int | None = None
        self._leases: list[Lease] = []

    async def run(self, users: int, calls: int) -> dict[str, Times]:
        """Times of a call by verb, while so many users wait; each run has more than the last."""
        calls = min(calls, users * JOBS_A_USER)
        if self._term is None:
            led = await self._queue.lead("take", OWNER, lease_ms=LONG_MS, grace_ms=0)
            self._term = led.term
        term = self._term
        new = iter([user for user in range(self._users, users) for _ in range(JOBS_A_USER)])
        await self._many((users - self._users) * JOBS_A_USER, lambda: self._enqueue(next(new)))
        self._users = users
        return {
            "enqueue": await self._timed(calls, lambda: self._enqueue(self._made % users)),
            "pop": await self._timed(calls, lambda: self._pop(term)),
            "settle": await self._timed(calls, self._settle),
        }

    async def _timed(self, calls: int, call: Callable[[], Awaitable[None]]) -> Times:
        self._counts.slowlog_reset()
        await self._many(calls, call)
        log: Any = self._counts.slowlog_get(2 * calls)
        took = [e["duration"] for e in log if e["command"].upper().startswith(b"EVALSHA")]
        took += [LOG_ABOVE_US] * (calls - len(took))
        return Times(percentile(took, 0.50), percentile(took, 0.95))

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
            terms=TERMS, weight=1.0, replica=REPLICA,
            meta=msgspec.msgpack.encode(meta), body=asked,
        )  # fmt: skip
        answer = await self._queue.enqueue(job, LIMITS)
        assert answer.word == "queued", answer

    async def _pop(self, term: int) -> None:
        backends: Sequence[str] = ["http://127.0.0.1:8000"]
        popped = await self._queue.pop(CLASSES, backends, OWNER, term, lease_ms=LONG_MS)
        assert len(popped.leases) == 1, popped
        self._leases += popped.leases

    async def _settle(self) -> None:
        run = self._leases.pop()
        word = await self._queue.settle(
            run, OWNER, Outcome.FINISHED, b"x" * 100, cost=200.0, learn=96,
        )  # fmt: skip
        assert word == "settled", word


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()
