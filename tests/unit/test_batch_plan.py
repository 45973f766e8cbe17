"""What is decided about a batch: pure, with time as an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.outcomes import Outcome
from gateway.batches.lines import GAP_BYTES, READ_BYTES, Index, IndexMaker
from gateway.batches.plan import (
    ATTEMPT_MAX,
    ESCALATED_LINES,
    PART_BYTES,
    ROUND_LINES,
    Done,
    due,
    job_id,
    lane,
    next_slice,
    read_job_id,
    room,
    verdict,
)

HEX = "ab" * 16
HOUR = 3_600_000


@given(st.sets(st.integers(0, 2_000)))
def test_done_is_a_set_of_lines(lines: set[int]) -> None:
    done = Done()
    for line in sorted(lines, reverse=True):
        done.add(line)
        done.add(line)
    assert done.count == len(lines)
    assert [n for n in range(2_100) if n in done] == sorted(lines)
    assert list(done.undone(100, 300)) == [n for n in range(100, 300) if n not in lines]


def test_done_is_as_redis_sets_bits() -> None:
    done = Done(bytes([0x80, 0x40]))
    assert [n for n in range(32) if n in done] == [0, 9] and done.count == 2


@given(st.integers(0, 50_000), st.integers(0, ATTEMPT_MAX))
def test_a_job_names_its_line(line: int, attempt: int) -> None:
    assert read_job_id(HEX, job_id(HEX, line, attempt)) == (line, attempt)


@pytest.mark.parametrize(
    "job",
    ["", "x", HEX, f"{HEX}-1", f"{HEX}-1-x", f"{HEX}-01-0", f"{HEX}-1-00", f"{'cd' * 16}-1-0",
     f"{HEX}--1-0", f"{HEX}-1-0-0", f"{HEX}-1- 0", f"{HEX}-1_0-0"],
)  # fmt: skip
def test_another_name_is_none_of_its_lines(job: str) -> None:
    assert read_job_id(HEX, job) is None


def at(share: float, escalate: float = 0.8, default: str = "standard"):  # type: ignore[no-untyped-def]
    return lane(int(share * HOUR), 0, HOUR, escalate, default, 2.0, 2_000)


def test_batch_until_its_end_draws_near() -> None:
    for share in (0.0, 0.5, 0.79):
        how = at(share)
        assert (how.cls, how.weight, how.most) == ("batch", 2.0, 2_000)
        assert how.wait_ms == pytest.approx((0.8 - share) * HOUR, abs=2)


def test_then_the_keys_class_with_a_rising_weight() -> None:
    weights = [at(s).weight for s in (0.8, 0.85, 0.9, 0.95, 1.0, 1.5)]
    assert weights == sorted(weights) and weights[0] < 0.2 and weights[-1] == 2.0
    assert all(w <= 2.0 for w in weights), "never above the key's own"
    assert at(0.9).cls == "standard" and at(0.9).most == ESCALATED_LINES
    assert at(0.9).wait_ms == pytest.approx(0.1 * HOUR, abs=2)


def test_never_above_default() -> None:
    assert at(0.9, default="interactive").cls == "standard"
    assert at(0.9, default="batch").cls == "batch"
    assert at(0.9, default="batch").wait_ms == pytest.approx(0.1 * HOUR, abs=2)


def test_off_it_stays_batch_to_the_end() -> None:
    assert at(0.999, escalate=1.0).cls == at(1.0, escalate=1.0).cls == "batch"
    assert at(5.0, escalate=1.0).wait_ms > 0


@pytest.mark.parametrize(
    ("outcome", "status", "attempt", "stopping", "expected"),
    [
        (Outcome.FINISHED, 200, 0, False, "output"),
        (Outcome.FINISHED, 200, 0, True, "output"),
        (Outcome.REFUSED, 400, 0, False, "error"),
        (Outcome.REFUSED, 503, 0, False, "error"),
        (Outcome.FINISHED, None, 0, False, "again"),
        (Outcome.FAILED, None, 0, False, "again"),
        (Outcome.TIMEOUT, None, 1, False, "again"),
        (Outcome.TRIES, None, 2, False, "failed"),
        (Outcome.LOST, None, 2, False, "failed"),
        (Outcome.TRIES, None, 0, True, "failed"),
        (Outcome.CANCELLED, None, 0, True, "left"),
        (Outcome.DEADLINE, None, 0, True, "left"),
        (Outcome.DEADLINE, None, 5, False, "moved"),
        (Outcome.CANCELLED, None, 0, False, "moved"),
        (Outcome.CANCELLED, None, ATTEMPT_MAX, False, "failed"),
    ],
)
def test_what_becomes_of_a_line(
    outcome: Outcome, status: int | None, attempt: int, stopping: bool, expected: str
) -> None:
    assert verdict(outcome, status, attempt, 2, stopping=stopping) == expected


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("stopping", [False, True])
def test_no_line_goes_round_for_ever(outcome: Outcome, stopping: bool) -> None:
    attempt = 0
    while (what := verdict(outcome, None, attempt, 5, stopping=stopping)) in ("again", "moved"):
        attempt += 1
    assert what in ("failed", "left") and attempt <= ATTEMPT_MAX


def test_results_are_written_down_soon_but_not_one_by_one() -> None:
    assert not due(0, 100.0, 100.0)
    assert due(ROUND_LINES, 0.0, 0.0)
    assert not due(1, 0.4, 10.0) and due(1, 0.5, 10.0)
    assert not due(1, 29.0, 86_400.0) and due(1, 30.0, 86_400.0)


def test_a_batch_of_a_week_has_some_thousand_parts() -> None:
    """One line a second."""
    age, held, parts = 0.0, 0.0, 0
    while age < 7 * 86_400:
        age += 1.0
        held += 1.0
        if due(int(held), held, age):
            parts, held = parts + 1, 0.0
    assert parts < 25_000


def test_as_many_answers_at_once_as_fill_a_part() -> None:
    assert next_slice(8, 8, 8_000) == 16
    assert next_slice(64, 64, 64_000) == 64
    assert next_slice(8, 8, 8 * PART_BYTES) == 1
    assert next_slice(1, 1, 0) == 2


def test_room() -> None:
    assert room(0, 0, 2_000, 1_000) == (2_000, 1_000)
    assert room(1_900, 900, 2_000, 1_000) == (100, 100)
    assert room(1_999, 900, 2_000, 1_000) == (0, 0), "many at once"
    assert room(3, 900, 4, 1_000) == (1, 100)
    assert room(2_500, 5_000, 2_000, 1_000) == (0, 0)


def index(*places: tuple[int, int]) -> Index:
    maker = IndexMaker()
    for place in places:
        maker.add(*place)
    return Index(maker.bytes())


def test_an_index_knows_where_lines_are() -> None:
    made = index((0, 10), (11, 5), (1 << 33, 1 << 24))
    assert len(made) == 3
    assert [made.place(n) for n in range(3)] == [(0, 10), (11, 5), (1 << 33, 1 << 24)]
    assert made.size(1) == 5


def test_neighbours_are_read_together() -> None:
    half = READ_BYTES // 2
    made = index(
        (0, half), (half + 1, half - 1), (2 * half + 1, 10), (2 * half + 11 + GAP_BYTES, 9)
    )
    assert made.groups([0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert made.groups([0, 3]) == [[0], [3]]
    assert made.groups([]) == []


def test_a_long_line_is_read_alone() -> None:
    made = index((0, 4 * READ_BYTES), (4 * READ_BYTES + 1, 4))
    assert made.groups([0, 1]) == [[0], [1]]
