"""charge: while a job runs its charge only rises."""

from typing import Any

import msgspec
import pytest

from common.jobs import Lease
from tests.scripts.scene import LEADER, OTHER, Scene

pytestmark = pytest.mark.jobs_inside


async def charge(scene: Scene, run: Lease, cost: float, owner: str = LEADER, **other: Any) -> str:
    run = msgspec.structs.replace(run, **other)
    (word,) = await scene.queue.charge([(run, cost)], owner)
    return word


async def test_an_idle_and_a_backlogged_user(scene: Scene) -> None:
    lease = await scene.running(weight=2.0)
    assert await scene.counter() == lease.charged == 500.0
    assert await charge(scene, lease, 1_000.0) == "enough"
    assert await charge(scene, lease, 1_001.0) == "raised"
    assert await scene.counter() == 500.5
    await scene.enqueue("k")
    assert await charge(scene, lease, 3_000.0) == "raised"
    assert await scene.counter() == 1_500.0
    assert await charge(scene, lease, 10.0) == "enough"
    assert await scene.counter() == 1_500.0
    assert await scene.field("j", "charged") == b"1500"


async def test_what_was_raised_is_undone_or_corrected_at_the_end(scene: Scene) -> None:
    lease = await scene.running()
    await charge(scene, lease, 5_000.0)
    await scene.settle(lease, cost=1_200.0)
    assert await scene.counter() == 1_200.0


async def test_others_change_nothing(scene: Scene) -> None:
    lease = await scene.running()
    await scene.enqueue("waiting", "v")
    before = await scene.dump()
    for job, attempt, owner in [
        ("j", lease.attempt - 1, LEADER), ("j", lease.attempt, OTHER), ("none", 1, LEADER),
        ("waiting", 0, LEADER),
    ]:  # fmt: skip
        assert await charge(scene, lease, 9e9, owner, job=job, attempt=attempt) == "lost"
    assert await scene.dump() == before


async def test_many_in_one_call(scene: Scene) -> None:
    a, b = await scene.running("a", "u"), await scene.running("b", "v")
    none = msgspec.structs.replace(a, job="none")
    c = await scene.running("c", "v", sub="s")
    words = await scene.queue.charge([(a, 2e3), (none, 1.0), (c, 7e3), (b, 1.0)], LEADER)
    assert words == ["raised", "lost", "raised", "enough"]
    assert (await scene.counter("u"), round(await scene.counter("v"))) == (2_000.0, 1_000)
    assert [round(await scene.counter("v", sub=s)) for s in (None, "s")] == [7_000, 7_000]
