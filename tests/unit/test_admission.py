"""How many jobs a backend may be sent."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.admission import FIRST_BYTES_MAX, KV_TRIAL_S, BackendLoad, Counts, Peak, Room
from dispatcher.engines import EngineFacts

IDLE = EngineFacts(waiting=0, running=0, kv=0.0)


def polled(load: BackendLoad, now: float, waiting: int | None = 0, **facts: float) -> None:
    running = facts.get("running", 0)
    read = EngineFacts(waiting, None if running is None else int(running), facts.get("kv"))
    load.polled(now, read, period=facts.get("period", 0.1))


def fresh(**options: float) -> BackendLoad:
    """A load whose metrics stay fresh for long."""
    slots = options.get("max_num_seqs")
    load = BackendLoad(max_num_seqs=None if slots is None else int(slots))
    load.polled(0, IDLE, period=1_000)
    return load


def room(load: BackendLoad, now: float, cls: str = "standard", limit: int = 3) -> Room:
    return load.room(now, cls, limit, others_waiting=False)


def send(load: BackendLoad, now: float, *jobs: str, cls: str = "standard") -> None:
    for job in jobs:
        load.sent(now, job, cls, streams=True)


def test_jobs_go_out_up_to_the_limit_and_a_first_byte_gives_a_place_back() -> None:
    load = fresh()
    assert room(load, 1) == Room(3)
    send(load, 1, "a", "b", "c")
    assert room(load, 1) == Room(0, "3 waiting ≥ limit 3")
    load.started(2, "b")
    load.started(2, "b")
    assert room(load, 2) == Room(1)
    load.ended(3, "a")
    assert room(load, 3) == Room(2)
    assert load.counts(3) == Counts(inflight=2, unstarted=1, foreign=0)
    load.ended(3, "a")
    load.ended(3, "unknown")
    load.started(3, "unknown")
    assert load.counts(3) == Counts(2, 1, 0)


def test_what_waits_beyond_one_s_own_jobs_is_foreign() -> None:
    load = fresh()
    send(load, 1, "a")
    polled(load, 1.05, waiting=3)
    assert load.counts(1.05) == Counts(1, 1, 2)
    assert room(load, 1.05) == Room(0, "3 waiting ≥ limit 3")
    assert room(load, 1.05, "interactive", 5) == Room(2)


def test_late_metrics_blame_nobody_for_own_jobs_of_the_last_seconds() -> None:
    load = fresh()
    send(load, 1, "a", "b", "c")
    for job in "abc":
        load.started(2, job)
    polled(load, 7.9, waiting=3)
    assert load.counts(7.9).foreign == 0
    polled(load, 8.1, waiting=3)
    assert load.counts(8.1).foreign == 3


def test_stale_metrics_leave_one_at_a_time_and_no_foreign_load() -> None:
    load = BackendLoad()
    assert room(load, 0) == Room(1)
    polled(load, 10, waiting=9, period=0.1)
    assert room(load, 10.3).n == 0
    assert room(load, 10.31) == Room(1)
    send(load, 10.31, "a")
    assert room(load, 14.1) == Room(0, "metrics 4.1 s old: 1 waiting ≥ limit 1")
    load.poll_failed(14.1)
    assert load.failures == 1
    assert room(load, 14.1, limit=1) == room(load, 14.1)
    load.started(14.2, "a")
    assert room(load, 14.2) == Room(1)


def test_a_page_without_the_waiting_count_is_no_knowledge_of_the_load() -> None:
    load = BackendLoad()
    polled(load, 0, waiting=None)
    send(load, 0, "a")
    assert room(load, 0) == Room(0, "metrics unknown: 1 waiting ≥ limit 1")


def test_slots() -> None:
    load = fresh(max_num_seqs=4)
    for i in range(6):
        send(load, 1, f"job{i}")
        load.started(1, f"job{i}")
    assert room(load, 1) == Room(1)
    send(load, 1, "more")
    load.started(1, "more")
    assert room(load, 1) == Room(0, "slots 7 ≥ 4 + 3")


def test_kv_memory() -> None:
    load = fresh()
    send(load, 1, "a")
    load.started(1, "a")
    polled(load, 1, kv=0.919)
    assert room(load, 1) == Room(3)
    polled(load, 1.1, kv=0.95)
    assert room(load, 1.1) == Room(0, "KV 0.95 ≥ 0.92")
    assert room(load, 1.5) == Room(1), "stale: the gauge does not count, and the limit is 1"
    polled(load, 1.6, kv=0.95)
    assert room(load, 1.6).n == 0
    polled(load, 1.7, waiting=0)
    assert room(load, 1.7) == Room(3), "unknown is not full"


def test_a_full_backend_without_own_jobs_gets_one_after_a_while() -> None:
    """Its gauge may have stuck: nothing that is in flight here could ever free that memory."""
    load = fresh()
    send(load, 0, "a")
    polled(load, 1, kv=0.99, period=100)
    load.started(1, "a")
    assert room(load, 90).n == 0
    load.ended(90, "a")
    assert room(load, 90 + KV_TRIAL_S - 0.1).n == 0
    assert room(load, 90 + KV_TRIAL_S) == Room(1)
    send(load, 96, "b")
    assert room(load, 100).n == 0
    load.ended(97, "b")
    polled(load, 110, kv=0.5)
    polled(load, 111, kv=0.95, period=100)
    assert room(load, 112).n == 0, "it was not full all the time"
    assert room(load, 111 + KV_TRIAL_S) == Room(1)


def test_batch_gives_way() -> None:
    load = fresh()
    assert load.room(1, "batch", 1, others_waiting=True) == Room(0, "other classes wait")
    send(load, 1, "a")
    assert room(load, 1, "batch", 2) == Room(0, "1 of other classes not started")
    load.started(1, "a")
    assert room(load, 1, "batch", 2) == Room(2)
    send(load, 1, "b", cls="batch")
    assert room(load, 1, "batch", 2) == Room(1)
    assert room(load, 1, "batch", 1) == Room(0, "1 waiting ≥ limit 1")
    assert room(load, 1, "interactive", 3) == Room(2), "batch counts against the others' limit"
    polled(load, 1.1, waiting=2)
    assert room(load, 1.1, "batch", 9) == Room(0, "1 of others waiting")


def test_jobs_of_other_dispatchers_count_once_and_can_be_forgotten() -> None:
    load = fresh()
    for _ in range(2):
        load.sent(1, "x", "batch", streams=True, mine=False)
        load.sent(1, "y", "standard", streams=False, mine=False)
    load.sent(1, "a", "standard", streams=True)
    load.sent(1, "a", "standard", streams=True, mine=False)
    assert load.counts(1) == Counts(3, 3, 0)
    load.started(1.5, "x")
    load.sent(1.6, "x", "batch", streams=True, mine=False)
    assert load.counts(1.6) == Counts(3, 2, 0), "told again, it has started all the same"
    load.keep_others(2, {"y", "unknown"})
    assert load.counts(2) == Counts(2, 2, 0)
    load.started(3, "y")
    load.sent(4, "y", "standard", streams=True)
    assert load.counts(4) == Counts(2, 2, 0), "one's own run of a job is a new one"
    load.keep_others(5, set())
    assert load.counts(5).inflight == 2


# --- jobs that give no first byte before they are done


def quiet(load: BackendLoad, now: float, count: int, prefix: str = "q") -> None:
    for i in range(count):
        load.sent(now + i / 1000, f"{prefix}{i}", "standard", streams=False)


@pytest.mark.parametrize(
    ("waiting", "running", "unstarted"),
    [(0, 5, 0), (0, 3, 2), (2, 5, 2), (2, 1, 4), (9, 0, 5), (1, None, 1), (0, 99, 0), (None, 3, 2)],
)
def test_at_a_poll_only_the_newest_silent_jobs_still_wait(
    waiting: int | None, running: int | None, unstarted: int
) -> None:
    load = fresh()
    quiet(load, 1, 5)
    load.polled(2, EngineFacts(waiting, running), period=0.1)
    assert load.counts(2).unstarted == unstarted
    assert load.counts(2).foreign == max(0, (waiting or 0) - 5), "F comes first"


def test_the_silent_jobs_that_started_are_the_oldest() -> None:
    load = fresh()
    quiet(load, 1, 3)
    polled(load, 2, waiting=1, running=2)
    for job, left in [("q0", 1), ("q1", 1), ("q2", 0)]:
        load.ended(2.1, job)
        assert load.counts(2.1).unstarted == left


def test_streams_are_known_and_not_inferred() -> None:
    load = fresh()
    send(load, 1, "a", "b")
    polled(load, 2, waiting=0, running=2)
    assert load.counts(2).unstarted == 2


def test_a_page_says_nothing_of_jobs_sent_after_it_was_asked_for() -> None:
    load = fresh()
    quiet(load, 1, 2)
    quiet(load, 2, 2, "late")
    load.polled(3, EngineFacts(0, 9), period=0.1, asked_at=1.5)
    assert load.counts(3).unstarted == 2


def test_without_metrics_a_silent_job_starts_after_the_usual_time() -> None:
    load = BackendLoad()
    quiet(load, 0, 1)
    assert room(load, 0.999).n == 0
    assert room(load, 1.0) == Room(1)
    for i in range(FIRST_BYTES_MAX + 5):
        load.sent(i, f"s{i}", "standard", streams=True)
        load.started(i + 3, f"s{i}")
    quiet(load, 200, 1, "r")
    assert room(load, 202.9).n == 0
    assert room(load, 203) == Room(1)


def test_the_usual_time_is_of_own_jobs_alone() -> None:
    load = BackendLoad()
    load.sent(0, "x", "standard", streams=False, mine=False)
    load.started(50, "x")
    quiet(load, 100, 1)
    assert room(load, 101).n == 1


# --- whatever happens


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


class _Machine:
    """Does to a load what a step says; `n` chooses among jobs, classes and numbers."""

    def __init__(self) -> None:
        self.load = BackendLoad(max_num_seqs=8)
        self.now = 0.0
        self.jobs: list[str] = []
        self.sent = 0

    def send(self, n: int) -> None:
        cls, limit = [("interactive", 3), ("standard", 3), ("batch", 1)][n % 3]
        got = self.load.room(self.now, cls, limit, others_waiting=bool(n & 8))
        assert (got.reason == "") == (got.n > 0)
        for _ in range(got.n):
            self.sent += 1
            self.jobs.append(f"job{self.sent}")
            self.load.sent(self.now, self.jobs[-1], cls, streams=bool(n & 16))
        if got.n:
            c = self.load.counts(self.now)
            known = self.load.fresh(self.now)
            assert c.unstarted + c.foreign <= (limit if known else 1)
            assert c.inflight <= 8 + limit
            assert self.load.room(self.now, cls, limit, others_waiting=False).n == 0

    def start(self, n: int) -> None:
        self.now += 0.01
        if self.jobs:
            self.load.started(self.now, self.jobs[n % len(self.jobs)])

    def end(self, n: int) -> None:
        if self.jobs:
            self.load.ended(self.now, self.jobs.pop(n % len(self.jobs)))

    def poll(self, n: int) -> None:
        self.load.polled(self.now, EngineFacts(n % 5, n % 11, (n % 7) / 7), period=0.1)

    def wait(self, n: int) -> None:
        self.now += n / 20


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 31)), max_size=80))
def test_room_never_lets_the_limit_be_exceeded(steps: list[tuple[int, int]]) -> None:
    m = _Machine()
    acts: list[Callable[[int], None]] = [m.send, m.start, m.end, m.poll, m.wait]
    for act, n in steps:
        acts[act](n)
        c = m.load.counts(m.now)
        assert c.inflight == len(m.jobs)
        assert 0 <= c.unstarted <= c.inflight
    for job in m.jobs:
        m.load.ended(m.now, job)
    assert m.load.counts(m.now).inflight == m.load.counts(m.now).unstarted == 0
