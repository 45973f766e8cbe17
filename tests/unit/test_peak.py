"""The greatest value of the last seconds."""

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.peak import Peak


@given(
    steps=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 9)), max_size=60),
    width=st.integers(1, 2_000),
    ask_after=st.integers(0, 3_000),
)
def test_the_peak_is_the_greatest_value_of_the_window(
    steps: list[tuple[int, int]], width: int, ask_after: int
) -> None:
    peak, now, told = Peak(width), 0, [(0, 0)]
    for wait, value in steps:
        now += wait
        peak.set(now, value)
        told.append((now, value))
    now += ask_after
    ends = [at for at, _ in told[1:]] + [now]
    naive = max(v for (_, v), end in zip(told, ends, strict=True) if end >= now - width)
    assert peak.peak(now) == naive
    assert len(peak._past) <= 9


def test_the_peak_s_edges_and_memory() -> None:
    peak = Peak(6)
    peak.set(0, 5)
    peak.set(1, 0)
    assert (peak.peak(7), peak.peak(7.1)) == (5, 0), "the window has its end and its beginning"
    for i in range(1_000):
        peak.set(8 + i / 1_000, 5 * (i % 2))
    assert peak.peak(9) == 5
    assert len(peak._past) <= 1
