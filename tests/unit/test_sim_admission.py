"""What admission promises, in virtual time and through the product's own deciders; at a few points
that are quick. `python -m sim --scenario admission-…` prints all of them."""

import msgspec
import pytest
from click.testing import CliRunner

from dispatcher.admission import BackendLoad
from dispatcher.blind import START
from sim.__main__ import main
from sim.admission import report
from sim.admission.flood import Figures, Point, direct, figures, through
from sim.admission.report import EXPERIMENTS, measure
from sim.admission.tpot import ABOVE_MAX, LOADS, best, held
from sim.fairness.gateway import Rules

STEADY = Rules(reserved=0)


@pytest.mark.parametrize("point", [Point(1, 8), Point(16, 8), Point(64, 128), Point(256, 32)])
def test_the_engine_s_queue_is_short_and_the_engine_never_waits(point: Point) -> None:
    f = measure(point, Rules(reserved=0, slots=point.slots), 0)
    assert f.waiting <= f.limit + 1
    assert f.tokens >= 0.98
    assert f.stall_s <= f.prefill_s


def test_the_measures_find_an_engine_that_waits_and_one_that_is_flooded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = Point(32, 8)
    arrivals = point.arrivals(0)
    base = direct(point, arrivals)
    deep = figures(point, through(point, Rules(reserved=0, limit=64), arrivals), base)
    assert deep.waiting > 32
    monkeypatch.setattr(BackendLoad, "keeps_up", lambda *_: 0)
    few = figures(point, through(point, STEADY, arrivals), base)
    assert few.tokens < 0.9, "three at a time are too few where many jobs end in each step"


@pytest.fixture(scope="module")
def fresh() -> Figures:
    return measure(Point(32, 32), STEADY, 0)


def test_late_metrics_change_nothing_for_own_traffic(fresh: Figures) -> None:
    late = measure(Point(32, 32), Rules(reserved=0, delay=5.0), 0)
    assert late.tokens == pytest.approx(fresh.tokens, abs=0.005)
    assert late.waiting == pytest.approx(fresh.waiting, abs=1)


def test_without_metrics_the_engine_is_neither_flooded_nor_idle() -> None:
    point = Point(32, 128)
    f = measure(point, Rules(reserved=0, metrics=False), 0)
    assert f.inflight <= point.slots + f.limit + 1
    assert f.waiting <= f.limit + 1
    assert f.tokens >= 0.95


BLIND = Rules(reserved=0, metrics=False, streams=False)


@pytest.mark.parametrize(
    "point",
    [Point(1, 32), Point(4, 32), Point(16, 128, lasts_s=100), Point(32, 32, lasts_s=100),
     Point(32, 128, lasts_s=100), Point(64, 512, lasts_s=600)],
)  # fmt: skip
@pytest.mark.parametrize("even", [False, True])
def test_nor_where_answers_do_not_stream_either(point: Point, even: bool) -> None:
    f = measure(msgspec.structs.replace(point, even=even), BLIND, 0)
    assert f.steady >= 0.95
    assert f.steady_waiting <= max(5, point.slots / 10), "T is 3 to 5 here where answers stream"
    assert f.most_waiting <= max(START, point.slots * 1.5), "while it learns"
    assert point.slots == 64 or f.tokens >= 0.95, "that takes some times as long as a job"


@pytest.mark.parametrize(
    "point", [Point(1, 32), Point(4, 32), Point(16, 128, lasts_s=100), Point(32, 128, lasts_s=100)]
)
def test_nor_where_these_do_not_tell_their_length(point: Point) -> None:
    f = measure(point, msgspec.structs.replace(BLIND, usage=False), 0)
    assert f.steady >= 0.85
    assert f.most_waiting <= max(START, point.slots / 4 + 2)


def test_requests_of_others_make_it_back_off_within_two_polls() -> None:
    point = Point(16, 128)
    assert measure(point, STEADY, 0, foreign=32).after == 0
    blind = measure(point, Rules(reserved=0, metrics=False), 0, foreign=32)
    assert blind.after > 0, "only metrics can tell of them"


@pytest.mark.parametrize(("name", "limits"), [("even", (18, 19)), ("mixed", (38,))])
def test_a_target_is_held_at_little_cost(name: str, limits: tuple[int, ...]) -> None:
    load = LOADS[name]
    _, top = best(load, 0, limits=limits)
    found = held(load, 0)
    assert found.above <= ABOVE_MAX
    assert found.sigma <= 0.1
    assert found.tokens_per_s >= 0.95 * top.tokens_per_s


def test_without_a_target_it_is_not_held() -> None:
    load = msgspec.structs.replace(LOADS["even"], lasts_s=90.0)
    assert held(load, 0, target=False).above > 0.5


def test_a_target_that_cannot_be_held_finds_no_constant_limit() -> None:
    with pytest.raises(ValueError, match="no constant limit"):
        best(msgspec.structs.replace(LOADS["even"], lasts_s=90.0), 0, limits=(60,))


def test_the_command_prints_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SLOTS", (4,))
    monkeypatch.setattr(report, "LENGTHS", (32,))
    shown = CliRunner().invoke(main, ["--scenario", "admission-lengths"])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert (
        len(lines) == 3 and lines[1].split()[0] == "slots" and lines[2].split()[:2] == ["4", "32"]
    )
    assert set(EXPERIMENTS) <= set(CliRunner().invoke(main, []).output.split())
