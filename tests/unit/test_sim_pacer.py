"""Engine time: the timer, freezes, and stalls of the process."""

from __future__ import annotations

import asyncio

import pytest

from sim.pacer import Pacer
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime


def pacer() -> tuple[Pacer, list[float]]:
    ticks: list[float] = []
    made = Pacer(ticks.append)
    assert made.attach() and not made.attach()
    return made, ticks


async def test_the_last_arming_counts() -> None:
    made, ticks = pacer()
    for due in (5.0, 1.0, 3.0, 3.0):
        made.arm(due)
    await pass_time(10)
    assert ticks == [3.0]
    made.arm(12.0)
    made.arm(None)
    await pass_time(10)
    assert ticks == [3.0]


async def test_a_freeze_takes_its_time_away() -> None:
    made, ticks = pacer()
    made.arm(5.0)
    await pass_time(2)
    made.freeze()
    made.arm(5.0)
    await pass_time(100)
    assert (made.frozen, made.now(), ticks) == (True, 2.0, [])
    made.thaw()
    made.arm(5.0)
    await pass_time(2.9)
    assert (made.now(), ticks) == (pytest.approx(4.9), [])
    await pass_time(0.2)
    assert ticks == [5.0]


@pytest.mark.parametrize(("stall", "seen"), [(0.2, 1.2), (30.0, 1.0)])
async def test_a_long_stall_is_lost_a_short_one_is_made_up(stall: float, seen: float) -> None:
    made, ticks = pacer()
    made.arm(1.0)
    await asyncio.sleep(0)
    # The process stands still past the timer.
    asyncio.get_running_loop().setup_looptime(start=1.0 + stall)  # type: ignore[attr-defined]
    await pass_time(0.001)
    assert ticks == [pytest.approx(seen, abs=0.01)]
    assert made.now() == pytest.approx(seen, abs=0.01)
