"""Counters of idle users are swept, those of the people that divide a key's share too."""

import pytest

from common.broker import Broker
from common.cost import Terms
from common.jobs import Limits, NewJob
from common.outcomes import Outcome
from common.queue import Queue
from common.settings import DispatcherSettings
from dispatcher.reaper import SWEPT_MAX, Reaper

ME = "dispatcher-a-1"
LIMITS = Limits(100, 1 << 20, 100, 1 << 20, 100, 1 << 20)


class Bench:
    """A leader without engines: each job that is asked for runs and ends at once."""

    def __init__(self, broker: Broker, term: int) -> None:
        self.queue = Queue(broker, "m")
        self.term = term
        self.reaper = Reaper(broker, self.queue, ME, DispatcherSettings())
        self.jobs = 0

    async def run(self, *users: tuple[str, str]) -> None:
        """All of them wait before the first of them goes."""
        for user, sub in users:
            self.jobs += 1
            job = NewJob(
                id=f"{self.jobs:032x}", user=user, sub=sub, cls="standard", wait_ms=60_000,
                terms=Terms(1_000.0, 0.0, 0.0, 0), weight=1.0, replica="g", meta=b"m", body=b"{}",
            )  # fmt: skip
            assert (await self.queue.enqueue(job, LIMITS)).word == "queued"
        popped = await self.queue.pop(["standard"], ["b"] * len(users), ME, self.term)
        assert len(popped.leases) == len(users)
        for lease in popped.leases:
            self.reaper.saw(lease.cls, lease.user)
            await self.queue.settle(lease, ME, Outcome.FINISHED, b"", cost=1_000.0)
            await self.queue.ack([lease.job], "g")

    async def rounds(self, n: int) -> None:
        for _ in range(n):
            await self.reaper.round(self.term)

    async def counters(self, of: str) -> set[str]:
        names = await self.queue.broker.command("HKEYS", self.queue.keys.counter_prefix + of)
        return {name.decode() for name in names}


@pytest.fixture
async def bench(broker: Broker) -> Bench:
    return Bench(broker, (await Queue(broker, "m").lead("take", ME)).term)


async def test_counters_that_v_has_passed_are_swept_on_both_levels(bench: Bench) -> None:
    for _ in range(3):
        await bench.run(("key", "x"), ("key", "y"), ("one", ""))
    for _ in range(3):
        await bench.run(("key", "z"), ("two", ""))
    assert await bench.counters("live") >= {"key:", "one", "two"}
    assert await bench.counters("live:key") == {"key:x", "key:y", "key:z"}
    await bench.rounds(6)
    assert "one" not in await bench.counters("live")
    left = await bench.counters("live:key")
    assert "key:z" in left, "V is not beyond what it was charged"
    assert not left & {"key:x", "key:y"}


async def test_sweeps_of_keys_are_dropped_when_done_and_bounded(bench: Bench) -> None:
    groups = len(bench.reaper._cursors)
    bench.reaper.saw("standard", "one")
    assert len(bench.reaper._cursors) == groups, "a user of its own has none"
    for n in range(2 * SWEPT_MAX):
        bench.reaper.saw("standard", f"k{n}:x")
    assert len(bench.reaper._cursors) == SWEPT_MAX
    await bench.rounds(2 * groups + 10)
    assert len(bench.reaper._cursors) == SWEPT_MAX - 10 - groups
