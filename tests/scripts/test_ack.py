"""ack: an end is kept until its gateway has it, and a job that has not ended always."""

import pytest

from common.outcomes import Outcome
from tests.scripts.scene import NOW, REPLICA, Scene


@pytest.mark.jobs_inside
async def test_only_what_ended_is_forgotten(scene: Scene) -> None:
    done = await scene.running("done")
    await scene.settle(done)
    orphan = await scene.started("orphan")
    scene.now += 6_000
    await scene.settle(orphan, Outcome.ORPHANED, heir=True)
    scene.term = 0
    await scene.running("running")
    await scene.enqueue("waiting", "v")
    await scene.cancel("tombstone")
    jobs = ["done", "orphan", "running", "waiting", "tombstone", "none"]
    assert await scene.queue.ack(jobs, REPLICA) == 2
    left = [j for j in jobs if await scene.broker.command("EXISTS", scene.keys.record(j))]
    assert left == ["running", "waiting", "tombstone"]
    owned = await scene.broker.command("SMEMBERS", scene.keys.owned(REPLICA))
    assert sorted(owned) == [b"running", b"waiting"]
    assert await scene.lease_until("orphan") is None
    assert await scene.lease_until("running") is not None
    assert await scene.queue.ack(jobs, REPLICA) == 0


async def test_nothing_to_acknowledge(scene: Scene) -> None:
    assert await scene.queue.ack([], REPLICA) == 0
    assert await scene.dump() == {}
    assert scene.now == NOW
