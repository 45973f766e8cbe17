"""assert: what runs and Redis forgot counts again; what is over stays over."""

import pytest

from common.jobs import Lease
from common.outcomes import Outcome
from tests.scripts.scene import LEADER, NOW, OTHER, REPLICA, Scene

pytestmark = pytest.mark.jobs_inside


async def restore(scene: Scene, lease: Lease, owner: str = LEADER, started: bool = False) -> str:
    return await scene.queue.restore(
        lease, owner, "b2", lease.charged, started=started, now_ms=scene.now
    )


@pytest.mark.parametrize("started", [False, True])
async def test_a_run_that_redis_lost(scene: Scene, started: bool) -> None:
    lease = await scene.running()
    await scene.broker.command("FLUSHALL")
    assert await restore(scene, lease, started=started) == "restored"
    assert await scene.counter() == 1_000.0
    assert await scene.lease_until() == NOW + 6_000
    assert await scene.field("j", "backend") == b"b2"
    assert await scene.broker.command("HGET", scene.keys.inflight, "u") == b"1"
    body = await scene.broker.command("GET", scene.keys.body("j"))
    assert body == (None if started else b"4:metabody")
    assert int(await scene.broker.command("PTTL", scene.keys.owned(REPLICA))) > 0
    assert await restore(scene, lease, started=started) == "running"
    assert await scene.counter() == 1_000.0, "not booked twice"


async def test_a_restored_run_can_be_given_back_and_popped(scene: Scene) -> None:
    lease = await scene.running()
    await scene.broker.command("FLUSHALL")
    await restore(scene, lease)
    await scene.queue.requeue(lease, LEADER, count_try=True, now_ms=NOW)
    await scene.lead()
    (again,) = await scene.pop()
    assert again.attempt > lease.attempt
    assert (again.arrival, again.body, again.terms) == (lease.arrival, lease.body, lease.terms)


@pytest.mark.parametrize("others", [0, 1])
async def test_a_run_that_redis_still_has_queued(scene: Scene, others: int) -> None:
    await scene.enqueue("j")
    for n in range(others):
        await scene.enqueue(f"k{n}")
    command = scene.broker.command
    kept = await command("HGETALL", scene.keys.record("j"))
    lease = (await scene.pop())[0]
    # A replica that had not heard of the pop.
    await scene.queue.requeue(lease, LEADER, count_try=False, now_ms=NOW)
    await command("DEL", scene.keys.record("j"))
    await command("HSET", scene.keys.record("j"), *kept)
    assert await restore(scene, lease) == "restored"
    assert await scene.counter() == 1_000.0
    assert await command("ZSCORE", scene.keys.deadlines, "j") is None
    assert await command("ZSCORE", scene.keys.lane("interactive", "u"), "j") is None
    assert int(await command("HGET", scene.keys.board, "jobs:interactive") or 0) == others
    assert [x.job for x in await scene.pop(5)] == [f"k{n}" for n in range(others)]


async def test_a_run_that_is_over_is_lost(scene: Scene) -> None:
    lease = await scene.running()
    assert await restore(scene, lease, OTHER) == "lost"
    await scene.queue.requeue(lease, LEADER, count_try=False, now_ms=NOW)
    assert await restore(scene, lease) == "lost"
    (again,) = await scene.pop()
    assert await restore(scene, lease) == "lost"
    await scene.settle(again)
    assert await restore(scene, again) == "lost"


async def test_an_orphan_stays_one(scene: Scene) -> None:
    lease = await scene.started()
    scene.now += 6_000
    await scene.settle(lease, Outcome.ORPHANED, heir=True)
    assert await restore(scene, lease, started=True) == "lost"


async def test_a_cancelled_job_is_to_be_stopped(scene: Scene) -> None:
    lease = await scene.running()
    await scene.cancel("j")
    assert await restore(scene, lease) == "cancelled"
    await scene.broker.command("FLUSHALL")
    await scene.cancel("j")
    assert await restore(scene, lease) == "cancelled"


async def test_a_started_run_stays_started(scene: Scene) -> None:
    """The caller asked before it had the answer to its `start`."""
    lease = await scene.started()
    assert await restore(scene, lease, started=False) == "running"
    assert await scene.field("j", "started") == b"1"
    assert await scene.queue.requeue(lease, LEADER, count_try=True, now_ms=NOW) == "started"
