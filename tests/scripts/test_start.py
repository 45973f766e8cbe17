"""start: the first byte of the right run, and of no other."""

import asyncio

import pytest

from common.broker import Subscriber
from tests.scripts.scene import LEADER, OTHER, REPLICA, Scene
from tests.support.wait import wait_until

pytestmark = pytest.mark.jobs_inside


async def start(scene: Scene, job: str, owner: str, attempt: int) -> str:
    return await scene.queue.start(job, owner, attempt, scene.channel, b"first")


async def test_each_answer_and_who_is_heard(scene: Scene) -> None:
    lease = await scene.running()
    flagged = await scene.running("k")
    heard: list[tuple[bytes, bytes]] = []
    listener = Subscriber(scene.broker, [scene.channel, scene.keys.bell], heard.append)
    task = asyncio.create_task(listener.run())
    await wait_until(listener.ready.is_set)
    try:
        assert await start(scene, "j", LEADER, lease.attempt - 1) == "lost"
        assert await start(scene, "j", OTHER, lease.attempt) == "lost"
        assert await start(scene, "none", LEADER, lease.attempt) == "unknown"
        await scene.cancel("k")
        assert await start(scene, "k", LEADER, flagged.attempt) == "cancelled"
        assert await scene.field("j", "started") is None
        assert await start(scene, "j", LEADER, lease.attempt) == "started"
        assert await start(scene, "j", LEADER, lease.attempt) == "started"
        await wait_until(lambda: len(heard) >= 4)
        bell, channel = scene.keys.bell.encode(), scene.channel.encode()
        assert heard == [
            (bell, b"cancel k b1"), (channel, b"first"), (bell, b"start j b1"), (channel, b"first"),
        ]  # fmt: skip
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await scene.field("j", "started") == b"1"


async def test_an_ended_or_requeued_run_is_lost(scene: Scene) -> None:
    lease = await scene.running()
    await scene.queue.requeue(lease, LEADER, count_try=False, now_ms=scene.now)
    assert await start(scene, "j", LEADER, lease.attempt) == "lost"
    (again,) = await scene.pop()
    await scene.settle(again)
    assert await start(scene, "j", LEADER, again.attempt) == "lost"
    await scene.queue.ack(["j"], REPLICA)
    assert await start(scene, "j", LEADER, again.attempt) == "unknown"


async def test_a_tombstone_is_no_run(scene: Scene) -> None:
    await scene.cancel("j")
    assert await start(scene, "j", LEADER, 5) == "unknown"
