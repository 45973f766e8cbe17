"""How many slots there are, and how many are kept."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.engines.facts import EngineFacts
from dispatcher.slots import (
    FAILURES_MAX,
    LASTING,
    LASTING_S,
    PROBE_LASTS_S,
    PROBE_MAX_S,
    PROBE_S,
    READINGS,
    SETTLE_S,
    Ceiling,
    EngineSlots,
    ModelSlots,
    reserved,
)

ENOUGH = LASTING + READINGS + 2
"""Readings 0.1 s apart of an engine in which somebody waits all the time."""
TAKEN = 64
"""Jobs in flight: no slot of these tests' engines is free."""


def read(
    engine: EngineSlots, now: float, running: int | None, waiting: int | None, *,
    started: int = 0, preemptions: int | None = None,
) -> None:  # fmt: skip
    engine.polled(now, EngineFacts(waiting, running, None, preemptions), started)


def learn(engine: EngineSlots, now: float, slots: int) -> float:
    """Enough readings of a full engine; returns the time after them."""
    for i in range(ENOUGH):
        read(engine, now + i / 10, slots, 1)
    return now + ENOUGH / 10


def learned(slots: int, now: float = 0.0) -> EngineSlots:
    engine = EngineSlots()
    learn(engine, now, slots)
    assert engine.value == slots
    return engine


@pytest.mark.parametrize(
    ("slots", "kept"),
    [(0, 0), (1, 0), (15, 0), (16, 1), (31, 1), (32, 1), (63, 1), (64, 2), (256, 8)],
)
def test_one_in_32_is_kept(slots: int, kept: int) -> None:
    assert reserved(slots, None) == kept


@pytest.mark.parametrize(
    ("slots", "setting", "kept"), [(32, 0, 0), (8, 3, 3), (2, 5, 1), (0, 5, 0)]
)
def test_a_setting_decides_but_never_keeps_all(slots: int, setting: int, kept: int) -> None:
    assert reserved(slots, setting) == kept


# --- learning


def test_slots_are_the_most_seen_running_while_others_waited() -> None:
    engine = EngineSlots()
    read(engine, 0, 40, 0)
    assert engine.value is None, "nobody waited: there may be more"
    now = learn(engine, 1, 40)
    assert engine.value == 40
    read(engine, now, 12, 5)
    assert engine.value == 40, "it lets some wait for memory"


def test_it_takes_some_readings_and_some_time() -> None:
    few, quick = EngineSlots(), EngineSlots()
    for i in range(LASTING + READINGS - 2):
        read(few, i * 10.0, 8, 1)
    for i in range(1_000):
        read(quick, i * (SETTLE_S + LASTING_S - 0.01) / 1_000, 8, 1)
    assert few.value is None
    assert quick.value is None
    read(few, 1_000, 8, 1)
    read(quick, SETTLE_S + LASTING_S + 0.01, 8, 1)
    assert few.value == quick.value == 8


def test_who_waits_for_the_next_step_alone_is_no_sign() -> None:
    engine = EngineSlots()
    for i in range(1_000):
        read(engine, i / 10, 8, i % LASTING)
    assert engine.value is None
    engine = learned(8)
    before = engine.confirmed_at
    read(engine, 100, 8, 0)
    for i in range(LASTING - 1):
        read(engine, 101 + i, 8, 1)
    assert engine.confirmed_at == before
    read(engine, 101 + LASTING, 8, 1)
    assert engine.confirmed_at == 101 + LASTING


def test_while_more_and_more_run_nothing_is_learned() -> None:
    engine = EngineSlots()
    for i in range(300):
        read(engine, i / 10, i, 3)
        assert engine.value is None


def test_more_running_than_thought_makes_it_a_guess_again() -> None:
    engine = learned(20)
    read(engine, 50, 21, 0)
    assert engine.value is None
    learn(engine, 60, 30)
    assert engine.value == 30


def test_readings_far_below_the_most_do_not_count() -> None:
    engine = EngineSlots()
    read(engine, 0, 64, 0)
    for i in range(100):
        read(engine, 1 + i, 59, 2)
    assert engine.value is None
    learn(engine, 200, 60)
    assert engine.value == 64, "engines count after some have ended"


