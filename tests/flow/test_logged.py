"""A run's frames in its log: in order, whole, and filled up again where Redis lost the end."""

import asyncio
from typing import Any

import pytest

from common import joblog
from common.errors import BrokerUncertain
from common.logged import LOG_AHEAD, LOG_KEPT, Logged
from common.outcomes import Outcome
from common.wire import Data
from sim.settings import EngineSettings
from tests.flow.durables import Durables
from tests.flow.world import World, world
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime
ENGINES = {"e1": EngineSettings(model="m1", max_num_seqs=4, step_ms=20, seed=1)}


class Run:
    """A run of a durable job by a dispatcher of our own."""

    def __init__(self, world: World, durables: Durables) -> None:
        self.world = world
        self.durables = durables
        self.queue = durables.queue_of("m1")
        self.over: list[Outcome] = []

    async def begin(self) -> "Run":
        about = await self.durables.submit(self.durables.job(stream=True))
        led = await self.queue.lead("take", "mine", grace_ms=0)
        assert led.word == "leader", led
        popped = await self.queue.pop(["batch"], ["b1"], "mine", led.term)
        (self.lease,) = popped.leases
        self.key = self.queue.keys.log(about.id)
        self.out = Logged(self.queue, "mine", about.id, self.lease.attempt)
        self.out.over = self.over.append
        frames = self.out.first(200, [], True, b"first")
        word = await self.queue.start(
            about.id, "mine", self.lease.attempt, self.lease.channel, self.out.batch(frames),
            log=self.out.span(len(frames)),
        )  # fmt: skip
        assert word == "started"
        self.out.grant()
        return self

    async def data(self) -> bytes:
        """What a reader finds."""
        broker, keys = self.durables.broker, self.queue.keys
        entries = await joblog.read(broker, keys, self.lease.job, count=10_000)
        return b"".join(f.data for e in entries for f in e.frames if isinstance(f, Data))

    async def settle(self) -> str:
        end = self.out.end(Outcome.FINISHED, "", None, 0.0)
        return await self.queue.settle(
            self.lease, "mine", Outcome.FINISHED, self.out.batch([end]), log=self.out.span(1)
        )


async def begun(w: World) -> Run:
    """No other dispatcher leads here."""
    return await Run(w, await Durables(w).start()).begin()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return world(monkeypatch, ENGINES, dispatchers=0, leads=False)


async def test_frames_gather_and_come_in_order(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        pieces = [b"%d." % n for n in range(2_000)]
        for piece in pieces:
            run.out.data(piece)
        await run.out.flush()
        assert await run.data() == b"first" + b"".join(pieces)
        assert int(await run.durables.broker.command("XLEN", run.key)) < 100, "they gather"
        assert await run.settle() == "settled"


async def test_a_fast_engine_waits_for_redis(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        run.out.data(b"x" * LOG_AHEAD)
        assert run.out.full()
        await run.out.room()
        assert not run.out.full()


async def test_what_redis_lost_is_put_there_again(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        for piece in (b"a", b"b", b"c", b"d"):
            run.out.data(piece)
            await run.out.flush()
        entries = await run.durables.broker.command("XRANGE", run.key, "-", "+")
        await run.durables.broker.command("DEL", run.key)
        for id, fields in entries[:2]:
            await run.durables.broker.command("XADD", run.key, id, *fields)
        run.out.data(b"e")
        await run.out.flush()
        assert await run.data() == b"firstabcde" and not run.over
        assert await run.settle() == "settled"


async def test_a_gap_before_the_end_is_seen_and_filled(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        run.out.data(b"a")
        await run.out.flush()
        await run.durables.broker.command("DEL", run.key)
        end = run.out.end(Outcome.FINISHED, "", None, 0.0)
        batch, span = run.out.batch([end]), run.out.span(1)

        async def settle() -> str:
            return await run.queue.settle(run.lease, "mine", Outcome.FINISHED, batch, log=span)

        assert await settle() == "gap"
        assert await run.out.mend()
        assert await settle() == "settled"
        assert await run.data() == b"firsta"


async def test_more_is_lost_than_is_kept(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        for _ in range(2 + LOG_KEPT // 100_000):
            run.out.data(b"x" * 100_000)
            await run.out.flush()
        await run.durables.broker.command("DEL", run.key)
        run.out.data(b"y")
        await run.out.flush()
        assert run.over == [Outcome.TRIES], "the answer is to be had once more"
        assert not await run.out.mend()


@pytest.mark.parametrize(("flagged", "why"), [(True, Outcome.CANCELLED), (False, Outcome.LOST)])
async def test_a_run_that_is_over_is_stopped(alone, flagged: bool, why: Outcome) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        about = await run.durables.durable.find(run.lease.job)
        assert about is not None
        if flagged:
            await run.durables.durable.cancel(about)
        else:
            await run.queue.requeue(run.lease, "mine", count_try=False)
        run.out.data(b"more")
        await run.out.flush()
        assert run.over == [why]
        assert await run.data() == b"first"


async def test_it_waits_for_a_redis_that_is_away(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        w.server.connected = False
        await run.durables.broker.link.close()
        run.out.data(b"more")
        flushing = asyncio.ensure_future(run.out.flush())
        await pass_time(3.0)
        assert not flushing.done()
        w.server.connected = True
        await flushing
        assert await run.data() == b"firstmore" and not run.over


async def test_an_append_whose_answer_was_lost_while_more_came(alone) -> None:  # type: ignore[no-untyped-def]
    async with alone as w:
        run = await begun(w)
        append, calls = run.queue.append, 0

        async def unheard(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            assert calls < 20, "it goes round and round"
            word = await append(*args, **more)
            if calls == 1:
                run.out.data(b"c")
                raise BrokerUncertain("the connection broke before the answer")
            return word

        run.queue.append = unheard  # type: ignore[method-assign]
        run.out.data(b"a")
        await run.out.flush()
        run.out.data(b"b" * LOG_AHEAD)
        await run.out.flush()
        assert await run.data() == b"firstac" + b"b" * LOG_AHEAD and not run.over
        assert not run.out.full()
        assert await run.settle() == "settled"
