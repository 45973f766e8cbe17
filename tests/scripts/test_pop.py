"""pop: only the leader, in fair order, and past whatever is broken."""

from typing import Any

import pytest

from common.cost import Terms
from common.jobs import Lease, Popped
from common.queue import Queue
from tests.scripts.scene import LEADER, NOW, OTHER, Scene

pytestmark = pytest.mark.jobs_inside


async def test_the_lease_has_all_that_running_needs(scene: Scene) -> None:
    lease = await scene.running("j", "ü", terms=Terms(100.0, 2.0, 0.0, 50), weight=2.0)
    assert lease == Lease(
        job="j", user="_c3bc", cls="interactive", attempt=NOW, backend="b1", charged=100.0,
        terms=Terms(100.0, 2.0, 0.0, 50), weight=2.0, meta=b"meta", channel="fl:reply:g1-host-cc",
        replica="g1-host-cc", tries=0, arrival=NOW * 1_000, deadline_ms=NOW + 60_000, inflight=0,
        body=b"body",
    )  # fmt: skip
    assert await scene.lease_until() == NOW + 6_000
    assert await scene.field("j", "state") == b"running"
    assert await scene.broker.command("HGET", scene.keys.inflight, "_c3bc") == b"1"
    assert await scene.broker.command("EXISTS", scene.keys.deadlines) == 0


async def test_only_the_leader_pops(scene: Scene) -> None:
    await scene.enqueue("j")
    await scene.queue.pop(["interactive"], ["b"], LEADER, NOW, now_ms=NOW)
    term = await scene.lead()
    before = await scene.dump()
    for owner, number, now in [
        (OTHER, term, NOW), (LEADER, term - 1, NOW), (LEADER, term + 1, NOW),
        (LEADER, term, NOW + 2_000),
    ]:  # fmt: skip
        popped = await scene.queue.pop(["interactive"], ["b"], owner, number, now_ms=now)
        assert (popped.word, popped.leases) == ("stale", [])
    assert await scene.dump() == before
    popped = await scene.queue.pop(["interactive"], ["b"], LEADER, term, now_ms=NOW + 1_999)
    assert [lease.job for lease in popped.leases] == ["j"]


async def test_one_for_each_place_and_no_more(scene: Scene) -> None:
    for n in range(3):
        await scene.enqueue(f"j{n}", f"u{n}")
    term = await scene.lead()
    none = await scene.queue.pop(["interactive"], [], LEADER, term, now_ms=NOW)
    assert (none.leases, none.left["interactive"]) == ([], 3)
    two = await scene.queue.pop(["interactive"], ["b2", "b1"], LEADER, term, now_ms=NOW)
    assert [(lease.job, lease.backend) for lease in two.leases] == [("j0", "b2"), ("j1", "b1")]
    assert two.left == {"interactive": 1, "standard": 0, "batch": 0}
    rest = await scene.queue.pop(["interactive"], ["b1"] * 9, LEADER, term, now_ms=NOW)
    assert ([lease.job for lease in rest.leases], rest.left["interactive"]) == (["j2"], 0)


async def test_classes_do_not_mix(scene: Scene) -> None:
    await scene.enqueue("j", cls="batch")
    assert await scene.pop(1, "interactive") == []
    assert await scene.pop(1, "standard") == []
    assert [lease.job for lease in await scene.pop(1, "batch")] == ["j"]


async def test_the_least_counter_is_next(scene: Scene) -> None:
    """A user who pays half as much (weight 2) gets twice the turns."""
    for n in range(8):
        await scene.enqueue(f"heavy{n}", "heavy", weight=2.0)
        await scene.enqueue(f"light{n}", "light")
    turns = [lease.user for lease in await scene.pop(9)]
    assert (turns.count("heavy"), turns.count("light")) == (6, 3)
    assert [lease.job for lease in await scene.pop(1)] != []


@pytest.mark.parametrize(
    ("mean", "terms", "weight", "charge"),
    [
        (None, Terms(10.0, 2.0, 0.0, 1_000), 1.0, 410.0),
        (None, Terms(10.0, 2.0, 0.0, 100), 1.0, 210.0),
        (None, Terms(10.0, 2.0, 0.0, 0), 1.0, 10.0),
        (50, Terms(10.0, 2.0, 0.0, 1_000), 1.0, 110.0),
        (50, Terms(10.0, 2.0, 0.0, 1_000), 4.0, 27.5),
        (50, Terms(0.1, 0.0, 0.0, 9), 0.3, 0.1 / 0.3),
        (50, Terms(10.0, 2.0, 0.5, 1_000), 2.0, 680.0),
    ],
)
async def test_the_charge(
    scene: Scene, mean: int | None, terms: Terms, weight: float, charge: float
) -> None:
    if mean is not None:
        await scene.broker.command("HSET", scene.keys.ewma, "u", mean)
    lease = await scene.running(terms=terms, weight=weight)
    assert lease.charged == charge == await scene.counter()


