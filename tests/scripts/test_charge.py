"""charge: while a job runs its charge only rises."""

import pytest

from tests.scripts.scene import LEADER, OTHER, Scene

pytestmark = pytest.mark.jobs_inside


async def charge(scene: Scene, job: str, attempt: int, cost: float, owner: str = LEADER) -> str:
    (word,) = await scene.queue.charge("interactive", [(job, attempt, cost)], owner)
    return word


async def test_an_idle_and_a_backlogged_user(scene: Scene) -> None:
    lease = await scene.running(weight=2.0)
    assert await scene.counter() == lease.charged == 500.0
    assert await charge(scene, "j", lease.attempt, 1_000.0) == "enough"
    assert await charge(scene, "j", lease.attempt, 1_001.0) == "raised"
    assert await scene.counter() == 500.5
    await scene.enqueue("k")
    assert await charge(scene, "j", lease.attempt, 3_000.0) == "raised"
    assert await scene.counter() == 1_500.0
    assert await charge(scene, "j", lease.attempt, 10.0) == "enough"
    assert await scene.counter() == 1_500.0
    assert await scene.field("j", "charged") == b"1500"


async def test_what_was_raised_is_undone_or_corrected_at_the_end(scene: Scene) -> None:
    lease = await scene.running()
    await charge(scene, "j", lease.attempt, 5_000.0)
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
        assert await charge(scene, job, attempt, 9e9, owner) == "lost"
    assert await scene.dump() == before


async def test_many_in_one_call(scene: Scene) -> None:
    a, b = await scene.running("a", "u"), await scene.running("b", "v")
    words = await scene.queue.charge(
        "interactive", [("a", a.attempt, 2_000.0), ("none", 1, 1.0), ("b", b.attempt, 1.0)], LEADER
    )
    assert words == ["raised", "lost", "enough"]
    assert (await scene.counter("u"), round(await scene.counter("v"))) == (2_000.0, 1_000)
