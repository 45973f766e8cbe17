"""How many jobs a backend may be sent."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.admission import KV_TRIAL_S, BackendLoad, Counts, Room
from dispatcher.aimd import START
from dispatcher.engines.facts import EngineFacts, TokenTimes
from dispatcher.why import Why

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
    return load.room(now, cls, limit)


def send(load: BackendLoad, now: float, *jobs: str, cls: str = "standard") -> None:
    for job in jobs:
        load.sent(now, job, cls, streams=True)


def test_jobs_go_out_up_to_the_limit_and_a_first_byte_gives_a_place_back() -> None:
    load = fresh()
    assert room(load, 1) == Room(3)
    send(load, 1, "a", "b", "c")
    assert room(load, 1).reason == "3 waiting ≥ limit 3"
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
    assert room(load, 1.05).reason == "3 waiting ≥ limit 3"
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
    assert room(load, 14.1).reason == "metrics 4.1 s old: 1 waiting ≥ limit 1"
    load.poll_failed(14.1)
    assert load.failures == 1
    assert room(load, 14.1, limit=1) == room(load, 14.1)
    load.started(14.2, "a")
    assert room(load, 14.2) == Room(1)


def test_a_page_without_the_waiting_count_is_no_knowledge_of_the_load() -> None:
    load = BackendLoad()
    polled(load, 0, waiting=None)
    send(load, 0, "a")
    assert room(load, 0).reason == "metrics unknown: 1 waiting ≥ limit 1"


def test_slots() -> None:
    load = fresh(max_num_seqs=4)
    for i in range(6):
        send(load, 1, f"job{i}")
        load.started(1, f"job{i}")
    assert room(load, 1) == Room(1)
    send(load, 1, "more")
    load.started(1, "more")
    assert room(load, 1).reason == "7 in flight ≥ 7"


def test_kv_memory() -> None:
    load = fresh()
    send(load, 1, "a")
    load.started(1, "a")
    polled(load, 1, kv=0.919)
    assert room(load, 1) == Room(3)
    polled(load, 1.1, kv=0.95)
    assert room(load, 1.1).reason == "KV 0.95 ≥ 0.92"
    assert room(load, 1.5) == Room(1), "stale: the gauge does not count, and the limit is 1"
    polled(load, 1.6, kv=0.95)
    assert room(load, 1.6).n == 0
    polled(load, 1.7, waiting=0)
    assert room(load, 1.7) == Room(3), "unknown is not full"


def test_time_per_output_token() -> None:
    load = fresh()
    send(load, 1, "a")
    load.started(1, "a")
    assert load.room(2, "batch", 1, tpot_s=0.1) == Room(1), "unknown is not slow"
    load.signal.gaps.add(2, 0.162 * 30, 30)
    slow = Room(0, "TPOT 162 ms > 150 ms", Why.TPOT)
    assert load.room(2, "batch", 1, tpot_s=0.15) == slow
    assert load.room(2, "batch", 1, tpot_s=0.15, floor=True) == slow
    assert load.room(2, "batch", 1, tpot_s=0.163) == Room(1)
    assert load.room(2, "standard", 3) == Room(3), "no limit"
    assert load.room(4.1, "batch", 1, tpot_s=0.15) == Room(1), "nothing came of late"


def test_with_a_target_the_jobs_in_flight_are_limited_too() -> None:
    load = fresh()
    for n in range(START):
        assert load.room(1 + n / 100, "standard", 3, tpot_s=0.15).n == min(3, START - n)
        send(load, 1, f"job{n}")
        load.started(1 + n / 100, f"job{n}")
    shut = Room(0, "8 in flight ≥ 8 for TPOT 150 ms", Why.INFLIGHT)
    assert load.room(1.9, "standard", 3, tpot_s=0.15) == shut
    assert load.room(1.9, "interactive", 3) == Room(3), "each class has its own"
    load.signal.gaps.add(2.5, 0.05 * 30, 30)
    assert load.room(2.5, "standard", 3, tpot_s=0.15) == Room(3), "it is fast enough for more"
    assert (load.inflight_max("standard"), load.inflight_max("batch")) == (2 * START, None)
    load.signal.gaps.add(6, 0.14 * 30, 30)
    assert load.room(6, "standard", 3, tpot_s=0.15).why is Why.INFLIGHT, "too slow"
    assert load.inflight_max("standard") == 7


def test_the_engine_s_histogram_counts_where_no_gaps_are_seen() -> None:
    load = fresh()
    for job in "abcdefghi":
        load.sent(1, job, "standard", streams=False)
    for now, seconds in [(1.0, 0.0), (2.0, 20.0)]:
        told = TokenTimes(seconds, int(100 * now))
        load.polled(now, EngineFacts(0, 9, tpot=told), period=0.1)
    assert load.room(2, "standard", 3, tpot_s=0.15).reason == "TPOT 200 ms > 150 ms"
    assert load.room(2, "interactive", 3, tpot_s=0.21).reason == "9 in flight ≥ 8 for TPOT 210 ms"
    assert load.tpot(2) == 0.2
    assert load.tpot(2.5) is None, "its word is old"


def test_preemptions_cut_what_may_be_in_flight() -> None:
    load = fresh()
    for n in range(20):
        send(load, 1, f"job{n}")
        load.started(1, f"job{n}")
    for now, preemptions in [(2.0, 7), (4.0, 7), (6.0, 8), (6.1, 8)]:
        load.polled(now, EngineFacts(0, 20, 0.5, preemptions), period=100)
        room(load, now)
    assert room(load, 6.2) == Room(0, "20 in flight ≥ 18 after preemptions", Why.INFLIGHT)
    assert room(load, 6.2, "interactive").n == 0
    for n in range(3):
        load.ended(7, f"job{n}")
    assert room(load, 7).n == 2, "limited, and no preemption since: it grows"
    load.polled(20, EngineFacts(0, 17, 0.5, 2), period=100)
    assert room(load, 20).n > 0, "it was started anew"


def test_an_empty_backend_is_never_too_slow() -> None:
    load = fresh()
    send(load, 1, "a")
    load.started(1, "a")
    load.signal.gaps.add(2, 30.0, 30)
    load.ended(2, "a")
    assert load.room(2, "batch", 1, tpot_s=0.15) == Room(1)


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


def busy(
    load: BackendLoad, now: float, ends: int, *, begun: bool = True, cls: str = "standard"
) -> float:
    """A second in which so many jobs come, start and end, one after the other; returns its end."""
    for i in range(1, ends + 1):
        send(load, now + i / ends, "busy", cls=cls)
        if begun:
            load.started(now + i / ends, "busy")
        load.ended(now + i / ends, "busy")
    return now + 1


def test_the_limit_follows_what_ends_while_one_job_is_on_its_way() -> None:
    load = fresh()
    assert room(load, busy(load, 1, 60, begun=False)) == Room(3), "they were no completions"
    now = busy(load, 10, 60)
    assert load.keeps_up(now) == 5, "3 or 4 end in 0.05 s: a quarter more, and one"
    assert room(load, now) == Room(5)
    assert room(load, now, "batch", 1) == Room(1), "it takes nobody else's places"
    now = busy(load, 20, 60, cls="batch")
    assert room(load, now, "batch", 1) == Room(6), "a half more than its own, and one"
    assert room(load, now) == Room(5)
    assert room(load, now + 1) == Room(3), "of late nothing ended"
    now = busy(load, 20, 60)
    load.signal.gaps.add(now, 0.1 * 20, 20)
    assert load.keeps_up(now) == 17, "with steps of 0.1 s it takes 0.22 s"
    load.signal.gaps.add(now, 5.0 * 20, 20)
    assert load.keeps_up(now) <= 60 * 1.25 + 1, "but never more than a second"


def test_the_limit_follows_what_ends_without_metrics_too() -> None:
    load = BackendLoad()
    now = busy(load, 1, 60)
    assert room(load, now) == Room(5)
    assert room(load, now + 1) == Room(1)


def test_slots_that_are_known_to_be_free_are_filled_as_fast_as_the_engine_takes_jobs() -> None:
    def begin(load: BackendLoad, now: float, jobs: int) -> Room:
        for n in range(jobs):
            send(load, now, f"{now}{n}")
            load.started(now, f"{now}{n}")
        return room(load, now)

    load = fresh(max_num_seqs=32)
    assert begin(load, 1, 3) == Room(3)
    assert begin(load, 1.01, 5) == Room(6), "8 in two delays, 4 in one"
    assert begin(load, 1.02, 20) == Room(4), "no more than there are slots"
    assert begin(load, 1.03, 4) == Room(3), "then as ever"
    assert begin(fresh(), 1, 20) == Room(3), "they may all be taken"
    load = fresh(max_num_seqs=32)
    polled(load, 1, waiting=1, period=100)
    assert begin(load, 1, 20).n == 2, "somebody waits, so none is free"


def test_each_reason_has_its_word() -> None:
    assert room(fresh(), 1).why is Why.OPEN
    load = fresh(max_num_seqs=1)
    send(load, 1, "a", "b", "c")
    assert room(load, 1).why is Why.LIMIT
    assert room(load, 1, "batch").why is Why.GIVES_WAY
    for job in "abc":
        load.started(1, job)
    send(load, 1, "d")
    load.started(1, "d")
    assert room(load, 1).why is Why.SLOTS
    assert room(load, 1, limit=9).why is Why.OPEN
    polled(load, 2, kv=0.95)
    assert room(load, 2, limit=9).why is Why.KV
    send(load, 9, "e")
    assert room(load, 9).why is Why.STALE


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


# --- whatever happens


class _Machine:
    """Does to a load what a step says; `n` chooses among jobs, classes and numbers."""

    def __init__(self) -> None:
        self.load = BackendLoad(max_num_seqs=8)
        self.now = 0.0
        self.jobs: list[str] = []
        self.sent = 0

    def send(self, n: int) -> None:
        cls, limit = [("interactive", 3), ("standard", 3), ("batch", 1)][n % 3]
        got = self.load.room(self.now, cls, limit, floor=bool(n & 8))
        assert (got.reason == "") == (got.n > 0)
        for _ in range(got.n):
            self.sent += 1
            self.jobs.append(f"job{self.sent}")
            self.load.sent(self.now, self.jobs[-1], cls, streams=bool(n & 16))
        if got.n:
            c = self.load.counts(self.now)
            limit = max(
                limit if self.load.fresh(self.now) else 1, self.load.keeps_up(self.now, cls)
            )
            assert c.unstarted + c.foreign <= limit or c.inflight <= 8
            assert c.inflight <= 8 + limit
            blind = not self.load.fresh(self.now) and not n & 16 and c.inflight <= 8
            assert self.load.room(self.now, cls, limit).n == 0 or blind

    def start(self, n: int) -> None:
        self.now += 0.01
        if self.jobs:
            self.load.started(self.now, self.jobs[n % len(self.jobs)])

    def end(self, n: int) -> None:
        if self.jobs:
            job = self.jobs.pop(n % len(self.jobs))
            self.load.ended(self.now, job, whole=bool(n & 2), tokens=n & 12 or None)

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
        assert c.inflight == sum(m.load.inflight(x) for x in ("interactive", "standard", "batch"))
        assert 0 <= c.unstarted <= c.inflight
    for job in m.jobs:
        m.load.ended(m.now, job)
    assert m.load.counts(m.now).inflight == m.load.counts(m.now).unstarted == 0
