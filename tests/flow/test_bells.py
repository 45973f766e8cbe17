"""No job waits while there is room: bells that ring at a bad moment, or do not ring at all."""

import asyncio

import pytest

from common.jobs import Popped
from dispatcher.loop import IDLE_S
from sim.settings import EngineSettings
from tests.flow.world import Asked, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

ROOMY = {"e1": EngineSettings(model="m1", max_num_seqs=16, step_ms=10, seed=1)}


async def test_a_job_enqueued_while_a_pop_is_under_way_is_popped_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, ROOMY) as w:
        leader = w.leader()
        assert leader is not None
        loop = leader._loops["m1"]
        pop = loop.queue.pop
        late: list[Asked] = []

        async def slow(*args: object, **more: object) -> Popped:
            """The reply of this pop overtakes nothing: another job's bell rings before it."""
            popped = await pop(*args, **more)  # type: ignore[arg-type]
            if popped.leases and not late:
                rung = loop._rung["standard"]
                late.append(await w.ask("b", output=2))
                await wait_until(lambda: loop._rung["standard"] > rung, what="its bell")
            return popped

        monkeypatch.setattr(loop.queue, "pop", slow)
        await w.ask("a", output=2)
        await wait_until(lambda: bool(late), what="the second job")
        await asyncio.wait_for(w.answers(*late), IDLE_S / 2)


async def test_a_job_whose_bell_nobody_heard_is_found_though_something_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, ROOMY) as w:
        leader = w.leader()
        assert leader is not None
        loop = leader._loops["m1"]
        await pass_time(3.0)
        monkeypatch.setattr(loop, "ring", lambda *_: None)
        unheard = await w.ask("a", output=2)

        async def nudge() -> None:
            while unheard.end is None:
                loop.wake()
                await pass_time(0.1)

        await asyncio.wait_for(nudge(), 2 * IDLE_S)
