"""Each way a job can end has a status for a client that has seen no byte."""

from common.outcomes import HTTP_STATUS, Outcome


def test_the_table_has_a_row_for_each_outcome() -> None:
    assert HTTP_STATUS.keys() == set(Outcome)
    assert list(HTTP_STATUS) == list(Outcome), "in the order of the enum, to be read side by side"


def test_only_a_finished_job_is_a_success() -> None:
    assert [o for o, status in HTTP_STATUS.items() if status < 400] == [Outcome.FINISHED]
    assert all(400 <= s < 600 for o, s in HTTP_STATUS.items() if o != Outcome.FINISHED)


def test_only_the_users_own_share_is_the_users_fault() -> None:
    """429 makes clients back off: it is for the user whose own queue is full, nobody else."""
    assert [o for o, status in HTTP_STATUS.items() if status == 429] == [Outcome.REJECTED_USER]


def test_values_are_words_for_labels() -> None:
    assert all(o.value == o.name.lower() for o in Outcome)
