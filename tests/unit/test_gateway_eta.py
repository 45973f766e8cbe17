"""When a job's turn comes: what is told in queues that drain, stand, fill and change."""

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.eta_error import Told, errors, median, told
from gateway.eta import (
    JOBS_MAX,
    LANES_MAX,
    LONGEST_S,
    LOOK_S_MAX,
    LOOK_S_MIN,
    STILL_S,
    Eta,
)

LOOK_S, COMMENTS = 2.0, (4.0, 19.0, 34.0, 49.0, 64.0)


def at(
    eta: Eta, place: int, now: float, drain: float | None = 2.0, user: str = "u"
) -> float | None:
    return eta.seconds("m", "standard", user, place, drain, now)


def known(eta: Eta, place: int, now: float, drain: float | None = 2.0, user: str = "u") -> float:
    found = at(eta, place, now, drain, user)
    assert found is not None
    return found


def falls(eta: Eta, places: list[int], every: float = LOOK_S, user: str = "u") -> float:
    """Look at one job at these places; when the last look was."""
    for n, place in enumerate(places):
        eta.look("m", "standard", user, f"job of {user}", place, n * every)
    return (len(places) - 1) * every


# --- what is told


def test_before_anything_was_seen_the_announced_rate_counts() -> None:
    eta = Eta()
    assert at(eta, 3, 0.0, 2.0) == 1.5
    assert at(eta, 3, 0.0, 0.0) is None, "nothing was seen to end"
    assert at(eta, 3, 0.0, None) is None, "nothing can run"
    assert at(eta, 0, 0.0) == 0.0


def test_what_is_seen_outweighs_a_wrong_announcement() -> None:
    """The first minute: the announced rate is that of a minute, of which little has passed."""
    eta = Eta()
    now = falls(eta, [40, 36, 32, 28, 24])
    assert known(eta, 24, now, 0.2) == pytest.approx(12, rel=0.4)
    assert known(eta, 24, now, 0.0) == pytest.approx(12)
    now = falls(eta, [60 - 4 * n for n in range(15)])
    assert known(eta, 24, now, 0.2) == pytest.approx(12, rel=0.2)


def test_a_lane_has_its_own_pace() -> None:
    """Users of a greater weight go more than once a turn: places of the others fall slowly."""
    eta = Eta()
    falls(eta, [100 - 8 * n for n in range(12)], user="heavy")
    now = falls(eta, [50 - 2 * n for n in range(12)], user="light")
    assert known(eta, 10, now, 2.5, "light") == pytest.approx(10, rel=0.3)
    assert known(eta, 10, now, 2.5, "heavy") == pytest.approx(2.5, rel=0.3)
    assert 2.5 < known(eta, 10, now, 2.5, "unseen") < 10, "that of its class"


def test_many_who_come_at_once_do_not_count_as_a_trend() -> None:
    eta = Eta()
    now = falls(eta, [30, 26, 22, 18, 74, 70, 66])
    assert known(eta, 66, now) == pytest.approx(33, rel=0.3)


def test_who_keeps_coming_counts() -> None:
    """Two turns a second, of which every other is that of somebody who came before this one."""
    eta = Eta()
    now = falls(eta, [60 - 2 * n for n in range(20)])
    assert known(eta, 22, now) == pytest.approx(22, rel=0.2)


def test_a_place_that_only_rises_has_no_time() -> None:
    eta = Eta()
    places = [10 + n for n in range(int(STILL_S / LOOK_S) + 2)]
    times = []
    for n, place in enumerate(places):
        eta.look("m", "standard", "u", "j", place, n * LOOK_S)
        times.append(at(eta, place, n * LOOK_S))
    assert times[-1] is None
    before = [t for t in times if t is not None]
    assert before == sorted(before), "later and later until it is unknown"
    eta.look("m", "standard", "u", "j", places[-1] - 4, len(places) * LOOK_S)
    assert at(eta, places[-1] - 4, len(places) * LOOK_S) is not None


def test_slow_engines_are_not_taken_for_ones_that_stand() -> None:
    eta = Eta()
    now = falls(eta, [5] * 40)
    assert at(eta, 5, now, 0.02) is not None
    assert at(eta, 5, now, 2.0) is None


