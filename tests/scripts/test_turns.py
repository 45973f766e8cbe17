"""Whose turn it is: groups of classes, sub-users of keys, places for the idle, the floor share."""

import pytest

from common.broker import Broker
from common.cost import Terms
from common.jobs import Lease, Popped
from common.keys import Policy
from common.queue import Queue
from tests.scripts.scene import LEADER, Scene

pytestmark = pytest.mark.jobs_inside
LIVE = ("interactive", "standard")


async def pop(scene: Scene, classes: tuple[str, ...] = LIVE, n: int = 1, **more: float) -> Popped:
    if not scene.term:
        await scene.lead()
    return await scene.queue.pop(
        classes, ["b1"] * n, LEADER, scene.term, now_ms=scene.now, **more  # type: ignore[arg-type]
    )  # fmt: skip


def users(popped: Popped) -> list[str]:
    return [lease.user for lease in popped.leases]


async def fill(scene: Scene, user: str, n: int = 9, cls: str = "standard", **more: object) -> None:
    for i in range(n):
        name = f"{user}{more.get('sub', '')}{cls}{i}"
        assert (await scene.enqueue(name, user, cls=cls, **more)).word == "queued"


async def test_classes_of_a_group_have_one_order_in_which_weight_decides(scene: Scene) -> None:
    await fill(scene, "chat", cls="interactive", weight=4.0)
    await fill(scene, "code")
    turns = users(await pop(scene, n=10))
    assert (turns.count("chat"), turns.count("code")) == (8, 2)


async def test_a_user_of_two_classes_has_one_counter(scene: Scene) -> None:
    """Using both classes is worth no more than using one."""
    await fill(scene, "both", cls="interactive")
    await fill(scene, "both")
    await fill(scene, "one")
    turns = (await pop(scene, n=12)).leases
    assert [lease.user for lease in turns].count("one") == 6
    assert {lease.cls for lease in turns if lease.user == "both"} == {"interactive"}
    only = users(await pop(scene, ("standard",), n=4))
    assert only.count("both") == 2


async def test_strict_classes_have_orders_of_their_own(broker: Broker) -> None:
    scene = Scene(broker)
    strict: Policy = "strict"
    scene.queue = Queue(broker, "m", strict)
    scene.keys = scene.queue.keys
    await fill(scene, "a", 2, "interactive")
    await fill(scene, "a", 1, "standard")
    await pop(scene, ("interactive",), n=2)
    assert (await scene.counter("a"), await scene.counter("a", "standard")) == (2_000, 0)


async def test_sub_users_divide_their_keys_share(scene: Scene) -> None:
    """However many names are made up, the key has one share; inside, each name has the same."""
    for sub in ("x", "y", "z"):
        await fill(scene, "key", sub=sub)
    await fill(scene, "alone")
    turns = users(await pop(scene, n=12))
    assert turns.count("alone") == 6
    assert {u: turns.count(u) for u in set(turns) - {"alone"}} == {
        "key:x": 2, "key:y": 2, "key:z": 2,
    }  # fmt: skip


async def test_a_sub_user_who_was_away_has_saved_nothing(scene: Scene) -> None:
    await fill(scene, "key", sub="busy")
    await pop(scene, n=5)
    await fill(scene, "key", sub="new")
    turns = users(await pop(scene, n=6))
    assert abs(turns.count("key:new") - turns.count("key:busy")) <= 1


async def test_what_a_sub_user_costs_is_settled_on_both_levels(scene: Scene) -> None:
    await fill(scene, "k", 2, sub="s", weight=2.0)
    (lease,) = (await pop(scene)).leases
    assert [await scene.counter("k", "standard", s) for s in (None, "s")] == [500, 500]
    await scene.settle(lease, cost=4_000.0)
    assert [await scene.counter("k", "standard", s) for s in (None, "s")] == [2_000, 2_000]
    (lease,) = (await pop(scene)).leases
    await scene.queue.requeue(lease, LEADER, count_try=False, now_ms=scene.now)
    assert [await scene.counter("k", "standard", s) for s in (None, "s")] == [2_000, 2_000]


async def test_places_for_the_idle_pass_over_who_has_a_job_running(scene: Scene) -> None:
    await fill(scene, "busy")
    await fill(scene, "key", sub="x")
    await fill(scene, "key", sub="y")
    await fill(scene, "idle", 2)
    assert users(await pop(scene, n=2)) == ["busy", "key:x"]
    later = await pop(scene, n=4, anyone=0)
    assert users(later) == ["idle"], "a second name of a key with a job running is not idle"
    assert later.left["standard"] == 8 + 17 + 1
    assert users(await pop(scene, n=3, anyone=2)) == ["busy", "key:y"]


async def test_who_goes_before_its_turn_does_not_take_newcomers_along(scene: Scene) -> None:
    """V follows those whose turn it is: else a newcomer would stand behind them all."""
    await fill(scene, "far", 3, terms=Terms(50_000.0, 0.0, 0.0, 0))
    await fill(scene, "near", 3)
    ahead, near = (await pop(scene, n=2)).leases
    await scene.settle(ahead)
    assert users(await pop(scene, anyone=0)) == ["far"]
    assert await scene.vtime("standard") == 1_000 == int(await scene.counter("near", "standard"))
    await fill(scene, "new", 1)
    assert set(users(await pop(scene, n=2))) == {"near", "new"}
    await scene.settle(near)