async def test_v_is_the_whole_part_and_never_falls(scene: Scene) -> None:
    vs = []
    for n, cost in enumerate((1_000.6, 10.0, 0.5)):
        lease = await scene.running(f"j{n}", terms=Terms(cost, 0.0, 0.0, 0))
        vs.append(await scene.vtime())
        await scene.settle(lease)
    assert vs == [0, 1_000, 1_010]
    await scene.enqueue("new", "new")
    await scene.broker.command("ZADD", scene.keys.classes["interactive"].backlog, "5", "new")
    await scene.pop()
    assert await scene.vtime() == 1_010


async def test_v_falls_by_what_was_given_back(scene: Scene) -> None:
    """A newcomer does not wait for service that was charged beforehand and never came."""
    for n in range(9):
        await scene.enqueue(f"j{n}", "flood")
    first = await scene.pop(4)
    assert await scene.vtime() == 3_000
    for lease in first:
        await scene.settle(lease, cost=10.0)
    await scene.pop()
    assert (await scene.vtime(), await scene.counter("flood")) == (40, 1_040)
    await scene.enqueue("new", "new")
    assert [lease.job for lease in await scene.pop(1)] == ["new"]
    (lease,) = await scene.pop()
    before = await scene.vtime()
    await scene.queue.requeue(lease, LEADER, count_try=False, now_ms=NOW)
    await scene.pop()
    assert await scene.vtime() == before, "it is given to the same place again"


async def test_attempts_rise(scene: Scene) -> None:
    lease = await scene.running("j", floor=NOW + 500)
    assert lease.attempt == NOW + 500
    await scene.queue.requeue(lease, LEADER, count_try=True, now_ms=NOW)
    (again,) = await scene.pop()
    assert (again.attempt, again.tries) == (NOW + 501, 1)


@pytest.mark.parametrize("body_too", [False, True])
async def test_a_missing_record_does_not_wedge_the_class(scene: Scene, body_too: bool) -> None:
    for job, user in (("lost", "a"), ("next", "a"), ("other", "b")):
        await scene.enqueue(job, user)
    await scene.broker.command("DEL", scene.keys.record("lost"))
    if body_too:
        await scene.broker.command("DEL", scene.keys.body("lost"))
    assert [lease.job for lease in await scene.pop(5)] == ["next", "other"]
    assert await scene.broker.command("EXISTS", scene.keys.body("lost")) == 0
    if not body_too:
        assert await scene.broker.command("HGETALL", scene.keys.waiting) == []


async def test_a_tombstone_in_a_lane_leaves_no_body(scene: Scene) -> None:
    await scene.enqueue("lost")
    await scene.broker.command("DEL", scene.keys.record("lost"))
    await scene.cancel("lost")
    assert await scene.pop() == []
    assert await scene.broker.command("EXISTS", scene.keys.body("lost")) == 0


async def test_a_lane_that_is_gone_does_not_wedge_the_class(scene: Scene) -> None:
    await scene.enqueue("a", "a")
    await scene.enqueue("b", "b")
    await scene.broker.command("DEL", scene.keys.lane("interactive", "a"))
    assert [lease.job for lease in await scene.pop(5)] == ["b"]


def left(popped: Popped) -> int:
    return popped.left["interactive"]


async def pop(queue: Queue, monkeypatch: pytest.MonkeyPatch, **changes: int) -> Popped:
    """A pop with other limits than the usual."""
    call = queue.broker.call

    async def changed(verb: str, **slots: Any) -> Any:
        return await call(verb, **(slots | changes))

    with monkeypatch.context() as patch:
        patch.setattr(queue.broker, "call", changed)
        return await queue.pop(["interactive"], ["b"] * 9, LEADER, NOW, now_ms=NOW)


async def test_a_call_has_its_limits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        await scene.enqueue(f"j{n}", body=b"x" * 10)
    await scene.lead()
    by_heads = await pop(scene.queue, monkeypatch, batch=2)
    assert ([lease.job for lease in by_heads.leases], left(by_heads)) == (["j0", "j1"], 4)
    by_bytes = await pop(scene.queue, monkeypatch, bytes_max=11)
    assert ([lease.job for lease in by_bytes.leases], left(by_bytes)) == (["j2", "j3"], 2)
