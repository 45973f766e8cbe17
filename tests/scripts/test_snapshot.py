"""snapshot: who leads, what waits, what runs, and how many turns until one's own."""

import pytest

from common.jobs import Running, Snapshot
from common.keys import path
from tests.scripts.scene import LEADER, NOW, Scene

pytestmark = pytest.mark.jobs_inside


async def test_an_empty_queue(scene: Scene) -> None:
    empty = Snapshot("", 0, {"interactive": 0, "standard": 0, "batch": 0}, [], [0])
    assert await scene.queue.snapshot([("batch", "u", "none")]) == empty
    assert await scene.dump() == {}


async def test_all_of_it(scene: Scene) -> None:
    lease = await scene.started()
    await scene.enqueue("k")
    await scene.enqueue("b", cls="batch")
    before = await scene.dump()
    assert await scene.queue.snapshot([("batch", "u", "b"), ("interactive", "u", "j")]) == Snapshot(
        LEADER, scene.term, {"interactive": 1, "standard": 0, "batch": 1},
        [Running("j", LEADER, lease.attempt, "b1", True, "u", "interactive", lease.arrival)],
        [2, 0],
    )  # fmt: skip
    assert await scene.dump() == before


async def test_places_are_the_turns_in_which_jobs_are_popped(scene: Scene) -> None:
    """Exact where all charges are equal and nothing comes meanwhile."""
    counts = {"a": 3, "b": 1, "c": 2}
    for n in range(3):
        for user in counts:
            if n < counts[user]:
                await scene.enqueue(f"{user}{n}", user)
    await scene.enqueue("low", "a", cls="standard")
    jobs = [(user, f"{user}{n}") for user in counts for n in range(counts[user])]
    asked = [("interactive", user, job) for user, job in jobs]
    snapshot = await scene.queue.snapshot([*asked, ("standard", "a", "low")])
    turns = [lease.job for lease in await scene.pop(9)]
    assert [turns.index(job) + 1 for _, job in jobs] == snapshot.places[:-1]
    assert snapshot.places[-1] == 7
    assert scene.now == NOW


async def test_lanes_have_the_places_of_their_jobs(scene: Scene) -> None:
    """Of users and of the sub-users of a key, in each class; in the order in which they go."""
    users = {("a", ""): 4, ("b", ""): 1, ("key", "s"): 3, ("key", "t"): 1}
    for n in range(4):
        for (user, sub), jobs in users.items():
            if n < jobs:
                await scene.enqueue(f"{user}{sub}{n}", user, sub=sub)
    await scene.enqueue("low", "a", cls="standard")
    await scene.enqueue("last", "a", cls="batch")
    lanes = [("interactive", path(*who)) for who in users]
    more = [("standard", path("a")), ("batch", path("a")), ("batch", path("b"))]
    lost = ("interactive", path("a"), "none")
    snapshot = await scene.queue.snapshot([lost], [*lanes, *more])
    assert snapshot.places == [0]
    assert [lane.jobs for lane in snapshot.lanes] == [*users.values(), 1, 1, 0]
    assert all(len(lane.first) == lane.jobs for lane in snapshot.lanes)
    assert snapshot.lanes[-1].first == []
    seen = [job for lane in snapshot.lanes for job in lane.first]
    arrivals = {job.job: job.arrival for job in seen}
    asked = [(cls, user, job.job) for (cls, user), lane in
             zip([*lanes, *more], snapshot.lanes, strict=True) for job in lane.first]  # fmt: skip
    assert (await scene.queue.snapshot(asked)).places == [job.place for job in seen]
    await scene.lead()
    popped = await scene.queue.pop(
        ["interactive", "standard"], ["b1"] * 20, LEADER, scene.term, now_ms=scene.now
    )
    turns = [*(lease.job for lease in popped.leases), "last"]
    assert {job.job: job.place for job in seen} == {job: n for n, job in enumerate(turns, 1)}
    assert {lease.job: lease.arrival for lease in popped.leases}.items() <= arrivals.items()


async def test_of_a_long_lane_the_first_jobs(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.queue.SNAPSHOT_MAX", 2)
    for n in range(5):
        await scene.enqueue(f"j{n}")
    (lane,) = (await scene.queue.snapshot((), [("interactive", "u")])).lanes
    assert (lane.jobs, [(j.job, j.place) for j in lane.first]) == (5, [("j0", 1), ("j1", 2)])