def test_what_was_seen_is_forgotten() -> None:
    eta = Eta()
    now = falls(eta, [200 - 10 * n for n in range(10)])
    fast = known(eta, 20, now)
    for n in range(60):  # another job, now at a turn a second
        eta.look("m", "standard", "u", "other", 100 - 2 * n, now + n * LOOK_S)
    assert fast < 5 and known(eta, 20, now + 118, 1.0) == pytest.approx(20, rel=0.25)


def test_looks_too_close_or_too_far_apart_say_nothing() -> None:
    eta = Eta()
    eta.look("m", "standard", "u", "j", 10, 0.0)
    for n in range(1, 10):
        eta.look("m", "standard", "u", "j", 10, n * LOOK_S_MIN / 10)
    assert at(eta, 4, 1.0) == 2.0
    eta.look("m", "standard", "u", "j", 10, LOOK_S_MAX + 1.0)
    assert at(eta, 4, LOOK_S_MAX + 1.0) == 2.0


def test_when_one_more_job_of_a_user_leaves() -> None:
    eta = Eta()
    for n in range(5):
        assert n > 1 or eta.next_leaves_s("m", "standard", "u", 4.0 * n) is None
        eta.went("m", "standard", "u", 4.0 * n)
    assert eta.next_leaves_s("m", "standard", "u", 16.0) == pytest.approx(4.0)
    later = eta.next_leaves_s("m", "standard", "u", 60.0)
    assert later is not None and later > 10, "and longer, where none does"
    assert eta.next_leaves_s("m", "standard", "other", 16.0) is None


# --- whatever comes

looks = st.tuples(
    st.sampled_from(["a", "b"]), st.sampled_from(["j", "k", "l"]), st.integers(-1, 10_000),
    st.floats(-1, 300), st.booleans(),
)  # fmt: skip


@given(st.lists(looks, max_size=40), st.integers(0, 20_000),
       st.none() | st.floats(0, 1e6))  # fmt: skip
def test_a_time_is_never_negative_nor_endless(
    seen: list[tuple[str, str, int, float, bool]], place: int, drain: float | None
) -> None:
    eta, now = Eta(), 0.0
    for user, job, seen_at, later, went in seen:
        now += later
        eta.look("m", "standard", user, job, seen_at, now)
        if went:
            eta.went("m", "standard", user, now)
        for name in ("a", "b", "c"):
            found = at(eta, place, now, drain, name)
            assert found is None or (0 <= found <= LONGEST_S and math.isfinite(found))
            leaves = eta.next_leaves_s("m", "standard", name, now)
            assert leaves is None or leaves >= 0
            if drain is None and place:
                assert found is None


@given(st.floats(0.05, 20), st.integers(2, 200), st.sampled_from([1.0, 2.0, 15.0]))
@settings(max_examples=50)
def test_further_back_is_never_sooner(rate: float, place: int, every: float) -> None:
    eta = Eta()
    places = [max(1, place - math.floor(n * every * rate)) for n in range(8)]
    now = falls(eta, places, every)
    times = [at(eta, p, now, rate) for p in range(1, place)]
    sure = [t for t in times if t is not None]
    assert sure == sorted(sure)


def test_what_is_kept_is_bounded() -> None:
    eta = Eta()
    for n in range(JOBS_MAX + 500):
        eta.look(f"m{n % 5_000}", "standard", f"u{n}", f"j{n}", 5, n / 1_000)
        eta.look(f"m{n % 5_000}", "standard", f"u{n}", f"j{n}", 4, n / 1_000 + 2)
    assert len(eta) == JOBS_MAX + 2 * LANES_MAX
    small = Eta()
    for n in range(100):
        small.look("m", "standard", "u", f"j{n}", 5, 0.0)
        small.look("m", "standard", "u", f"j{n}", 0, 1.0)
    small.look("m", "standard", "u", "j", 5, 2.0)
    small.forget("j")
    assert len(small) == 1, "the lane alone"


# --- how true it is, in simulated queues


