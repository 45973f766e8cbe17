"""renew: a lease goes on only for the pair that holds it."""

import pytest

from tests.scripts.scene import LEADER, NOW, OTHER, Scene

pytestmark = pytest.mark.jobs_inside


async def test_each_answer_in_one_call(scene: Scene) -> None:
    ok, flagged, over = [await scene.running(j) for j in ("ok", "flagged", "over")]
    await scene.cancel("flagged")
    await scene.cancel("tombstone")
    await scene.settle(over)
    words = await scene.queue.renew(
        [
            ("ok", ok.attempt, "b2"), ("flagged", flagged.attempt, ""), ("over", over.attempt, ""),
            ("ok", ok.attempt - 1, "b9"), ("none", 1, ""), ("tombstone", 1, ""),
        ],
        LEADER, lease_ms=6_000, now_ms=NOW + 1_000,
    )  # fmt: skip
    assert words == ["ok", "cancelled", "lost", "lost", "unknown", "unknown"]
    assert await scene.lease_until("ok") == await scene.lease_until("flagged") == NOW + 7_000
    assert await scene.lease_until("over") is None
    assert await scene.field("ok", "backend") == b"b2"
    assert await scene.field("flagged", "backend") == b"b1"


async def test_another_owner_renews_nothing(scene: Scene) -> None:
    lease = await scene.running()
    before = await scene.dump()
    assert await scene.queue.renew([("j", lease.attempt, "b2")], OTHER, now_ms=NOW + 1) == ["lost"]
    assert await scene.queue.renew([], OTHER, now_ms=NOW + 1) == []
    assert await scene.dump() == before


async def test_a_lapsed_lease_that_nobody_took_goes_on(scene: Scene) -> None:
    lease = await scene.running()
    words = await scene.queue.renew([("j", lease.attempt, "")], LEADER, now_ms=NOW + 60_000)
    assert words == ["ok"]
    assert await scene.lease_until() == NOW + 66_000
