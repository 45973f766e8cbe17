"""requeue: back to the old place, as if it had never been popped; unless bytes went out."""

import pytest

from common.cost import Terms
from common.jobs import Lease
from tests.scripts.scene import LEADER, NOW, OTHER, Scene

pytestmark = pytest.mark.jobs_inside


async def requeue(scene: Scene, lease: Lease, owner: str = LEADER, **more: object) -> str:
    more = {"count_try": False, "now_ms": scene.now} | more
    return await scene.queue.requeue(lease, owner, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("others", [0, 2])
async def test_everything_is_as_before(scene: Scene, others: int) -> None:
    """Counter, place, deadline, counts: also where the user has more waiting."""
    await scene.lead()
    await scene.enqueue("first", terms=Terms(0.1, 0.7, 0.0, 100), weight=0.3)
    for n in range(others):
        await scene.enqueue(f"more{n}")
    before = await scene.dump()
    lease = (await scene.pop())[0]
    assert await requeue(scene, lease) == "requeued"
    after = await scene.dump()
    record = after.pop(scene.keys.record("first"))[2]
    assert record == before.pop(scene.keys.record("first"))[2] | {"owner": b"", "attempt": NOW}
    given_back = after[scene.keys.board][2].pop("back:live")
    assert (given_back, after) == (lease.charged, before)
    assert (await scene.pop())[0].job == "first"


async def test_the_lift_of_a_backlogged_user_stands(scene: Scene) -> None:
    """An old job's return takes back its charge, not what the user's absence was worth."""
    old = await scene.running("old", "away")
    for n in range(6):
        await scene.settle(await scene.running(f"j{n}", "busy"))
    await scene.enqueue("new", "away")
    lifted = await scene.counter("away")
    assert lifted > 1_000
    assert await requeue(scene, old) == "requeued"
    assert await scene.counter("away") == lifted - old.charged


async def test_a_raised_charge_is_undone_as_a_whole(scene: Scene) -> None:
    lease = await scene.running()
    await scene.queue.charge([(lease, 7_000.0)], LEADER)
    await requeue(scene, lease)
    assert await scene.counter() == 0.0


async def test_only_the_pair_gives_back(scene: Scene) -> None:
    lease = await scene.running()
    before = await scene.dump()
    assert await requeue(scene, lease, OTHER) == "lost"
    assert await scene.dump() == before
    assert await requeue(scene, lease) == "requeued"
    assert await requeue(scene, lease) == "lost"
    (again,) = await scene.pop()
    assert await requeue(scene, lease) == "lost"
    await scene.settle(again)
    assert await requeue(scene, again) == "lost"


async def test_an_unknown_job(scene: Scene) -> None:
    lease = await scene.running()
    await scene.broker.command("FLUSHALL")
    assert await requeue(scene, lease) == "unknown"
    await scene.cancel("j")
    assert await requeue(scene, lease) == "unknown"


async def test_started_and_cancelled_runs_stay_with_their_caller(scene: Scene) -> None:
    lease = await scene.started("s")
    assert await requeue(scene, lease) == "started"
    flagged = await scene.running("c")
    await scene.cancel("c")
    assert await requeue(scene, flagged) == "cancelled"
    assert await scene.field("c", "state") == await scene.field("s", "state") == b"running"


async def test_how_often_it_made_room_is_told_by_pop_and_outlives_redis(scene: Scene) -> None:
    lease = await scene.running()
    assert lease.yields == 0
    for yields in (True, False, True):
        assert await requeue(scene, lease, yields=yields) == "requeued"
        (lease,) = await scene.pop()
    assert (lease.yields, lease.tries) == (2, 0)
    await scene.broker.command("FLUSHALL")
    await scene.queue.restore(lease, LEADER, "b1", lease.charged, started=False, now_ms=scene.now)
    assert await requeue(scene, lease) == "requeued"
    await scene.lead()
    (lease,) = await scene.pop()
    assert lease.yields == 2


async def test_tries_are_counted_to_the_last(scene: Scene) -> None:
    lease = await scene.running()
    words = []
    for _ in range(3):
        words.append(await requeue(scene, lease, count_try=True))
        if words[-1] == "requeued":
            (lease,) = await scene.pop()
    assert words == ["requeued", "requeued", "tries"]
    assert lease.tries == 2
    assert await requeue(scene, lease, count_try=False) == "requeued"


@pytest.mark.parametrize(("late", "word"), [(5_999, "lost"), (6_000, "requeued")])
async def test_the_heir_waits_for_the_lease_to_end(scene: Scene, late: int, word: str) -> None:
    lease = await scene.running()
    assert await requeue(scene, lease, heir=True, now_ms=NOW + late) == word
