"""The limit on jobs in flight that follows a target of time per output token."""

import math
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.admission import BackendLoad, Room
from dispatcher.aimd import CUT, CUT_EVERY_S, NEAR, SEEKING, START, Aimd
from dispatcher.engines.facts import EngineFacts

TARGET_S = 0.1
SLOW = TARGET_S * 1.5
FAST = TARGET_S * 0.3


def limit(aimd: Aimd) -> int:
    assert aimd.limit is not None
    return aimd.limit


def settled(at: int) -> Aimd:
    """It was slow once, and has come to this limit."""
    aimd = Aimd(TARGET_S)
    aimd.follow(-100, 1, TARGET_S * SEEKING * 1.01)
    for now in range(-99, -99 + at - 1):
        aimd.follow(now, limit(aimd), None)
    assert limit(aimd) == at, "below 20 one at a time"
    return aimd


def test_it_doubles_until_something_is_slow_for_the_first_time() -> None:
    aimd, seen = Aimd(TARGET_S), []
    for now in range(4):
        seen.append(limit(aimd))
        aimd.follow(now, limit(aimd), FAST)
    assert seen == [START, 2 * START, 4 * START, 8 * START]
    aimd.follow(5, 100, TARGET_S * SEEKING * 1.01)
    assert limit(aimd) == int(CUT * 100)
    aimd.follow(6, limit(aimd), FAST)
    assert limit(aimd) == 94, "from then on by a twentieth"


def test_what_does_not_limit_does_not_grow() -> None:
    aimd = settled(20)
    for now in range(9):
        aimd.follow(now, 17, FAST)
    assert limit(aimd) == 20
    aimd.follow(10, 18, FAST)
    assert limit(aimd) == 21


def test_near_the_target_it_stays() -> None:
    aimd = settled(20)
    for now in range(60):
        aimd.follow(now, 10, TARGET_S * (SEEKING + (NEAR + 0.02 - SEEKING) * now / 60))
    assert limit(aimd) == 20
    for now in range(60, 90):
        aimd.follow(now, 20, TARGET_S * (NEAR + 0.02))
    assert limit(aimd) == 20
    for now in range(90, 99):
        aimd.follow(now, 20, TARGET_S * (2 * NEAR - 1))
    assert limit(aimd) > 20


def test_what_varies_must_stay_further_below_the_target() -> None:
    def held(swing: float) -> float:
        """The greatest mean of a signal that swings so much, without a cut."""
        for percent in range(100, 0, -1):
            aimd, settled_at = settled(20), 0
            for now in range(100):
                share = percent / 100 + (swing if now % 2 else -swing)
                # With more than L in flight it is not cut: until the averages have settled.
                aimd.follow(now, 1_000 if now < 50 else 1, TARGET_S * share)
                settled_at = limit(aimd) if now < 50 else settled_at
            if limit(aimd) == settled_at:
                return percent / 100
        raise AssertionError

    assert held(0.0) >= 0.99
    assert 0.6 <= held(0.15) <= 0.8


def test_a_cut_is_from_what_is_in_flight_and_waits_for_its_effect() -> None:
    aimd = settled(20)
    aimd.follow(0, 17, 9 * TARGET_S)
    assert limit(aimd) == int(CUT * 17) == 15
    for now in range(1, 10):
        aimd.follow(now, 16, SLOW)
    assert limit(aimd) == 15, "more than that are in flight: it has yet to work"
    aimd.follow(10, 15, SLOW)
    assert limit(aimd) == 13
    aimd.follow(10 + CUT_EVERY_S - 0.01, 13, SLOW)
    assert limit(aimd) == 13
    aimd.follow(10 + CUT_EVERY_S + 1, 13, SLOW)
    assert limit(aimd) == 11


def test_it_never_falls_below_one() -> None:
    aimd = settled(3)
    for now in range(0, 100, 4):
        aimd.follow(now, limit(aimd), SLOW)
    assert limit(aimd) == 1
    for now in range(200, 220):
        aimd.follow(now, limit(aimd), FAST)
    assert limit(aimd) > 2


def test_no_samples_are_not_slow() -> None:
    aimd = settled(20)
    aimd.follow(0, 20, None)
    assert limit(aimd) == 21


def test_looks_within_a_second_change_nothing() -> None:
    aimd = settled(20)
    for n in range(100):
        aimd.follow(n / 100, limit(aimd), FAST)
    assert limit(aimd) == 21


