"""snapshot: who leads, what waits, what runs, and how many turns until one's own."""

import pytest

from common.jobs import Running, Snapshot
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
        [Running("j", LEADER, lease.attempt, "b1", True, "u", "interactive")], [2, 0],
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