@pytest.mark.parametrize("waiting", [0, None])
def test_nothing_waiting_or_unknown_teaches_nothing(waiting: int | None) -> None:
    engine = EngineSlots()
    for i in range(100):
        read(engine, i, 8, waiting)
    assert engine.value is None


def test_own_jobs_stand_in_where_the_page_does_not_say() -> None:
    engine = EngineSlots()
    for i in range(ENOUGH):
        read(engine, i, None, 1, started=6)
    assert engine.value == 6


def test_an_engine_that_may_be_another_is_learned_anew() -> None:
    engine = learned(32)
    for n in range(1, FAILURES_MAX):
        engine.poll_failed(n)
    assert engine.value == 32
    engine.poll_failed(FAILURES_MAX)
    assert engine.value is None
    learn(engine, 10, 8)
    assert engine.value == 8
    read(engine, 20, 8, 0, preemptions=7)
    read(engine, 21, 8, 0, preemptions=7)
    assert engine.value == 8
    read(engine, 22, 2, 0, preemptions=0)
    assert engine.value is None


def test_what_is_configured_stands() -> None:
    engine = EngineSlots(4)
    learn(engine, 0, 9)
    engine.poll_failed(FAILURES_MAX)
    assert engine.value == 4


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=60), st.integers(1, 40))
def test_what_is_learned_of_an_engine_is_never_below_what_ran(
    readings: list[tuple[int, int]], slots: int
) -> None:
    engine, most = EngineSlots(), 0
    for i, (running, waiting) in enumerate(readings):
        running = min(running, slots)
        read(engine, i / 5, running, waiting)
        most = max(most, running)
        assert engine.value in (None, most)


# --- the ceiling


def ceiling(model: ModelSlots, now: float, *engines: EngineSlots) -> Ceiling:
    return model.ceiling(now, engines, len(engines))


def test_the_ceiling_is_of_all_backends_together() -> None:
    model = ModelSlots()
    assert ceiling(model, 0, EngineSlots(32), EngineSlots(40)) == Ceiling(72, 2, 70)
    assert ceiling(model, 0, EngineSlots(8)) == Ceiling(8), "none kept, no limit"
    assert ceiling(model, 0, EngineSlots(32), EngineSlots()) == Ceiling(), "one is unknown"
    assert ceiling(model, 0) == Ceiling()


def test_a_configured_total_is_that_of_the_backends_in_use() -> None:
    model = ModelSlots(100, 5)
    engines: Sequence[EngineSlots] = [EngineSlots(), EngineSlots(7)]
    assert model.ceiling(0, engines, 2) == Ceiling(100, 5, 95)
    assert model.ceiling(0, engines[:1], 2) == Ceiling(50, 5, 45)
    assert model.ceiling(0, (), 2) == Ceiling()
    assert ModelSlots(2, 9).ceiling(0, engines, 2) == Ceiling(2, 1, 1)


def test_configured_slots_are_never_probed() -> None:
    engine = EngineSlots(32)
    for model in (ModelSlots(), ModelSlots(32)):
        for now in range(0, 10_000, 10):
            assert ceiling(model, now, engine).busy_max == 31
            model.bound(now, TAKEN)


def test_learned_slots_are_probed_when_they_hold_jobs_back_and_nothing_confirmed_them() -> None:
    engine, model = learned(32), ModelSlots()
    assert ceiling(model, 3, engine) == Ceiling(32, 1, 31)
    model.bound(engine.confirmed_at + PROBE_S - 0.1, TAKEN)
    assert ceiling(model, 15, engine).busy_max == 31
    assert ceiling(model, 1_000, engine).busy_max == 31, "it holds nobody back"
    model.bound(1_000, TAKEN)
    assert ceiling(model, 1_000.1, engine) == Ceiling(32, 1, 33), "one would wait"


def test_a_probe_waits_for_those_whom_the_reserve_is_for_to_take_it() -> None:
    """Who comes during a probe finds no slot kept; who came just before it does not mind."""
    engine, model = learned(32), ModelSlots()
    ceiling(model, 3, engine)
    last = engine.confirmed_at
    model.bound(last + PROBE_S + 1, 31)
    assert not engine.probed, "the reserve is free: the next one may want it"
    model.bound(last + PROBE_S + 2, 32)
    assert engine.probed, "it was taken"
    again = learned(32)
    ceiling(model := ModelSlots(), 3, again)
    model.bound(last + 2 * PROBE_S - 1, 31)
    assert not again.probed
    model.bound(last + 2 * PROBE_S, 31)
    assert again.probed, "nobody comes"


