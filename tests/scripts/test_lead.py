"""lead: one leader at a time, rising terms, and patience after a gap or a loss."""

import pytest

from common.jobs import Led
from tests.scripts.scene import LEADER, NOW, OTHER, Scene


async def reap_after(scene: Scene) -> float:
    return float(await scene.broker.command("HGET", scene.keys.board, "reap_after"))


async def test_the_first_takes_it_and_the_second_does_not(scene: Scene) -> None:
    led = await scene.queue.lead("take", LEADER, now_ms=NOW)
    assert led == Led("leader", term=NOW, owner=LEADER)
    assert await reap_after(scene) == NOW + 6_000
    held = await scene.queue.lead("take", OTHER, now_ms=NOW + 1_999)
    assert held == Led("held", owner=LEADER, left_ms=1)
    taken = await scene.queue.lead("take", OTHER, now_ms=NOW + 2_000)
    assert taken == Led("leader", term=NOW + 2_000, owner=OTHER)


async def test_terms_rise_even_within_a_millisecond_and_backwards(scene: Scene) -> None:
    terms = []
    for now in (NOW, NOW, NOW - 60_000, NOW + 1):
        scene.now = now
        terms.append(await scene.lead())
    assert terms == [NOW, NOW + 1, NOW + 2, NOW + 3]


async def test_only_the_pair_renews_and_gives(scene: Scene) -> None:
    term = await scene.lead()
    for owner, number in ((OTHER, term), (LEADER, term - 1), (LEADER, term + 1)):
        for op in ("renew", "give"):
            led = await scene.queue.lead(op, owner, term=number, now_ms=NOW)
            assert led == Led("lost")
    assert (await scene.queue.lead("take", OTHER, now_ms=NOW)).word == "held"
    assert await scene.queue.lead("give", LEADER, term=term, now_ms=NOW) == Led("given")
    assert (await scene.queue.lead("take", OTHER, now_ms=NOW)).word == "leader"
    assert await scene.queue.lead("renew", LEADER, term=term, now_ms=NOW) == Led("lost")


async def test_nobody_leads_nothing(scene: Scene) -> None:
    assert await scene.queue.lead("renew", LEADER, term=NOW, now_ms=NOW) == Led("lost")
    assert await scene.queue.lead("give", LEADER, term=NOW, now_ms=NOW) == Led("lost")
    assert await scene.dump() == {}


@pytest.mark.parametrize(("late", "gap"), [(1_000, False), (1_001, True)])
async def test_a_gap_between_renewals_delays_the_reaper(scene: Scene, late: int, gap: bool) -> None:
    term = await scene.lead()
    for ms in (500, 1_000, 1_000 + late):
        renewed = await scene.queue.lead("renew", LEADER, term=term, now_ms=NOW + ms)
        assert renewed == Led("leader", term=term, owner=LEADER)
    assert await reap_after(scene) == NOW + 6_000 + (1_000 + late if gap else 0)


async def test_a_takeover_without_a_trace_holds_pops(scene: Scene) -> None:
    term = await scene.lead(hold_ms=2_000)
    popped = await scene.queue.pop(["batch"], ["b"], LEADER, term, lease_ms=9, now_ms=NOW + 1_999)
    assert (popped.word, popped.held_ms) == ("held", 1)
    await scene.queue.lead("renew", LEADER, term=term, now_ms=NOW + 1_999)
    popped = await scene.queue.pop(["batch"], ["b"], LEADER, term, now_ms=NOW + 2_000)
    assert popped.word == "popped"


async def test_a_takeover_that_finds_the_hash_does_not_hold(scene: Scene) -> None:
    term = await scene.lead()
    await scene.queue.lead("give", LEADER, term=term, now_ms=NOW)
    led = await scene.queue.lead("take", OTHER, hold_ms=2_000, now_ms=NOW)
    popped = await scene.queue.pop(["batch"], ["b"], OTHER, led.term, now_ms=NOW)
    assert popped.word == "popped"


async def test_a_clock_set_back_delays_nothing_beyond_a_full_length(scene: Scene) -> None:
    term = await scene.lead(hold_ms=2_000)
    back = NOW - 3_600_000
    held = await scene.queue.lead("take", OTHER, now_ms=back)
    assert held == Led("held", owner=LEADER, left_ms=2_000)
    assert (await scene.queue.lead("renew", LEADER, term=term, now_ms=back)).word == "leader"
    assert await reap_after(scene) == back + 6_000
    popped = await scene.queue.pop(["batch"], ["b"], LEADER, term, now_ms=back)
    assert popped.held_ms <= 6_000
    assert (await scene.queue.lead("take", OTHER, now_ms=back + 2_000)).word == "leader"
