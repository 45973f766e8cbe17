"""What is known of jobs that give no first byte before they are done."""

import pytest

from dispatcher.admission import BackendLoad, Room
from dispatcher.engines.facts import EngineFacts
from dispatcher.flight import BLIND_MAX, FIRST_BYTES_MAX
from tests.unit.test_admission import fresh, polled, room, send


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
        load.ended(i + 4, f"s{i}")
    quiet(load, 200, 1, "r")
    assert room(load, 202.9).n == 0
    assert room(load, 203) == Room(1)


def test_the_usual_time_is_of_own_jobs_alone() -> None:
    load = BackendLoad()
    load.sent(0, "x", "standard", streams=False, mine=False)
    load.started(50, "x")
    quiet(load, 100, 1)
    assert room(load, 101).n == 1


def test_without_metrics_time_alone_starts_no_more_than_ever_ran_at_once() -> None:
    def sent(load: BackendLoad) -> int:
        now, newest = 1_000.0, ""
        for n in range(200):
            now += 2.0
            if load.room(now, "standard", 3).n:
                load.sent(now, f"q{n}", "standard", streams=False)
                newest = f"q{n}"
            elif n % 3 == 0:  # one of which it is not known that it started
                load.ended(now, newest)
        return load.counts(now).inflight

    assert sent(BackendLoad()) in (BLIND_MAX, BLIND_MAX + 1), "one may wait in the engine"
    load = BackendLoad()
    for n in range(30):
        load.sent(0, f"s{n}", "standard", streams=True)
        load.started(1, f"s{n}")
    for n in range(30):
        load.ended(2, f"s{n}")
    assert sent(load) in (30, 31)
    load = BackendLoad()
    quiet(load, 0, 20)
    load.polled(1, EngineFacts(4, 16), period=0.1)
    for n in range(20):
        load.ended(2, f"q{n}")
    assert sent(load) in (16, 17)
    assert sent(BackendLoad(max_num_seqs=12)) in (12, 13)


def test_without_metrics_and_streams_a_tenth_of_a_whole_answer_is_the_usual_time() -> None:
    load = BackendLoad()
    for n in range(5):
        quiet(load, 10.0 * n, 1, f"whole{n}-")
        load.started(10.0 * n + 4, f"whole{n}-0")
        load.ended(10.0 * n + 4, f"whole{n}-0")
    quiet(load, 100, 1)
    assert room(load, 100.39).n == 0
    assert room(load, 100.41).n == 1
