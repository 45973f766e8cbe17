"""enqueue: idempotent, bounded, and behind those who came before."""

import pytest

from common.cost import Terms
from common.jobs import Enqueued, Limits
from tests.scripts.scene import NOW, WIDE, Scene

pytestmark = pytest.mark.jobs_inside


async def test_the_queue_owns_it(scene: Scene) -> None:
    reply = await scene.enqueue("j", "ü", terms=Terms(0.1, 2.0, 0.0, 7), weight=0.3, floor=5)
    assert reply == Enqueued("queued", arrival=NOW * 1_000)
    record = (await scene.dump())[scene.keys.record("j")][2]
    assert record == {
        "state": b"waiting", "user": b"_c3bc", "class": b"interactive", "arrival": NOW * 1_000.0,
        "floor": 5.0, "size": 4.0, "terms": b"0.3 0.1 2.0 0.0 7", "replica": b"g1-host-cc",
        "deadline": NOW + 60_000.0,
    }  # fmt: skip
    assert await scene.broker.command("GET", scene.keys.body("j")) == b"4:metabody"
    assert int(await scene.broker.command("PTTL", scene.keys.owned("g1-host-cc"))) > 86_000_000


async def test_a_repeat_changes_nothing(scene: Scene) -> None:
    await scene.enqueue("j")
    before = await scene.dump()
    reply = await scene.enqueue("j", "another", body=b"another", weight=9.0)
    assert reply == Enqueued("known", state="waiting")
    assert await scene.dump() == before


async def test_a_job_that_ran_does_not_run_again(scene: Scene) -> None:
    lease = await scene.running()
    assert await scene.enqueue("j") == Enqueued("known", state="running")
    await scene.settle(lease)
    assert await scene.enqueue("j") == Enqueued("known", state="done")


async def test_a_job_cancelled_before_it_came_is_refused(scene: Scene) -> None:
    assert (await scene.cancel("j"))[0] == "unknown"
    before = await scene.dump()
    assert await scene.enqueue("j") == Enqueued("cancelled")
    assert await scene.dump() == before


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (Limits(2, 1 << 20, 0, 0, 100, 1 << 20), "full_user"),
        (Limits(100, 11, 0, 0, 100, 1 << 20), "full_user"),
        (Limits(100, 1 << 20, 0, 0, 3, 1 << 20), "full_model"),
        (Limits(100, 1 << 20, 0, 0, 100, 15), "full_model"),
        (Limits(3, 12, 0, 0, 4, 16), "queued"),
        (Limits(2, 11, 0, 0, 3, 15), "full_user"),
    ],
)
async def test_each_limit_to_the_unit(scene: Scene, limits: Limits, word: str) -> None:
    await scene.enqueue("a1")
    await scene.enqueue("a2")
    await scene.enqueue("b1", "another")
    before = await scene.dump()
    reply = await scene.enqueue("a3", limits=limits)
    assert reply.word == word
    assert (await scene.dump() == before) == (word != "queued")


async def test_jobs_are_limited_in_a_class_and_bytes_in_all(scene: Scene) -> None:
    await scene.enqueue("a", cls="batch")
    one = Limits(1, 7, 0, 0, 100, 1 << 20)
    assert (await scene.enqueue("b", limits=one)).word == "full_user"
    assert (await scene.enqueue("b", limits=Limits(1, 8, 0, 0, 100, 1 << 20))).word == "queued"
    assert (await scene.enqueue("c", limits=Limits(1, 99, 0, 0, 100, 1 << 20))).word == "full_user"


async def test_arrivals_rise_within_a_moment_and_backwards(scene: Scene) -> None:
    arrivals = []
    for n, now in enumerate((NOW, NOW, NOW - 10, NOW + 1)):
        scene.now = now
        arrivals.append((await scene.enqueue(f"j{n}")).arrival)
    assert arrivals == [NOW * 1_000, NOW * 1_000 + 1, NOW * 1_000 + 2, (NOW + 1) * 1_000]
    assert [lease.job for lease in await scene.pop(9)] == ["j0", "j1", "j2", "j3"]


async def test_a_job_that_redis_lost_keeps_its_place(scene: Scene) -> None:
    """Also before those who come later by a clock that is behind."""
    first = (await scene.enqueue("old")).arrival
    await scene.broker.command("FLUSHALL")
    scene.now = NOW - 50
    assert await scene.enqueue("old", arrival=first) == Enqueued("queued", arrival=first)
    assert (await scene.enqueue("new")).arrival == first + 1
    assert [lease.job for lease in await scene.pop(2)] == ["old", "new"]


async def test_equal_users_take_turns_in_the_order_they_came(scene: Scene) -> None:
    """Redis orders equal scores by name; the lift's fraction keeps that from deciding."""
    users = ["u9", "u10", "a", "z", "u1", "B", "u2"]
    for n, user in enumerate(users):
        await scene.enqueue(f"x{n}", user)
        await scene.enqueue(f"y{n}", user)
    popped = await scene.pop(len(users) * 2)
    assert [lease.user for lease in popped] == users * 2


async def test_the_fraction_stays_below_one(scene: Scene) -> None:
    await scene.broker.command("HSET", scene.keys.board, "live", 70_000)
    await scene.enqueue("a")
    assert await scene.counter() == 65_535 / 65_536
    assert await scene.broker.command("HGET", scene.keys.board, "live") == b"70001"


async def test_who_was_away_has_saved_nothing(scene: Scene) -> None:
    for n in range(4):
        await scene.settle(await scene.running(f"j{n}", "busy"))
    await scene.enqueue("j9", "busy")
    assert await scene.vtime() == 3_000
    await scene.enqueue("late", "away")
    assert await scene.counter("away") == 3_000
    assert await scene.counter("busy") == 4_000


async def test_who_is_ahead_of_v_stays_there(scene: Scene) -> None:
    await scene.settle(await scene.running("j", terms=Terms(5_000.0, 0.0, 0.0, 0)))
    await scene.enqueue("k")
    assert await scene.counter() == 5_000
    assert await scene.broker.command("HGET", scene.keys.board, "live") == b"1"


async def test_an_empty_body_is_a_body(scene: Scene) -> None:
    await scene.enqueue("a", body=b"")
    await scene.enqueue("b", body=b"", limits=WIDE)
    assert [lease.body for lease in await scene.pop()] == [b""]
    assert (await scene.cancel("b"))[0] == "cancelled"
    assert await scene.broker.command("HGETALL", scene.keys.waiting) == []


async def test_all_sub_users_of_a_key_have_a_limit_together(scene: Scene) -> None:
    limits = Limits(2, 1 << 20, 3, 15, 100, 1 << 20)
    for job, sub in (("a", "a"), ("b", "a"), ("c", "b")):
        assert (await scene.enqueue(job, sub=sub, limits=limits)).word == "queued"
    assert (await scene.enqueue("d", sub="c", limits=limits)).word == "full_user", "the key's jobs"
    await scene.cancel("b", sub="a")
    big = await scene.enqueue("d", sub="c", limits=limits, body=b"x" * 8)
    assert big.word == "full_user", "the key's bytes"
    assert (await scene.enqueue("d", sub="c", limits=limits)).word == "queued"
    assert (await scene.enqueue("e", "c", limits=limits, body=b"x" * 16)).word == "queued"
