"""How a backend is, by its jobs and its polls: the rules alone, time as an argument."""

import pytest

from dispatcher.breaker import FAILURES_MAX, TRIPPED_S
from dispatcher.engines.facts import EngineFacts
from dispatcher.health import FAILED_MAX, HEARD_S, MISSES_MAX, RAMP_S, RAMP_START, STALL_S, Health


def polled(health: Health, at: float, generated: int | None) -> None:
    health.polled(at, EngineFacts(generated=generated), at)


def miss(health: Health, at: float, times: int = MISSES_MAX) -> None:
    for _ in range(times):
        health.missed(at)


def fail(health: Health, at: float, times: int) -> None:
    for n in range(times):
        health.sent(at, f"f{at}-{n}")
        health.failed(at, f"f{at}-{n}")
        health.ended(at, f"f{at}-{n}")


# --- out of use


def test_three_jobs_without_a_byte_open_it_and_bytes_between_them_do_not() -> None:
    health = Health()
    fail(health, 1, FAILURES_MAX - 1)
    health.heard_at = 2  # a stream goes on there
    fail(health, 3, FAILURES_MAX - 1)
    assert health.breaker.state(3) == "closed"
    fail(health, 4, 1)
    assert health.breaker.state(4) == "open" and health.breaker.silent


def test_polls_without_a_connection_open_it_unless_bytes_came_of_late() -> None:
    health = Health()
    health.connected(0)
    miss(health, 1, MISSES_MAX - 1)
    health.connected(1)
    miss(health, 1, MISSES_MAX - 1)
    assert (health.reachable, health.breaker.state(1)) == (True, "closed")
    health.heard_at = 5
    miss(health, 5 + HEARD_S - 0.1)
    assert (health.reachable, health.breaker.state(14.9)) == (True, "closed")
    miss(health, 5 + HEARD_S, 1)
    assert (health.reachable, health.breaker.state(15)) == (False, "open")
    assert health.breaker.room(15 + TRIPPED_S - 0.1, 3) == 0


def test_a_port_that_is_back_gets_its_trial_at_once() -> None:
    health = Health()
    miss(health, 0)
    health.connected(1)
    assert health.reachable
    assert health.breaker.room(1, 3) == 1
    health.sent(1, "trial")
    assert health.breaker.room(1, 3) == 0
    health.answered(2, "trial")
    assert health.breaker.state(2) == "closed"


@pytest.mark.parametrize("facts", [None, EngineFacts(), EngineFacts(running=1, waiting=0)])
def test_silence_of_whole_answers_alone_says_nothing(facts: EngineFacts | None) -> None:
    assert not Health().stalled(1e6, 0, facts, streams=False)
    assert Health().stalled(STALL_S, 0, facts, streams=True)


def test_an_engine_that_runs_nothing_of_what_it_has_is_dead() -> None:
    assert Health().stalled(STALL_S, 0, EngineFacts(running=0, waiting=0), streams=False)
    assert not Health().stalled(STALL_S, 0, EngineFacts(running=0, waiting=1), streams=False)


def test_tokens_and_bytes_are_signs_of_life_for_a_minute() -> None:
    health = Health()
    counted = EngineFacts(running=1, generated=5)
    assert health.stalled(STALL_S, 0, counted, streams=False)
    assert not health.stalled(STALL_S, 1, counted, streams=False), "it has had jobs for less"
    polled(health, 10, 5)
    polled(health, 20, 5)
    polled(health, 30, 6)
    polled(health, 40, 6)
    assert not health.stalled(29.9 + STALL_S, 0, counted, streams=False)
    assert health.stalled(30 + STALL_S, 0, counted, streams=False)
    health.heard_at = 50
    assert not health.stalled(49.9 + STALL_S, 0, counted, streams=False)


def test_a_silent_one_is_closed_by_an_answer_or_by_its_engine_s_tokens_alone() -> None:
    for proof in ("answer", "tokens", "none"):
        health = Health()
        polled(health, 0, 7)
        health.breaker.trip(0, silent=True)
        polled(health, TRIPPED_S, 8)
        assert health.breaker.state(TRIPPED_S) == "half_open", "before the trial"
        health.sent(20, "trial")
        if proof == "answer":
            health.answered(21, "trial")
        elif proof == "tokens":
            health.polled(21, EngineFacts(generated=9), 20.5)
        else:
            health.polled(21, EngineFacts(generated=9), 19.9)
        state = "half_open" if proof == "none" else "closed"
        assert health.breaker.state(10_000) == state


def test_a_job_that_broke_before_closes_no_other_backend() -> None:
    health = Health()
    health.sent(0, "poison")
    health.broke(0, "poison", before=True)
    assert health.breaker.state(0) == "closed"
    health.broke(0, "other", before=False)
    assert health.breaker.state(0) == "open"
    assert health.failed_here("poison") and health.failed_here("other")
    health.answered(1, "other")
    assert not health.failed_here("other")


def test_of_the_jobs_that_failed_the_newest_are_remembered() -> None:
    health = Health()
    for n in range(FAILED_MAX + 5):
        health.refused(0, str(n))
    assert not health.failed_here("4") and health.failed_here("5")


# --- a slow start


def back(health: Health, how: str, at: float) -> None:
    if how == "closed":
        health.breaker.trip(at - 20, silent=True)
        health.sent(at, "trial")
        health.answered(at, "trial")
        health.ended(at, "trial")
    elif how == "counters":
        polled(health, at - 1, 100)
        polled(health, at, 3)
    else:
        miss(health, at - 1, MISSES_MAX)
        health.connected(at)
        health.breaker.sent(at, "trial")
        health.breaker.answered(at, "trial")


@pytest.mark.parametrize("how", ["closed", "counters", "port"])
def test_a_backend_that_is_back_starts_slowly(how: str) -> None:
    health = Health()
    assert health.room(0, 64) == 64
    back(health, how, 100)
    assert health.room(100, 64) == RAMP_START
    sent = []
    for round_ in range(4):
        room = health.room(100.5, 64)
        sent.append(room)
        for n in range(room):
            health.sent(100.5, f"{round_}-{n}")
        assert health.room(100.5, 64) == 0
        for n in range(room):
            health.answered(100.5, f"{round_}-{n}")
    assert sent == [2, 4, 8, 16], "one more for each that answers"
    assert health.room(100 + RAMP_S, 64) == 64


def test_a_slow_start_goes_on_without_answers() -> None:
    health = Health()
    back(health, "counters", 0)
    health.sent(0, "a")
    health.sent(0, "b")
    assert [health.room(s, 64) for s in (0.9, 1, 2, 3)] == [0, 2, 6, 14]
    health.ended(1, "a")
    assert health.room(1, 64) == 3


def test_what_restarts_loses_its_streams_and_what_only_misses_polls_does_not() -> None:
    health = Health()
    health.heard_at = 5
    miss(health, 6)
    health.heard_at = 7
    health.connected(8)
    assert health.restarted_at < 0
    miss(health, 20)
    health.connected(30)
    assert health.restarted_at == 30
    polled(health, 40, 8)
    polled(health, 41, 9)
    assert health.restarted_at == 30
    polled(health, 42, 0)
    assert health.restarted_at == 42
