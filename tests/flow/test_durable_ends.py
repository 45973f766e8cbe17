"""How durable jobs end whose answers cannot be whole: once, soon, and not again and again."""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from common import keys, logged
from common.durable import About
from common.jobs import Limits, NewJob
from common.outcomes import Outcome
from common.queue import Queue
from sim.settings import EngineSettings
from tests.flow.durables import Durables
from tests.flow.world import LIMITS, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime
ENGINES = {"e1": EngineSettings(model="m1", max_num_seqs=4, step_ms=20, seed=1)}


class Verbs:
    """Counts the verbs of a run, and holds `append` back while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.free = asyncio.Event()
        self.free.set()
        for verb in ("append", "settle", "requeue"):
            monkeypatch.setattr(Queue, verb, self._wrapped(verb, getattr(Queue, verb)))

    def _wrapped(self, verb: str, real: Any) -> Any:
        async def call(*args: Any, **more: Any) -> Any:
            self.calls[verb] += 1
            if verb == "append":
                await self.free.wait()
            return await real(*args, **more)

        return call


async def test_cancelled_while_a_part_is_on_its_way_to_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verbs = Verbs(monkeypatch)
    async with world(monkeypatch, ENGINES) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=4_000, stream=True, sink="s1"), stream=True)
        await wait_until(lambda: verbs.calls["append"] > 20, timeout=20, what="it runs")
        verbs.free.clear()
        await pass_time(0.5)
        assert await d.durable.cancel(about) == "flagged"
        verbs.free.set()
        async with asyncio.timeout(1.0):
            status = await d.ended(about)
        assert (status.state, status.outcome) == ("cancelled", Outcome.CANCELLED)
        await pass_time(10.0)
        assert verbs.calls["settle"] == 1 and not verbs.calls["requeue"]


async def test_an_answer_that_is_larger_than_may_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logged, "LOG_BYTES_MAX", 150_000)
    async with world(monkeypatch, ENGINES) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=4_000, stream=True, sink="s1"), stream=True)
        async with asyncio.timeout(100):
            status = await d.ended(about)
        assert (status.state, status.outcome) == ("failed", Outcome.FAILED), status
        assert "larger than" in status.message and status.tries == 0
        engine = w.engines["e1"]
        await wait_until(lambda: not engine.running(), timeout=5, what="the engine is let go")


async def test_one_submitter_is_refused_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue is full for the first, whose word of that comes late."""
    refused, enqueue = asyncio.Event(), Queue.enqueue

    async def late(queue: Queue, new: NewJob, limits: Limits) -> Any:
        answer = await enqueue(queue, new, limits)
        if answer.word == "full_user":
            refused.set()
            await pass_time(5.0)
        return answer

    monkeypatch.setattr(Queue, "enqueue", late)
    async with world(monkeypatch, ENGINES) as w:
        one, other = await Durables(w).start(), await Durables(w).start()
        new = one.job(output=5)
        about = About(
            id=new.id, model="m1", user=new.user, cls=new.cls, path="/v1/chat/completions",
            stream=False, created_ms=await one.broker.now_ms(), wait_ms=new.wait_ms, ttl_s=60,
        )  # fmt: skip
        full = msgspec.structs.replace(LIMITS, user_jobs=0)
        first = asyncio.ensure_future(one.durable.submit(new, about, full))
        await refused.wait()
        assert (await other.durable.submit(new, about, LIMITS))[0] == "known"
        assert (await first)[0] == "full_user"
        assert await other.durable.find(new.id) == about
        assert (await other.ended(about)).state == "completed"
        assert await other.broker.command("PTTL", keys.JOBS + new.id) > 0


@pytest.mark.parametrize(("flagged", "state"), [(True, "cancelled"), (False, "failed")])
async def test_a_log_that_cannot_be_filled_up_and_a_run_that_cannot_go_back(
    monkeypatch: pytest.MonkeyPatch, flagged: bool, state: str
) -> None:
    """Redis lost more of the answer than is kept, and the job is cancelled, or out of tries."""
    monkeypatch.setattr(logged, "LOG_KEPT", 100)
    verbs, settle = Verbs(monkeypatch), Queue.settle
    async with world(monkeypatch, ENGINES, dispatcher={"tries_max": 1}) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=100, stream=True, sink="s1"), stream=True)

        async def after_a_loss(queue: Queue, *args: Any, **more: Any) -> Any:
            monkeypatch.setattr(Queue, "settle", settle)
            await d.broker.command("DEL", queue.keys.log(about.id))
            if flagged:
                await d.durable.cancel(about)
            return await settle(queue, *args, **more)

        monkeypatch.setattr(Queue, "settle", after_a_loss)
        async with asyncio.timeout(30):
            status = await d.ended(about)
        assert status.state == state, status
        await pass_time(10.0)
        assert verbs.calls["settle"] == 2 and verbs.calls["requeue"] == 1
