"""settle: a run ends once, is charged what it cost, and leaves nothing behind."""

import pytest

from common.cost import Terms
from common.keys import encode
from common.outcomes import Outcome
from tests.scripts.scene import LEADER, NOW, OTHER, REPLICA, Scene


@pytest.mark.parametrize(
    ("cost", "counter"), [(None, 1_000.0), (400.0, 400.0), (0.0, 0.0), (3e3, 3e3)]
)
async def test_the_charge_is_corrected_once(
    scene: Scene, cost: float | None, counter: float
) -> None:
    lease = await scene.running()
    for _ in range(3):
        assert await scene.settle(lease, cost=cost) == "settled"
        assert await scene.counter() == counter
    assert float(await scene.field("j", "charged") or 0) == counter
    assert await scene.broker.command("EXISTS", scene.keys.body("j"), scene.keys.inflight) == 0


async def test_weight_divides_the_cost(scene: Scene) -> None:
    lease = await scene.running(weight=4.0)
    await scene.enqueue("k")
    await scene.settle(lease, cost=100.0)
    assert await scene.counter() == 25.0
    await scene.cancel("k")


async def test_what_is_kept_for_the_gateway(scene: Scene) -> None:
    lease = await scene.running()
    await scene.settle(lease, Outcome.FAILED)
    assert await scene.field("j", "state") == b"done"
    assert await scene.field("j", "outcome") == b"failed"
    assert await scene.broker.command("EXISTS", scene.keys.body("j")) == 0
    assert 0 < int(await scene.broker.command("PTTL", scene.keys.record("j"))) <= 600_000


async def test_the_mean_learns(scene: Scene) -> None:
    means = []
    for n, output in enumerate((100, 200, None, 0)):
        await scene.settle(await scene.running(f"j{n}"), learn=output)
        means.append(float(await scene.broker.command("HGET", scene.keys.ewma, "u")))
    assert means == pytest.approx([100.0, 120.0, 120.0, 96.0])


async def test_only_the_pair_ends_a_run(scene: Scene) -> None:
    lease = await scene.running()
    before = await scene.dump()
    for owner, attempt in ((OTHER, lease.attempt), (LEADER, lease.attempt + 1)):
        run = type(lease)(
            **{f: getattr(lease, f) for f in lease.__struct_fields__} | {"attempt": attempt}
        )
        word = await scene.queue.settle(run, owner, Outcome.FINISHED, b"", now_ms=NOW)
        assert word == "lost"
    assert await scene.dump() == before
    await scene.settle(lease)
    word = await scene.queue.settle(lease, OTHER, Outcome.FINISHED, b"", now_ms=NOW)
    assert word == "lost"


async def test_an_acknowledged_or_never_known_job(scene: Scene) -> None:
    lease = await scene.running()
    await scene.settle(lease)
    await scene.queue.ack(["j"], REPLICA)
    assert await scene.settle(lease) == "unknown"
    await scene.cancel("j")
    assert await scene.settle(lease) == "unknown"


@pytest.mark.parametrize(("late", "word"), [(5_999, "lost"), (6_000, "settled")])
async def test_the_heir_waits_for_the_lease_to_end(scene: Scene, late: int, word: str) -> None:
    lease = await scene.started()
    scene.now = NOW + late
    assert await scene.settle(lease, Outcome.ORPHANED, heir=True) == word
    if word == "lost":
        await scene.settle(lease)
    await scene.queue.ack(["j"], REPLICA)


async def test_an_orphan_is_told_of_again_until_it_is_acknowledged(scene: Scene) -> None:
    lease = await scene.started()
    scene.now += 6_000
    assert await scene.settle(lease, Outcome.ORPHANED, heir=True, cost=300.0) == "settled"
    assert await scene.field("j", "state") == b"orphaned"
    assert int(await scene.field("j", "attempt") or 0) == scene.now > lease.attempt
    assert await scene.lease_until() == scene.now + 1_000
    assert await scene.counter() == 300.0
    assert await scene.settle(lease) == "lost", "its dispatcher wakes up"
    assert await scene.settle(lease, Outcome.ORPHANED, heir=True) == "lost", "too early"
    scene.now += 1_000
    assert await scene.settle(lease, Outcome.ORPHANED, heir=True, cost=9e9) == "settled"
    assert await scene.lease_until() == scene.now + 1_000
    assert await scene.counter() == 300.0
    assert await scene.broker.command("TTL", scene.keys.record("j")) == -1
    assert await scene.queue.ack(["j"], REPLICA) == 1
    assert await scene.lease_until() is None


@pytest.mark.parametrize("user", ["u", "a:b", "模型"])
async def test_no_way_of_ending_leaves_a_key(scene: Scene, user: str) -> None:
    """The fixture looks for keys that neither may stay nor expire."""
    costly = Terms(1_000.0, 2.0, 0.0, 100)
    for n, outcome in enumerate(Outcome):
        lease = await scene.running(f"done{n}", user, terms=costly)
        await scene.settle(lease, outcome, heir=False, cost=7.0, learn=3)
        if outcome == Outcome.ORPHANED:
            await scene.queue.ack([lease.job], REPLICA)
    given_back = await scene.running("back", user)
    await scene.queue.requeue(given_back, LEADER, count_try=True, now_ms=scene.now)
    await scene.settle((await scene.pop())[0])
    await scene.enqueue("waits", user)
    await scene.enqueue("late", user, wait_ms=1)
    assert (await scene.cancel("waits", user))[0] == "cancelled"
    scene.now += 1
    assert (await scene.cancel("late", user, Outcome.DEADLINE, due=True))[0] == "cancelled"
    lost = await scene.running("lost", user)
    await scene.broker.command("FLUSHALL")
    word = await scene.queue.restore(lost, LEADER, "b1", 5.0, started=False, now_ms=scene.now)
    assert word == "restored"
    assert (await scene.cancel("lost", user))[0] == "flagged"
    assert await scene.settle(lost, Outcome.CANCELLED) == "settled"
    await scene.broker.command("HGET", scene.keys.inflight, encode(user))
