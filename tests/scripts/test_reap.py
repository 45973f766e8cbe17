"""reap: names what is due, to the leader, and not before the dead may be called so."""

from collections.abc import Sequence
from typing import Any

import pytest

from common.jobs import Due
from common.outcomes import Outcome
from tests.scripts.scene import LEADER, NOW, OTHER, REPLICA, Scene

pytestmark = pytest.mark.jobs_inside


async def reap(
    scene: Scene, dead: Sequence[str] = (), group: str = "live", key: str = ""
) -> list[Due]:
    reply = await scene.queue.reap(LEADER, scene.term, dead, group, key, now_ms=scene.now)
    assert reply is not None
    return reply[0]


async def later(scene: Scene, ms: int) -> None:
    """Time passes and LEADER goes on leading."""
    for _ in range(ms // 500):
        scene.now += 500
        await scene.queue.lead("renew", LEADER, term=scene.term, now_ms=scene.now)


async def test_only_the_leader_reaps(scene: Scene) -> None:
    await scene.enqueue("j", wait_ms=1)
    term = await scene.lead()
    for owner, number, now in [
        (OTHER, term, NOW + 1), (LEADER, term - 1, NOW + 1), (LEADER, term, NOW + 2_000),
    ]:  # fmt: skip
        assert await scene.queue.reap(owner, number, [], "batch", now_ms=now) is None
    scene.now += 1
    assert [d.job for d in await reap(scene)] == ["j"]


async def test_a_deadline_to_the_millisecond(scene: Scene) -> None:
    await scene.enqueue("j", "ü", wait_ms=1_000)
    await scene.lead()
    scene.now += 999
    assert await reap(scene) == []
    scene.now += 1
    assert await reap(scene) == [
        Due(
            "deadline", "j", "waiting", "_c3bc", "interactive", "", 0, False, scene.channel, REPLICA
        )
    ]


async def test_a_lease_that_ended_and_the_patience_after_a_takeover(scene: Scene) -> None:
    lease = await scene.started()
    await later(scene, 5_500)
    scene.now += 499
    assert await reap(scene) == []
    scene.now += 1
    due = Due(
        "lease", "j", "running", "u", "interactive", LEADER, lease.attempt, True, scene.channel,
        REPLICA,
    )  # fmt: skip
    assert await reap(scene) == [due]
    await scene.lead()
    assert await reap(scene) == [], "a new leader waits for everybody's renewal first"
    await later(scene, 6_000)
    assert await reap(scene) == [due]


async def test_an_orphan_is_due_again_and_again(scene: Scene) -> None:
    lease = await scene.started()
    await later(scene, 6_000)
    await scene.settle(lease, Outcome.ORPHANED, heir=True)
    await later(scene, 500)
    assert await reap(scene) == []
    await later(scene, 500)
    (due,) = await reap(scene)
    assert (due.why, due.state, due.owner) == ("lease", "orphaned", "")
    assert await scene.queue.settle(
        due, "", Outcome.ORPHANED, b"", heir=True, now_ms=scene.now
    ) == ("settled")
    assert await reap(scene) == []


async def test_the_jobs_of_the_dead_gateways_alone(scene: Scene) -> None:
    await scene.running("runs")
    await scene.enqueue("waits", "v")
    await scene.enqueue("other", "v", replica="g2")
    assert await reap(scene, [REPLICA]) == [], "a takeover: nobody is dead yet"
    await later(scene, 6_000)
    await scene.queue.renew([("runs", NOW, "")], LEADER, now_ms=scene.now)
    due = await reap(scene, [REPLICA, "g3"])
    assert sorted((d.why, d.job, d.state) for d in due) == [
        ("gateway", "runs", "running"), ("gateway", "waits", "waiting"),
    ]  # fmt: skip


async def test_a_lease_beyond_its_full_length_is_cut(scene: Scene) -> None:
    await scene.running("j")
    scene.now = NOW - 3_600_000
    await scene.lead()
    assert await reap(scene) == []
    assert await scene.lease_until() == scene.now + 6_000


async def test_a_lost_record_is_named_without_its_facts(scene: Scene) -> None:
    await scene.enqueue("j", wait_ms=1)
    await scene.broker.command("DEL", scene.keys.record("j"))
    await scene.lead()
    scene.now += 1
    assert await reap(scene) == [Due("deadline", "j", "", "", "", "", 0, False, "", "")]


async def test_idle_counters_that_v_has_passed_are_dropped(scene: Scene) -> None:
    counter = scene.keys.classes["interactive"].counter
    for user in ("idle", "runs"):
        await scene.enqueue(user, user)
    await scene.lead()
    idle, _ = await scene.pop(2)
    await scene.settle(idle)
    for n in range(3):
        await scene.settle(await scene.running(f"j{n}", "busy"))
    await scene.enqueue("waits", "backlogged")
    assert await scene.vtime() == 2_000
    await reap(scene, group="batch")
    assert await scene.broker.command("HEXISTS", counter, "idle") == 1
    await reap(scene)
    left = sorted(await scene.broker.command("HKEYS", counter))
    assert left == [b"busy", b"runs"], "who is ahead of V, and who has a job running"
    await scene.enqueue("again", "idle")
    assert await scene.counter("idle") >= 2_000


async def test_each_kind_has_its_limit(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        await scene.enqueue(f"j{n}", wait_ms=1)
    await scene.lead()
    await later(scene, 6_000)
    call = scene.broker.call

    async def small(verb: str, **slots: Any) -> Any:
        return await call(verb, **(slots | {"batch": 2}))

    monkeypatch.setattr(scene.broker, "call", small)
    due = await reap(scene, [REPLICA])
    assert [d.why for d in due] == ["deadline"] * 2 + ["gateway"] * 2


async def test_means_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(4):
        await scene.settle(await scene.running(f"j{n}", f"u{n}"), learn=5)
    await scene.settle(await scene.running("k", "u0"), learn=5)
    call = scene.broker.call

    async def small(verb: str, **slots: Any) -> Any:
        return await call(verb, **(slots | ({"ewma_max": 2} if verb == "reap" else {})))

    monkeypatch.setattr(scene.broker, "call", small)
    for _ in range(2):
        await scene.settle(await scene.running(f"again{_}", "u0"), learn=5)
    await reap(scene)
    assert int(await scene.broker.command("HLEN", scene.keys.ewma)) == 2


async def test_the_counters_of_sub_users_go_with_their_keys(scene: Scene) -> None:
    for n in range(3):
        await scene.settle(await scene.running(f"a{n}", "k", sub="a"))
    await scene.settle(await scene.running("b", "k", sub="b"))
    await scene.settle(await scene.running("a3", "k", sub="a"))
    counter, top = (scene.keys.order("interactive", "k:a")[i] for i in (-1, 2))
    await reap(scene, key="k")
    assert await scene.broker.command("HKEYS", counter) == [b"k:a"], "V has passed b"
    for n in range(6):
        await scene.settle(await scene.running(f"u{n}", "u"))
    await reap(scene)
    assert await scene.broker.command("HKEYS", top) == [b"u"]
    assert [k for k in await scene.dump() if k.endswith(":k")] == []
    fields = await scene.broker.command("HKEYS", scene.keys.board)
    assert [f for f in fields if f.endswith(b":k:")] == []


async def test_idle_counters_are_bounded_though_v_stands_still(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each user comes once V never rises: it is a counter before its charge."""
    for n in range(4):
        await scene.settle(await scene.running(f"j{n}", f"u{n}"))
    runs = await scene.running("runs", "u0")
    counter = scene.keys.classes["interactive"].counter
    await reap(scene)
    assert int(await scene.broker.command("HLEN", counter)) == 4
    call = scene.broker.call

    async def small(verb: str, **slots: Any) -> Any:
        return await call(verb, **(slots | ({"counters_max": 3} if verb == "reap" else {})))

    monkeypatch.setattr(scene.broker, "call", small)
    await reap(scene)
    assert await scene.broker.command("HKEYS", counter) == [runs.user.encode()]
