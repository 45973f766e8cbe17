"""cancel: free while it waits, a flag while it runs, a tombstone before it comes."""

import pytest

from common.outcomes import Outcome
from tests.scripts.scene import LEADER, NOW, REPLICA, Scene


async def test_a_waiting_job_costs_nothing(scene: Scene) -> None:
    await scene.enqueue("j")
    assert await scene.cancel("j", frames=b"end") == ("cancelled", "")
    assert await scene.counter() == 0.0
    left = {k.removeprefix(scene.keys.prefix) for k in await scene.dump()}
    assert left == {"board", "counter:live"}


async def test_one_of_several_leaves_the_others_in_order(scene: Scene) -> None:
    for job in ("a", "b", "c"):
        await scene.enqueue(job)
    assert (await scene.cancel("b"))[0] == "cancelled"
    first, second = await scene.pop(5)
    assert [first.job, second.job] == ["a", "c"]
    await scene.settle(first)
    await scene.settle(second)


async def test_a_running_job_is_flagged_for_its_dispatcher(scene: Scene) -> None:
    lease = await scene.running()
    assert await scene.cancel("j") == ("flagged", LEADER)
    assert await scene.cancel("j", reason=Outcome.GATEWAY_DEAD) == ("flagged", LEADER)
    assert await scene.field("j", "cancelled") == b"gateway_dead"
    assert await scene.queue.renew([("j", lease.attempt, "")], LEADER, now_ms=NOW) == ["cancelled"]
    await scene.settle(lease, Outcome.CANCELLED, cost=0.0)
    assert await scene.counter() == 0.0


async def test_an_ended_job_is_forgotten(scene: Scene) -> None:
    await scene.settle(await scene.running("j"))
    assert await scene.cancel("j") == ("ended", "")
    orphan = await scene.started("k")
    scene.now += 6_000
    await scene.settle(orphan, Outcome.ORPHANED, heir=True)
    assert await scene.cancel("k") == ("ended", "")
    for job in ("j", "k"):
        assert await scene.broker.command("EXISTS", scene.keys.record(job)) == 0
    assert await scene.broker.command("EXISTS", scene.keys.running, scene.keys.owned(REPLICA)) == 0


async def test_an_unknown_id_is_refused_for_a_while(scene: Scene) -> None:
    assert await scene.cancel("j") == ("unknown", "")
    assert await scene.cancel("j") == ("unknown", "")
    assert 0 < int(await scene.broker.command("PTTL", scene.keys.record("j"))) <= 60_000
    assert (await scene.enqueue("j")).word == "cancelled"
    await scene.broker.command("PEXPIRE", scene.keys.record("j"), 0)
    assert (await scene.enqueue("j")).word == "queued"
    await scene.cancel("j")


@pytest.mark.parametrize(("late", "word"), [(999, "early"), (1_000, "cancelled")])
async def test_a_deadline_to_the_millisecond(scene: Scene, late: int, word: str) -> None:
    await scene.enqueue("j", wait_ms=1_000)
    scene.now += late
    assert (await scene.cancel("j", reason=Outcome.DEADLINE, due=True))[0] == word
    await scene.cancel("j")


async def test_no_deadline_ends_a_run_or_an_unknown_job(scene: Scene) -> None:
    lease = await scene.running("j", wait_ms=1)
    scene.now += 60_000
    before = await scene.dump()
    for job in ("j", "none"):
        assert await scene.cancel(job, reason=Outcome.DEADLINE, due=True) == ("early", "")
    assert await scene.dump() == before
    await scene.settle(lease)
