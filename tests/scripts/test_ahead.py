"""pop with `lookahead`: which job of a lane goes, how often one is passed, and what is told."""

import pytest

from common.jobs import Heads, Popped
from tests.scripts.scene import LEADER, Scene

pytestmark = pytest.mark.jobs_inside


async def pop(scene: Scene, n: int, *liked: str, lookahead: int = 2) -> Popped:
    if not scene.term:
        await scene.lead()
    return await scene.queue.pop(
        ["interactive"], ["b"] * n, LEADER, scene.term, lookahead=lookahead, liked=liked,
        now_ms=scene.now,
    )  # fmt: skip


async def fill(scene: Scene, user: str, jobs: str) -> None:
    for job in jobs:
        assert (await scene.enqueue(job, user)).word == "queued"


def ids(popped: Popped) -> str:
    return "".join(lease.job for lease in popped.leases)


@pytest.mark.parametrize(
    ("liked", "order"),
    [("", "abcde"), ("c", "cabde"), ("ce", "caebd"), ("d", "adbce"), ("ab", "abcde"),
     ("cde", "cdabe"), ("edc", "cdabe"), ("x", "abcde")],
)  # fmt: skip
async def test_a_job_goes_before_two_and_lets_two_go_before_it(
    scene: Scene, liked: str, order: str
) -> None:
    await fill(scene, "u", "abcde")
    assert "".join([ids(await pop(scene, 1, *liked)) for _ in range(5)]) == order


async def test_one_pop_goes_by_it_for_each_place(scene: Scene) -> None:
    await fill(scene, "u", "abcde")
    assert ids(await pop(scene, 5, *"cde")) == "cdabe"


async def test_without_lookahead_the_first_goes_first(scene: Scene) -> None:
    await fill(scene, "u", "abc")
    popped = await pop(scene, 3, *"bc", lookahead=0)
    assert (ids(popped), popped.heads) == ("abc", [])


async def test_others_have_their_turns_all_the_same(scene: Scene) -> None:
    """Whose turn it is is not asked of the prompts."""
    await fill(scene, "u", "abc")
    await fill(scene, "v", "def")
    popped = await pop(scene, 6, *"cf", lookahead=8)
    assert [lease.user for lease in popped.leases] == ["u", "v"] * 3
    assert ids(popped) == "cfadbe"


async def test_who_was_passed_stays_so_after_a_run_that_failed(scene: Scene) -> None:
    await fill(scene, "u", "abcd")
    (c,) = (await pop(scene, 1, "c", lookahead=1)).leases[:1]
    assert c.job == "a", "two before it are too many"
    await scene.queue.requeue(c, LEADER, count_try=False, now_ms=scene.now)
    assert ids(await pop(scene, 1, "b", lookahead=1)) == "b"
    (a,) = (await pop(scene, 1, lookahead=1)).leases
    await scene.queue.requeue(a, LEADER, count_try=False, now_ms=scene.now)
    assert ids(await pop(scene, 3, *"cd", lookahead=1)) == "acd"


async def test_a_name_is_no_part_of_another(scene: Scene) -> None:
    for job in ("first", "j1", "j12"):
        await scene.enqueue(job)
    assert [x.job for x in (await pop(scene, 3, "j12")).leases] == ["j12", "first", "j1"]


async def test_a_job_without_record_is_not_passed(scene: Scene) -> None:
    """It would get one that says nothing but that, and is kept for ever."""
    await fill(scene, "u", "abc")
    await scene.broker.command("DEL", scene.keys.record("a"))
    assert ids(await pop(scene, 2, "c")) == "cb"
    assert await scene.broker.command("EXISTS", scene.keys.record("a")) == 0


async def test_the_first_of_each_lane_are_told(scene: Scene) -> None:
    await fill(scene, "u", "abcde")
    await fill(scene, "v", "f")
    await fill(scene, "w", "g")
    await scene.enqueue("long", "v", meta=b"x" * 600)
    popped = await pop(scene, 2)
    rest = [(job, b"meta") for job in "bcd"]
    assert popped.heads == [Heads("interactive", "u", rest),
                            Heads("interactive", "v", [("long", b"")])]  # fmt: skip
    (empty,) = [h for h in (await pop(scene, 9)).heads if h.user == "w"]
    assert empty.jobs == []