async def test_a_user_with_enough_in_flight_is_passed_over(scene: Scene) -> None:
    await fill(scene, "a")
    await fill(scene, "k", sub="s")
    assert sorted(users(await pop(scene, n=9, user_max=2))) == ["a", "a", "k:s", "k:s"]
    await fill(scene, "k", sub="t")
    popped = await pop(scene, n=9, user_max=2)
    assert users(popped) == ["k:t", "k:t"], "each sub-user has the limit for itself"


async def test_how_many_of_the_users_jobs_ran_before(scene: Scene) -> None:
    await fill(scene, "a", 2)
    await fill(scene, "k", 1, sub="s")
    await fill(scene, "k", 1, sub="t")
    leases = (await pop(scene, n=4)).leases
    assert sorted((x.user[0], x.inflight) for x in leases) == [
        ("a", 0), ("a", 1), ("k", 0), ("k", 1),
    ]  # fmt: skip


async def test_only_so_many_users_are_looked_at(scene: Scene) -> None:
    for n in range(70):
        await fill(scene, f"u{n}", 2)
    first = await pop(scene, n=64, user_max=1)
    assert len(first.leases) == 64
    assert users(await pop(scene, n=9, user_max=1)) == [f"u{n}" for n in range(64, 70)]


async def test_the_floor_share(scene: Scene) -> None:
    """Half of what others are charged: every third job, and never before it was earned."""
    await fill(scene, "chat", 40)
    await fill(scene, "night", 20, "batch")
    turns = ""
    due: tuple[str, ...] = ()
    for _ in range(12):
        popped = await pop(scene, ("batch",) if due else LIVE, floor=0.5)
        turns, due = turns + popped.leases[0].user[0], popped.due
    assert turns.count("n") == 4
    assert turns.startswith("cn"), "the first is given in advance"
    assert "nn" not in turns


async def test_what_is_owed_is_not_saved_up(scene: Scene) -> None:
    await fill(scene, "chat", 30)
    await fill(scene, "night", 1, "batch")
    assert (await pop(scene, n=9, floor=0.5)).due == ("batch",)
    await scene.queue.cancel("nightbatch0", "batch", "night", "g1-host-cc", "cancelled")  # type: ignore[arg-type]
    await pop(scene, floor=0.5)
    await fill(scene, "night", 2, "batch")
    assert (await pop(scene, ("batch",), floor=0.5)).due == ()
    assert (await pop(scene, floor=0.5)).due == (), "it owes what it took in advance"
    assert (await pop(scene, floor=0.5)).due == ()
    assert (await pop(scene, floor=0.5)).due == ("batch",)


async def test_who_cannot_go_for_long_does_not_come_in_a_row_later(scene: Scene) -> None:
    await fill(scene, "chat", 40)
    await fill(scene, "night", 5, "batch")
    for _ in range(30):
        assert (await pop(scene, floor=0.5)).due == ("batch",)
    assert (await pop(scene, ("batch",), floor=0.5)).due == ()


async def test_nothing_is_owed_where_nothing_else_waits(scene: Scene) -> None:
    await fill(scene, "night", 3, "batch")
    popped = await pop(scene, ("batch",), n=2, floor=0.5)
    assert (len(popped.leases), popped.due) == (2, ())
    await fill(scene, "chat", 1)
    assert (await pop(scene, floor=0.0)).due == ()


@pytest.mark.parametrize("sub", ["", "s"])
async def test_a_lost_record_does_not_hold_up_its_user(scene: Scene, sub: str) -> None:
    await fill(scene, "a", 2, sub=sub, terms=Terms(10.0, 0.0, 0.0, 0))
    await fill(scene, "b", 1)
    await scene.broker.command("DEL", scene.keys.record(f"a{sub}standard0"))
    leases: list[Lease] = (await pop(scene, n=9)).leases
    assert sorted(lease.job for lease in leases) == [f"a{sub}standard1", "bstandard0"]


async def test_places_over_groups_classes_and_sub_users(scene: Scene) -> None:
    """Where charges are equal, turns come as the snapshot says."""
    await fill(scene, "a", 3, "interactive")
    await fill(scene, "a", 1)
    for sub in ("x", "y"):
        await fill(scene, "key", 2, sub=sub)
    await fill(scene, "c", 2)
    jobs = [("interactive", "a", f"ainteractive{n}") for n in range(3)]
    jobs += [("standard", "a", "astandard0"), ("standard", "c", "cstandard0")]
    jobs += [("standard", f"key:{s}", f"key{s}standard{n}") for s in "xy" for n in range(2)]
    places = (await scene.queue.snapshot([*jobs, ("standard", "a", "none")])).places
    turns = [lease.job for lease in (await pop(scene, n=20)).leases]
    assert [turns.index(job) + 1 for _, _, job in jobs] == places[:-1]
    assert places[-1] == 0