class Line:
    """Users who take turns at equal charges, and what a job of one of them sees as its place."""

    def __init__(self) -> None:
        self.lanes: dict[str, deque[str]] = {}
        self.order: deque[str] = deque()

    def come(self, user: str, *jobs: str) -> None:
        if user not in self.lanes:
            self.order.append(user)
        self.lanes.setdefault(user, deque()).extend(jobs)

    def go(self) -> str | None:
        if not self.order:
            return None
        user = self.order.popleft()
        job = self.lanes[user].popleft()
        if self.lanes[user]:
            self.order.append(user)
        else:
            del self.lanes[user]
        return job

    def place(self, user: str, job: str) -> int:
        k = self.lanes[user].index(job)
        mine = self.order.index(user)
        others = (
            min(len(self.lanes[u]), k + (i < mine)) for i, u in enumerate(self.order) if u != user
        )
        return k + 1 + sum(others)


Gaps = Callable[[random.Random, float], float]
REGULAR: Gaps = lambda _, rate: 1 / rate  # noqa: E731
RANDOM: Gaps = lambda dice, rate: dice.expovariate(rate)  # noqa: E731
UNEVEN: Gaps = lambda dice, rate: dice.uniform(0.125, 1.875) / rate  # noqa: E731


def waits(
    seed: int, rate: float, gaps: Gaps, come: float, announced: Callable[[float], float]
) -> Iterator[float]:
    """Errors of what a stream is told that waits behind 12 users with 5 jobs each, with its user's
    5 jobs before it, where `come` users a second come meanwhile."""
    dice, line, eta = random.Random(seed), Line(), Eta()
    for u in range(12):
        line.come(f"u{u}", *(f"u{u}-{n}" for n in range(5)))
    line.come("me", *(f"before-{n}" for n in range(5)), "mine")
    events = [(gaps(dice, rate) * dice.random(), "go"), (LOOK_S, "look")]
    events += [(t, "tell") for t in COMMENTS]
    if come:
        events.append((dice.expovariate(come), "come"))
    comments: list[Told] = []
    while events:
        events.sort()
        now, what = events.pop(0)
        if what == "go":
            if line.go() == "mine":
                yield from errors(comments, now)
                return
            events.append((now + gaps(dice, rate), "go"))
        elif what == "come":
            line.come(f"new at {now}", *(f"{now}-{n}" for n in range(dice.randint(1, 3))))
            events.append((now + dice.expovariate(come), "come"))
        else:
            for user, jobs in line.lanes.items():  # as a gateway does: one job of each lane
                place = line.place(user, jobs[-1])
                eta.look("m", "standard", user, jobs[-1], place, now)
            place = line.place("me", "mine")
            found = eta.seconds("m", "standard", "me", place, announced(now), now)
            if what == "look":
                events.append((now + LOOK_S, "look"))
            else:
                whole = None if found is None else max(1, round(found))
                comments.append(Told(now, place, whole))


CASES = [
    ("regular, rate known", REGULAR, 0.0, True, 0.05),
    ("regular, first minute", REGULAR, 0.0, False, 0.1),
    ("uneven, rate known", UNEVEN, 0.0, True, 0.15),
    ("random, rate known", RANDOM, 0.0, True, 0.25),
    ("random, first minute", RANDOM, 0.0, False, 0.3),
    ("random, users keep coming", RANDOM, 0.4, True, 0.5),
]


@pytest.mark.parametrize(("name", "gaps", "come", "known_rate", "bound"), CASES,
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_the_median_error(
    name: str, gaps: Gaps, come: float, known_rate: bool, bound: float
) -> None:
    found: list[float] = []
    for seed in range(32):
        rate = (0.5, 1.0, 2.0, 4.0)[seed % 4]
        announced = (lambda _, r=rate: r) if known_rate else (lambda t, r=rate: r * min(t, 60) / 60)
        found += waits(seed, rate, gaps, come * rate, announced)
    print(f"{name}: median {median(found):.3f}, p90 {statistics.quantiles(found, n=10)[-1]:.3f}")
    assert len(found) > 100 and median(found) <= bound


# --- measuring it


def test_comments_are_read_back() -> None:
    reads = [
        (1.0, b": queued position=12 eta=30\n"), (2.0, b"data: {}\n\n: waiting\n"),
        (3.0, b": queued\n: queued position=2\n"),
    ]  # fmt: skip
    comments = told(reads)
    assert comments == [Told(1.0, 12, 30), Told(3.0, 2, None)]
    assert errors(comments, 21.0) == [0.5]
    assert errors([Told(5.0, 1, 1)], 5.2) == [pytest.approx(0.8)], "no finer than a second"
    assert math.isnan(median([]))
