"""How many jobs run at once in an engine that tells nothing."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.blind import (
    FIRST_S,
    GAIN,
    GROW,
    HOLD,
    LEVEL_MAX,
    SEEK,
    SLOW,
    START,
    STEP,
    TOLERANCE,
    WINDOW_MIN,
    Blind,
)  # fmt: skip

STEP_S = 0.03
LENGTHS = (10, 20, 40, 50)


def show(blind: Blind, n: int) -> None:
    """A job that did not wait with n - 1 others before it."""
    blind.ended(10.0, 10 - STEP_S * 10, n, n, 10)


def sought(n: int) -> Blind:
    """It has seen n run, and that the next waited."""
    blind = Blind()
    show(blind, n)
    blind.ended(100.0, 0.0, n + 1, n + 1, 10)
    assert blind.level == int((1 + GROW) * n + 1)
    return blind


def window(
    blind: Blind, now: float, inflight: int, lengths: tuple[int, ...], took: Callable[[int], float]
) -> float:
    """Jobs of these lengths, one after another, until N changes or twice the jobs of a window have
    ended; they took so long. Returns the time then."""
    before = blind.level
    for n in range(2 * max(WINDOW_MIN, before)):
        o = lengths[n % len(lengths)]
        now += 1.0
        blind.ended(now + took(o), now, inflight, inflight, o)
        if blind.level != before:
            break
    return now + max(took(o) for o in lengths)


def test_it_begins_low_and_follows_what_is_shown_to_run() -> None:
    blind = Blind()
    assert blind.level == START
    show(blind, 5)
    assert blind.level == int((1 + SEEK) * 5 + 1)
    blind.ran(8)
    assert blind.level == (1 + SEEK) * 8 + 1
    blind.ran(6)
    show(blind, 3)
    assert blind.level == 11


def test_a_job_shows_something_only_if_it_did_not_wait() -> None:
    blind = Blind()
    show(blind, 8)
    begun = 1 / STEP_S
    for place in (9, 10):
        blind.ended(begun + STEP_S * 10 * (1 + TOLERANCE * 1.01), begun, place, place, 10)
    assert blind.level == 11, "neither did nor did not"
    blind.ended(begun + STEP_S * 10 * (1 + TOLERANCE * 0.99), begun, 10, 10, 10)
    assert blind.level == int((1 + SEEK) * 10 + 1)


def test_a_slow_job_ends_seeking() -> None:
    blind = Blind()
    show(blind, 8)
    blind.ended(10.0, 10 - STEP_S * 10 * (1 + SLOW * 1.01), 10, 10, 10)
    assert blind.level == int((1 + GROW) * 8 + 1)
    blind.ran(30)
    show(blind, 30)
    assert blind.level == int((1 + GROW) * 8 + 1), "it goes by windows now"


def test_so_do_many_that_show_nothing() -> None:
    blind = Blind()
    show(blind, 32)
    level = blind.level
    took = STEP_S * 10 * (1 + TOLERANCE + SLOW) / 2 + STEP_S * 5
    for _ in range(level // 4):
        blind.ended(10.0, 10 - took, 40, 40, 10)
        assert blind.level == level
    blind.ended(10.0, 10 - took, 40, 40, 10)
    assert blind.level == int((1 + GROW) * 32 + 1)


def test_jobs_known_not_to_wait_tell_how_long_a_step_is_now() -> None:
    blind = Blind()
    for _ in range(200):
        show(blind, 32)
    for _ in range(64):  # with more in flight steps are longer
        blind.ended(10.0, 10 - STEP_S * 15, 32, 32, 10)
    blind.ended(10.0, 10 - STEP_S * 15, 36, 36, 10)
    assert blind.level == (1 + SEEK) * 36 + 1


def test_without_lengths_only_the_order_shows_anything() -> None:
    blind = Blind()
    for tokens in (None, 0):
        for n in range(100):
            blind.ended(n + 1.0, n, 50, 50, tokens)
    assert blind.level == START
    blind.ran(12)
    assert blind.level == (1 + SEEK) * 12 + 1


def test_what_waits_is_told_by_what_no_token_explains() -> None:
    blind = sought(40)
    mean = STEP_S * sum(LENGTHS) / len(LENGTHS)
    waits = (mean + FIRST_S) / 2  # a third of the time: of 48 in flight 32 run
    window(blind, 200, 48, LENGTHS, lambda o: waits + FIRST_S + STEP_S * o)
    halfway = (((1 + GROW) * 40 + 1) + ((1 + GROW) * 32 + 1)) / 2
    assert blind.level == int(halfway)


def test_while_none_waits_it_grows_faster_and_faster() -> None:
    blind, now, grown = sought(40), 200.0, []
    for _ in range(4):
        before = blind.level
        now = window(blind, now, before + 1, LENGTHS, lambda o: STEP_S * o)
        grown.append(blind.level / before)
    assert grown == sorted(grown) and grown[0] < 1.12 < grown[-1] < 1 + SEEK


def test_jobs_that_were_sent_before_it_changed_do_not_count() -> None:
    blind = sought(40)
    for n in range(200):
        blind.ended(101.0 + n, 99.0, 41, 41, LENGTHS[n % 4])
    assert blind.level == 43


def test_it_waits_for_a_whole_window() -> None:
    blind = sought(4)
    for n in range(WINDOW_MIN):
        assert blind.level == 5
        blind.ended(200.0 + n + STEP_S * LENGTHS[n % 4], 200.0 + n, 6, 6, LENGTHS[n % 4])
    assert blind.level == 6


def test_it_has_a_greatest_level() -> None:
    blind, now = sought(LEVEL_MAX - 20), 200.0
    for _ in range(4):
        now = window(blind, now, blind.level + 1, LENGTHS, lambda o: STEP_S * o)
    assert blind.level == LEVEL_MAX
    blind = Blind()
    blind.ran(2 * LEVEL_MAX)
    assert blind.level == LEVEL_MAX


@pytest.mark.parametrize("lengths", [LENGTHS, (20,)])
def test_it_does_not_grow_where_it_does_not_limit(lengths: tuple[int, ...]) -> None:
    blind, now = sought(40), 200.0
    for _ in range(2 * HOLD):
        now = window(blind, now, 20, lengths, lambda o: STEP_S * o)
    assert blind.level == 43


def climbed(slots: int, blind: Blind, windows: int, now: float = 200.0) -> list[int]:
    """N after each window, where steps are as long as it takes, and the rest waits."""
    levels = []
    for _ in range(windows):
        x = blind.level + 1
        took = STEP_S * (1 + min(x, slots) / 64) * 20 * max(1, x / slots)
        now = window(blind, now, x, (19, 21, 20), lambda _, t=took: t)  # type: ignore[misc]
        levels.append(blind.level)
    return levels


@pytest.mark.parametrize(("slots", "begin"), [(32, 16), (32, 60), (4, 6), (1, 4), (16, 16)])
def test_where_lengths_are_alike_it_climbs_to_where_jobs_begin_to_wait(
    slots: int, begin: int
) -> None:
    levels = climbed(slots, sought(begin), 60)[30:]
    step = max(1, STEP * slots)
    assert max(levels) + 1 <= slots + 2 * step + 1
    assert min(levels) + 1 >= slots - 2 * step - 1
    assert sum(levels) / len(levels) + 1 >= slots - step / 2
    assert sum(level + 1 > slots for level in levels) >= 0.5 * len(levels), "it rests above"


def test_from_the_least_it_climbs_again() -> None:
    blind = sought(2)
    assert min(climbed(1, blind, 40)) == 1
    assert max(climbed(16, blind, 200, now=100_000.0)) >= 15


def test_a_gain_that_is_too_small_is_none() -> None:
    blind, now = sought(40), 200.0
    took = STEP_S * 20
    for _ in range(40):
        x = blind.level + 1
        slower = took * (x / 40) ** (1 - GAIN * 0.9)
        now = window(blind, now, x, (20,), lambda _, t=slower: t)  # type: ignore[misc]
    assert blind.level < 30


def test_where_times_differ_and_lengths_do_not_it_goes_down_to_what_the_order_shows() -> None:
    blind = sought(40)
    blind.ran(25)
    now, times = 200.0, deque((0.5, 2.0, 1.0, 4.0))

    def took(_: int) -> float:
        times.rotate()
        return times[0]

    for _ in range(20):
        now = window(blind, now, blind.level + 1, (20,), took)
    assert blind.level == 25


events = st.lists(
    st.tuples(
        st.integers(1, 2 * LEVEL_MAX),
        st.one_of(st.none(), st.integers(0, 1_000)),
        st.floats(0, 100),
        st.floats(0, 1),
        st.integers(0, 200),
    ),
    max_size=30,
)


@given(events)
def test_it_is_never_more_than_a_quarter_above_what_was_in_flight(
    told: list[tuple[int, int | None, float, float, int]],
) -> None:
    blind, now, most = Blind(), 0.0, 0
    for inflight, tokens, took, place, times in told:
        for n in range(times):
            now += 1.0
            most = max(most, inflight)
            at = max(1, int(place * inflight))
            if n % 7 == 0:
                blind.ran(at)
            length = tokens and tokens + n % 3
            blind.ended(now + took, now, inflight, at, length)
            assert 1 <= blind.level <= min(LEVEL_MAX, max(START, (1 + SEEK) * most + 1))
        now += 100
