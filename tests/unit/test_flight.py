"""What is known of jobs that give no first byte before they are done."""

import pytest

from dispatcher.admission import BackendLoad, Counts, Room
from dispatcher.blind import SEEK, START
from dispatcher.engines.facts import EngineFacts
from dispatcher.flight import TOGETHER_S
from tests.unit.test_admission import fresh, polled, room, send


def quiet(load: BackendLoad, now: float, count: int, prefix: str = "q") -> None:
    for i in range(count):
        load.sent(now + i / 1000, f"{prefix}{i}", "standard", streams=False)


@pytest.mark.parametrize(
    ("waiting", "running", "unstarted"),
    [(0, 5, 0), (0, 3, 2), (2, 5, 2), (2, 1, 4), (9, 0, 5), (1, None, 1), (0, 99, 0), (None, 5, 0)],
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


def test_without_metrics_as_many_silent_jobs_have_started_as_are_learned_to_run() -> None:
    load = BackendLoad()
    quiet(load, 0, START)
    assert load.counts(0) == Counts(START, 0, 0)
    assert room(load, 0) == Room(1)
    load.sent(0, "more", "batch", streams=False)
    assert load.counts(9) == Counts(START + 1, 1, 0)
    assert load.unstarted_of("batch") == 1, "the newest"
    assert room(load, 9).reason == "metrics unknown: 1 waiting ≥ limit 1"
    load.ended(9, "q2")
    assert room(load, 9) == Room(1)


def test_where_slots_are_configured_so_many_have() -> None:
    load = BackendLoad(max_num_seqs=12)
    quiet(load, 0, 13)
    assert load.counts(0).unstarted == 1
    load.blind.ran(64)
    quiet(load, 1, 5, "r")
    assert load.counts(1).unstarted == 6


def test_what_ran_at_once_is_learned_from_streams_and_from_metrics() -> None:
    load = BackendLoad()
    for n in range(30):
        load.sent(0, f"s{n}", "standard", streams=True)
        load.started(1, f"s{n}")
    assert load.blind.level == int((1 + SEEK) * 30 + 1)
    load = BackendLoad()
    quiet(load, 0, 20)
    load.polled(1, EngineFacts(4, 16), period=0.1)
    assert load.blind.level == (1 + SEEK) * 16 + 1


def test_streams_that_have_started_take_places_of_silent_jobs() -> None:
    load = BackendLoad()
    send(load, 0, "a", "b")
    load.started(1, "a")
    quiet(load, 1, START)
    assert load.counts(1).unstarted == 2, "a stream, and one silent job"


def test_all_that_were_sent_before_one_that_ended_well_have_started() -> None:
    load = BackendLoad()
    quiet(load, 0, 40)
    load.started(5, "q19")
    load.ended(5, "q20")
    assert load.blind.level == START, "it was hung up on"
    load.ended(5, "q19", whole=True)
    assert load.blind.level == (1 + SEEK) * 20 + 1
    assert load.unstarted == 40 - 21
    load.ended(6, "q5", whole=True)
    assert load.blind.level == 26


def test_a_job_that_did_not_wait_shows_that_as_many_run_as_were_in_flight() -> None:
    load = BackendLoad()
    quiet(load, 0, 12)
    load.ended(3, "q0", whole=True, tokens=100)
    load.sent(4, "last", "standard", streams=False)
    for job in range(1, 12):
        load.ended(5, f"q{job}")
    load.ended(7, "last", whole=True, tokens=100)
    assert load.blind.level == (1 + SEEK) * 12 + 1


def test_jobs_that_end_together_do_not_count_as_in_flight_for_one_that_is_sent_meanwhile() -> None:
    for later, shown in [(0.5 * TOGETHER_S, 12), (2 * TOGETHER_S, 20)]:
        load = BackendLoad()
        quiet(load, 0, 20)
        load.ended(3, "q0", whole=True, tokens=100)
        load.sent(4, "last", "standard", streams=False)
        for job in range(1, 9):
            load.ended(4 + later, f"q{job}")
        for job in range(9, 20):
            load.ended(5, f"q{job}")
        load.ended(7, "last", whole=True, tokens=100)
        assert load.blind.level == int((1 + SEEK) * shown + 1)


def test_of_others_and_of_streams_no_times_are_learned() -> None:
    load = BackendLoad()
    quiet(load, 0, 8)
    load.sent(1, "theirs", "standard", streams=False, mine=False)
    load.sent(1, "stream", "standard", streams=True)
    for job in range(8):
        load.ended(2, f"q{job}")
    for job in ("theirs", "stream"):
        load.ended(4, job, whole=True, tokens=100)
    assert load.blind.level == START
    quiet(load, 5, 1)
    load.ended(9, "q0", whole=True, tokens=100)
    assert load.blind.level == START


def test_what_is_guessed_has_its_own_margin_for_jobs_on_their_way() -> None:
    def done(load: BackendLoad) -> int:
        quiet(load, 0, START)
        load.counts(0.1)
        for job in range(START):
            load.started(1, f"q{job}")
            load.ended(1, f"q{job}")
        return load.done(1, 1)

    assert done(BackendLoad()) == 0
    assert done(fresh()) == START