def test_a_probe_ends_with_what_it_was_for() -> None:
    engine, model = learned(32), ModelSlots()
    ceiling(model, 3, engine)
    model.bound(100, TAKEN)
    read(engine, 100.1, 32, 0)
    assert ceiling(model, 100.1, engine).busy_max == 33
    now = learn(engine, 100.2, 32)
    assert ceiling(model, now, engine).busy_max == 31
    model.bound(engine.confirmed_at + 2 * PROBE_S - 1, TAKEN)
    assert ceiling(model, now + 29, engine).busy_max == 31, "the next is later"
    model.bound(now + 2 * PROBE_S + 0.1, TAKEN)
    now += 2 * PROBE_S + 0.2
    assert ceiling(model, now, engine).busy_max == 33
    read(engine, now, 33, 0)
    assert ceiling(model, now, engine) == Ceiling(), "there are more: no limit until it is known"
    learn(engine, 151, 40)
    assert ceiling(model, 160, engine).busy_max == 39


def test_a_probe_without_an_answer_ends_all_the_same_and_the_next_are_ever_rarer() -> None:
    engine, model = learned(32), ModelSlots()
    now, began = 10.0, []
    while now < 5_000:
        probing = ceiling(model, now, engine).busy_max == 33
        if not probing:
            model.bound(now, TAKEN)
            if ceiling(model, now, engine).busy_max == 33:
                began.append(now)
        now += 0.5
    waits = [b - a - PROBE_LASTS_S for a, b in pairwise(began)]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(2 * PROBE_S, abs=1)
    assert waits[-1] == pytest.approx(PROBE_MAX_S, abs=1)


def test_all_engines_must_confirm() -> None:
    a, b, model = learned(32), learned(32), ModelSlots()
    assert ceiling(model, 3, a, b) == Ceiling(64, 2, 62)
    model.bound(100, TAKEN)
    now = learn(a, 100.1, 32)
    assert ceiling(model, now, a, b).busy_max == 66
    learn(b, 100.3, 32)
    assert ceiling(model, now + 0.1, a, b).busy_max == 62


def test_what_batch_leaves_free_is_probed_too_and_a_probe_lifts_it() -> None:
    engine, model = learned(8), ModelSlots()
    assert ceiling(model, 3, engine) == Ceiling(8), "too few for a reserve"
    model.bound(100, TAKEN)
    assert engine.probed
    ceiling(model, 100.1, engine)
    assert engine.probed
    ceiling(model, learn(engine, 100.2, 8), engine)
    assert not engine.probed


def test_a_probe_ends_when_its_engine_is_not_used_any_more() -> None:
    a, b, model = learned(32), learned(32), ModelSlots()
    ceiling(model, 3, a, b)
    model.bound(100, TAKEN)
    assert a.probed
    assert b.probed
    assert ceiling(model, 100.1, b) == Ceiling(32, 1, 31)
    assert not a.probed
    assert not b.probed
    model.bound(200, TAKEN)
    b.forget()
    assert ceiling(model, 200.1, b) == Ceiling()
    assert not b.probed


def test_one_engine_that_nothing_confirmed_is_enough_for_a_probe() -> None:
    a, b, model = learned(32), learned(32), ModelSlots()
    ceiling(model, 3, a, b)
    now = learn(a, 100, 32)
    model.bound(now, TAKEN)
    assert ceiling(model, now, a, b).busy_max == 66


def test_an_engine_that_tells_its_slots_is_believed_until_it_is_another() -> None:
    engine = EngineSlots()
    engine.polled(1, EngineFacts(0, 3, slots=48), 0)
    engine.polled(2, EngineFacts(0, 3), 0)
    assert engine.value == engine.configured == 48
    assert ModelSlots().ceiling(1, [engine], 1) == Ceiling(48, 1, 47)
    engine.poll_failed(FAILURES_MAX)
    assert engine.value is None
    assert EngineSlots(8).value == 8
