"""Backends that refuse: how long they are left alone, and what brings them back."""

import pytest

from dispatcher.breaker import BACKOFF_MAX_S, BACKOFF_S, TRIAL_S, Breaker


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    breaker.refused(at, "first")
    return breaker


def test_a_refusal_opens_and_the_back_off_doubles_to_its_maximum() -> None:
    breaker = opened()
    now, waits = 0.0, []
    for i in range(7):
        waits.append(breaker.wait(now))
        assert breaker.state(now) == "open"
        assert breaker.room(now, 3) == 0
        now += waits[-1]
        assert breaker.state(now) == "half_open"
        assert breaker.wait(now) == 0
        breaker.sent(now, f"trial{i}")
        breaker.refused(now, f"trial{i}")
    assert waits == pytest.approx([0.5, 1, 2, 4, 8, 10, 10])
    assert (waits[0], waits[-1]) == (BACKOFF_S, BACKOFF_MAX_S)


def test_one_trial_at_a_time_and_its_first_byte_closes() -> None:
    breaker = opened()
    assert breaker.room(0.5, 3) == 1
    assert breaker.room(0.5, 0) == 0
    breaker.sent(0.5, "trial")
    assert breaker.room(0.6, 3) == 0
    breaker.answered(0.7, "trial")
    assert breaker.state(0.7) == "closed"
    assert breaker.room(0.7, 3) == 3
    breaker.refused(0.8, "next")
    assert breaker.wait(0.8) == pytest.approx(BACKOFF_S)


def test_jobs_sent_before_it_opened_neither_close_nor_double() -> None:
    """An overloaded engine still starts what it had taken."""
    breaker = opened()
    breaker.answered(0.1, "old")
    breaker.refused(0.2, "older")
    assert breaker.wait(0.2) == pytest.approx(0.3)
    breaker.sent(0.5, "trial")
    breaker.refused(0.6, "older still")
    breaker.answered(0.6, "old")
    breaker.abandoned(0.6, "oldest")
    assert breaker.state(0.6) == "half_open"
    assert breaker.room(0.6, 3) == 0


def test_an_abandoned_trial_makes_way_for_another() -> None:
    breaker = opened()
    breaker.sent(0.5, "trial")
    breaker.abandoned(0.6, "trial")
    assert breaker.room(0.6, 3) == 1


def test_a_trial_that_is_not_refused_for_long_was_accepted() -> None:
    breaker = opened()
    breaker.sent(0.5, "whole answer")
    assert breaker.state(0.49 + TRIAL_S) == "half_open"
    assert breaker.state(0.5 + TRIAL_S) == "closed"


def test_a_closed_breaker_takes_no_notice_of_jobs_that_go_well() -> None:
    breaker = Breaker()
    for i in range(3):
        breaker.sent(i, f"job{i}")
        breaker.answered(i, f"job{i}")
        breaker.abandoned(i, f"job{i}")
    assert (breaker.state(3), breaker.room(3, 5), breaker.wait(3)) == ("closed", 5, 0)
