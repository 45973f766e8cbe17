"""The mean gap between chunks of the last seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.tpot import (
    APART_S,
    BUCKET_S,
    BUCKETS,
    CHUNKS_MIN,
    FEW_MIN,
    FEW_S,
    HELD_UP_S,
    HISTORY_MAX,
    TOKENS_MIN,
    WINDOW_S,
    Chunks,
    Histogram,
    Signal,
    Tpot,
)  # fmt: skip

READS = st.tuples(st.floats(0, 1.5), st.floats(0, 10), st.integers(1, 30))
"""(seconds since the one before, gap, chunks)"""


def steady(tpot: Tpot, began: float, gap: float, count: int) -> float:
    """One stream's chunks; returns when the last came."""
    for n in range(count):
        tpot.add(began + n * gap, gap, 1)
    return began + (count - 1) * gap


@given(st.floats(0, 1e6), st.lists(READS, max_size=60), st.floats(0, 3))
def test_the_mean_is_that_of_the_window_and_within_the_gaps_seen(
    began: float, reads: list[tuple[float, float, int]], ask_after: float
) -> None:
    tpot, now = Tpot(), began
    told = []
    for wait, gap, chunks in reads:
        now += wait
        tpot.add(now, gap, chunks)
        told.append((now, gap, chunks))
    now += ask_after
    mean = tpot.mean(now)
    oldest = (now // BUCKET_S - BUCKETS + 1) * BUCKET_S
    seen = [(gap, chunks) for at, gap, chunks in told if at >= oldest]
    total = sum(chunks for _, chunks in seen)
    few = total < FEW_MIN or sum(gap for gap, _ in seen) < FEW_S
    assert (mean is None) == (total < CHUNKS_MIN and few)
    if mean is not None:
        assert mean == pytest.approx(sum(gap for gap, _ in seen) / total)
        each = [gap / chunks for gap, chunks in seen]
        assert min(each) - 1e-9 <= mean <= max(each) + 1e-9
    assert len(tpot._gaps) == len(tpot._chunks) == BUCKETS


def test_few_chunks_tell_nothing() -> None:
    tpot = Tpot()
    assert tpot.mean(5) is None
    steady(tpot, 10, 0.05, CHUNKS_MIN - 1)
    assert tpot.mean(11) is None
    tpot.add(11, 0.05, 1)
    assert tpot.mean(11) == pytest.approx(0.05)


def test_chunks_that_are_read_at_once_share_their_gap() -> None:
    tpot = Tpot()
    tpot.add(1, 2.0, CHUNKS_MIN)
    assert tpot.mean(1) == pytest.approx(0.1)


@pytest.mark.parametrize("began", [0.0, 0.1, 7.2499, 1e6])
def test_what_is_old_is_forgotten(began: float) -> None:
    tpot = Tpot()
    tpot.add(began, 0.3 * 50, 50)
    assert tpot.mean(began + WINDOW_S - BUCKET_S) == pytest.approx(0.3)
    assert tpot.mean(began + WINDOW_S) is None, "no chunks is not slow"
    now = began + WINDOW_S
    tpot.add(now, 0.1 * 50, 50)
    assert tpot.mean(now) == pytest.approx(0.1)
    assert tpot.mean(now + 1e5) is None


def test_the_mean_follows_within_the_window() -> None:
    tpot = Tpot()
    last = steady(tpot, 0, 0.02, 500)
    last = steady(tpot, last + 0.08, 0.08, 30)
    assert tpot.mean(last) == pytest.approx(0.08)


# --- one stream


def test_the_first_chunk_of_a_stream_ends_no_gap() -> None:
    tpot = Tpot()
    chunks = Chunks(tpot)
    chunks.came(100, 40)
    assert tpot.mean(100) is None
    for n in range(1, CHUNKS_MIN + 1):
        chunks.came(100 + n * 0.01, 1)
    assert tpot.mean(100.2) == pytest.approx(0.01)


def test_what_its_client_held_up_is_not_the_engine_s() -> None:
    tpot = Tpot()
    chunks = Chunks(tpot)
    chunks.came(0, 1)
    chunks.held_up(9)
    for n in range(100):  # what gathered meanwhile
        chunks.came(9 + n * 0.001, 50)
    assert tpot.mean(9.1) is None
    now = 9.1
    while now < 9 + HELD_UP_S + 1.5:
        now += 0.05
        chunks.came(now, 1)
    assert tpot.mean(now) == pytest.approx(0.05)


def test_few_chunks_of_a_slow_engine_are_enough() -> None:
    tpot = Tpot()
    steady(tpot, 10, 0.3, FEW_MIN - 1)
    assert tpot.mean(11) is None
    tpot.add(11.2, 0.3, 1)
    assert tpot.mean(11.2) == pytest.approx(0.3)


# --- tokens are not chunks


def test_usage_tells_how_many_tokens_a_chunk_holds() -> None:
    tpot = Tpot()
    for _ in range(30):
        chunks = Chunks(tpot)
        for n in range(11):
            chunks.came(n / 10, 1)
        chunks.over(44)
    assert tpot.tokens_a_chunk == pytest.approx(4)
    assert tpot.mean(1) == pytest.approx(0.1 / 4)
    for _ in range(60):
        tpot.learn(50, 50)
    assert tpot.tokens_a_chunk == pytest.approx(1, rel=0.05), "what was learned is forgotten"


def test_without_usage_a_chunk_is_a_token() -> None:
    tpot = Tpot()
    tpot.learn(0, 100)
    tpot.learn(100, 0)
    tpot.learn(90, CHUNKS_MIN - 1)
    assert tpot.tokens_a_chunk == 1, "one short stream tells too little"


# --- the engine's histogram


def test_a_histogram_s_mean_is_that_between_its_readings() -> None:
    told = Histogram()
    assert told.mean() is None
    told.read(0, 1_000.0, 10_000)
    assert told.mean() is None
    for n in range(1, 2 * HISTORY_MAX):
        told.read(n / 10, 1_000.0 + n * 0.5, 10_000 + n * 10)
    assert told.mean() == pytest.approx(0.05)
    end = 2 * HISTORY_MAX / 10
    told.read(end + WINDOW_S, 1e4, 20_000 - 1)
    told.read(end + 2 * WINDOW_S, 1e4 + 0.2 * TOKENS_MIN, 20_000 - 1 + TOKENS_MIN)
    assert told.mean() == pytest.approx(0.2), "what is older than the window is forgotten"
    told.read(end + 2 * WINDOW_S, 3.0, 50)
    assert told.mean() is None, "it was started anew"


def beside(gap: float, told: float, seconds: float, *, fresh: bool = True) -> float | None:
    """The signal after so long with these means."""
    signal = Signal()
    for n in range(int(seconds * 10) + 1):
        now = n / 10
        signal.gaps.add(now, gap * 5, 5)
        signal.histogram.read(now, told * 50 * n, 50 * n)
        seen = signal.seconds(now, fresh=fresh)
    return seen


def test_own_gaps_steer_and_the_histogram_counts_where_they_stay_apart() -> None:
    assert beside(0.1, 0.06, 30) == pytest.approx(0.1)
    assert beside(0.1, 0.04, APART_S - 1) == pytest.approx(0.1), "the metrics may be late"
    assert beside(0.1, 0.04, APART_S + 2) == pytest.approx(0.04), "a slow network"
    assert beside(0.01, 0.04, APART_S + 2) == pytest.approx(0.04), "tokens that are not sent"
    assert beside(0.1, 0.04, APART_S + 2, fresh=False) == pytest.approx(0.1)


def test_the_histogram_is_all_there_is_of_answers_that_do_not_stream() -> None:
    signal = Signal()
    signal.histogram.read(0, 0.0, 0)
    signal.histogram.read(1, 5.0, 50)
    assert signal.seconds(1, fresh=True) == pytest.approx(0.1)
    assert signal.seconds(1, fresh=False) is None