@pytest.mark.parametrize("target_s", [None, TARGET_S])
def test_a_preemption_is_slow_once_and_for_a_short_while(target_s: float | None) -> None:
    aimd = Aimd(target_s)
    aimd.follow(0, 50, FAST)
    before = aimd.limit
    aimd.follow(30, 5, FAST, preempted_at=10)
    assert aimd.limit == before, "nobody asked when it happened"
    aimd.follow(40, 50 if target_s is None else 8, FAST, preempted_at=39.5)
    cut = limit(aimd)
    assert cut == (45 if target_s is None else 7)
    aimd.follow(50, cut, FAST, preempted_at=39.5)
    assert limit(aimd) > cut, "and only once"


def test_without_a_target_there_is_no_limit_until_a_preemption() -> None:
    aimd = Aimd(None)
    aimd.follow(0, 1_000, 99.0)
    assert aimd.limit is None


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 300), st.floats(0, 1) | st.none(),
                       st.booleans()), max_size=60),
    st.booleans(),
)  # fmt: skip
def test_whatever_happens_it_is_a_limit(
    steps: list[tuple[float, int, float | None, bool]], has_target: bool
) -> None:
    aimd, now, preempted_at = Aimd(TARGET_S if has_target else None), 0.0, -math.inf
    for wait, inflight, tpot_s, preempted in steps:
        now += wait
        preempted_at = now if preempted else preempted_at
        before = math.inf if aimd.limit is None else aimd.limit
        aimd.follow(now, inflight, tpot_s, preempted_at)
        after = math.inf if aimd.limit is None else aimd.limit
        assert after >= 1
        if after > before:
            assert inflight >= 0.9 * before, "it grows only where it limits"


def plant(step_s: Callable[[int], float], seconds: int = 600) -> list[int]:
    """In flight each second on an engine whose steps tell of the two seconds before; of those in
    flight one in 20 ends each second, and at most 20 begin."""
    aimd, flying, past = Aimd(TARGET_S), 0, [0.0, 0.0]
    out = []
    for now in range(seconds):
        aimd.follow(now, flying, statistics.mean(past[-2:]))
        flying = max(flying - math.ceil(flying / 20), 0)
        flying = max(flying, min(limit(aimd), flying + 20))
        past.append(step_s(flying))
        out.append(flying)
    return out


def test_what_is_in_flight_is_steady_and_holds_the_target() -> None:
    flying = plant(lambda n: 0.02 + 0.002 * n)[60:]
    mean = statistics.mean(flying)
    assert 0.9 * 40 <= mean <= 40, "with 40 a step is as long as the target"
    assert statistics.pstdev(flying) <= 0.1 * mean
    assert sum(n > 40 for n in flying) <= 0.1 * len(flying)


# --- another target, as of a configuration that is read again


def test_a_limit_follows_another_target_from_where_it_is() -> None:
    aimd = settled(20)
    for now in range(30):
        aimd.follow(now, 10, TARGET_S * NEAR)
    assert limit(aimd) == 20
    aimd.aim(TARGET_S * 2)
    for now in range(30, 40):
        aimd.follow(now, limit(aimd), TARGET_S * NEAR)
    assert limit(aimd) == 32, "half as slow as may be"
    aimd.aim(TARGET_S / 2)
    aimd.follow(50, 30, TARGET_S * NEAR)
    assert limit(aimd) == int(CUT * 30)


@pytest.mark.parametrize(("before", "after"), [(None, TARGET_S), (TARGET_S, None)])
def test_a_target_that_comes_or_goes_begins_anew(before: float | None, after: float | None) -> None:
    aimd = Aimd(before)
    aimd.follow(0, 40, SLOW, preempted_at=0)
    aimd.aim(after)
    assert aimd.limit == Aimd(after).limit
    aimd.aim(after)
    aimd.follow(10, 40, FAST)
    assert aimd.limit == (None if after is None else 2 * START)


def test_the_target_of_a_class_may_change() -> None:
    load = BackendLoad()
    load.polled(0, EngineFacts(0, 0, 0.0), period=100)
    load.room(1, "standard", 3, tpot_s=0.05)
    for n in range(START):
        load.sent(1, f"job{n}", "standard", streams=True)
        load.started(1, f"job{n}")
    shut = load.room(1, "standard", 3, tpot_s=0.05)
    assert shut.reason == "8 in flight ≥ 8 for TPOT 50 ms"
    assert load.room(1, "standard", 3) == Room(3), "it has none any more"
    load.room(1, "standard", 3, tpot_s=0.15)
    load.signal.gaps.add(1.9, 0.1 * 30, 30)
    assert load.room(2, "standard", 3, tpot_s=0.15) == Room(3), "fast enough for this one"
