"""The fairness benchmark's own arithmetic: workloads, statistics, pictures, whom a key is for."""

import asyncio
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from bench.client import Answer, Client, Connection, Target
from bench.crowd import Ask, Sample, Sent, made
from bench.eta_error import errors, told
from bench.fairness import shares, waits
from bench.fairness.scenario import DIRECT, THROUGH, Request, Scenario, Seen, engine, named
from bench.fairness.shares import EVENLY, LARGE, LOPSIDED, SMALL, TRIO, WEIGHTED, windows
from bench.fairness.svg import (
    BLUE,
    PANEL_H,
    PANEL_W,
    Column,
    Mark,
    Panel,
    Series,
    log_ticks,
    picture,
    step,
)
from bench.fairness.there import There, assigned
from bench.fairness.waits import ALONE, HEAVY, LIGHT, NO_RESERVE
from bench.fleet import config
from bench.report import Figure
from bench.setup import Setup
from common.config import load
from sim.settings import EngineSettings

MAKERS: list[Callable[..., Scenario]] = [
    waits.flood, waits.slice_of_trace, shares.shares, shares.ingress,
]  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


def samples(**served: Sequence[float]) -> list[Sample]:
    """One each second from 0 on, with what each user has by then."""
    rows = [dict(zip(served, row, strict=True)) for row in zip(*served.values(), strict=True)]
    return [Sample(float(n), 0.0, 0.0, sum(row.values()), row) for n, row in enumerate(rows)]


def seen(requests: Sequence[Request] = (), of: Sequence[Sample] = ()) -> Seen:
    return Seen(requests, of, {}, 10.0, 32.0)


def value(figures: Sequence[Figure], name: str) -> float:
    [found] = [f.value for f in figures if f.name == name]
    return found


# --- workloads


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_gives_the_same_requests_again_and_another_gives_others(
    make: Callable[..., Scenario],
) -> None:
    def asked(seed: int) -> object:
        scenario = make(seed, quick=False)
        return [[list(s.asks[:300]) for s in side.workload.sources] for side in scenario.sides]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("quick", [True, False])
def test_all_sides_but_alone_have_the_same_requests(
    make: Callable[..., Scenario], quick: bool
) -> None:
    scenario = make(0, quick=quick)
    first, *rest = [side.workload for side in scenario.sides if side.name != ALONE]
    assert rest
    assert all(w is first for w in rest)
    assert {s.user for s in first.sources} == set(scenario.users)


def test_the_heavy_user_of_the_trace_has_the_first_key_and_most_of_the_requests() -> None:
    scenario = waits.slice_of_trace(0, quick=False)
    load_of = scenario.sides[0].workload
    counts = {s.user: len(s.asks) for s in load_of.sources}
    assert scenario.users[0] == waits.TRACE_HEAVY
    assert counts[waits.TRACE_HEAVY] / sum(counts.values()) == pytest.approx(0.6, abs=0.05)
    assert 15 <= len(counts) <= 21
    assert all(a.at < load_of.until_s for s in load_of.sources for a in s.asks)


def test_requests_of_users_who_always_have_work_are_eight_to_one() -> None:
    [large, small] = shares.shares(0, quick=False).sides[0].workload.sources
    work = [sum(a.input + 2 * a.output for a in s.asks) / len(s.asks) for s in (large, small)]
    assert work[0] / work[1] == pytest.approx(8.0, rel=0.02)
    begins = [(a.at, s.user) for s in (large, small) for a in s.asks[: s.at_once]]
    assert {u for _, u in sorted(begins)[:10]} == {LARGE, SMALL}


def test_an_engine_of_twice_the_speed_has_steps_of_half_the_time() -> None:
    slow, fast = engine(1.0), engine(2.0)

    def full_ms(e: EngineSettings) -> float:
        return e.step_ms + 32 * e.per_seq_us / 1e3

    assert full_ms(slow) == pytest.approx(37.8)
    assert full_ms(fast) == pytest.approx(18.9)
    assert fast.prefill_tokens_per_s == 2 * slow.prefill_tokens_per_s


# --- statistics


@pytest.mark.parametrize(
    ("status", "first", "events", "work"),
    [
        (200, 0.0, 0, 0.0),  # nothing came yet
        (200, 5.0, 1, 100.0),  # the role: the input is computed
        (200, 5.0, 4, 106.0),  # three tokens
        (200, 5.0, 13, 120.0),  # all ten, usage, and the end
        (429, 5.0, 0, 0.0),  # refused
    ],
)
async def test_what_has_reached_a_client_is_counted_as_it_comes(
    status: int, first: float, events: int, work: float
) -> None:
    client = Client(Target("127.0.0.1", 1))
    sent = Sent(Ask("u", 100, 10), client, 0.0)
    assert (sent.work(), sent.begun, sent.first_s) == (0.0, False, None)
    client.connection = Connection()
    client.connection.answer = Answer(4.0, status, first, 0.0, events)
    assert sent.work() == work
    assert sent.begun == (work > 0)
    assert sent.first_s == (1.0 if work else None)
    sent.ended = True
    assert sent.begun


def test_tokens_and_service_between_two_samples_are_in_line() -> None:
    of = samples(a=[0, 100, 300], b=[0, 0, 100])
    assert made(of, 1.5) == 100 + 150
    assert made(of, 99.0) == 400
    run = seen(of=of)
    assert run.served("a", 0.5, 1.5) == 200 - 50
    assert run.served("b", 0.0, 2.0) == 100
    assert run.served("nobody", 0.0, 2.0) == 0


def test_waits_are_of_the_users_asked_for_and_of_requests_sent_in_time() -> None:
    run = seen([Request("a", 0.0, 1.0, True), Request("a", 5.0, 3.0, True),
                Request("b", 0.0, 9.0, False)])  # fmt: skip
    assert run.first_s(["a"]) == [1.0, 3.0]
    assert run.first_s(["a", "b"], until=5.0) == [1.0, 9.0]
    assert run.wait(["a"], 0.95) == 3.0
    assert math.isnan(run.wait(["c"], 0.95))
    assert run.admitted_s("a") == 8.0


def test_windows_tell_the_share_in_each_and_nothing_of_a_window_without_service() -> None:
    run = seen(of=samples(large=[0, 80, 90, 90], small=[0, 20, 120, 120]))
    shown = windows(run, 3.0, 1.0)
    assert [at for at, _ in shown] == [0.5, 1.5, 2.5]
    assert [share for _, share in shown[:2]] == pytest.approx([0.8, 10 / 110])
    assert math.isnan(shown[2][1])


def test_the_flood_is_judged_by_what_its_light_user_waits_and_the_engine_computes() -> None:
    def run(light: float, rate: float) -> Seen:
        asked = [Request(HEAVY, 0.0, 10.0, True), *(Request(LIGHT[n], n, light, True)
                 for n in range(10))]  # fmt: skip
        return seen(asked, samples(heavy=[rate * n for n in range(12)]))

    scenario = waits.flood(0, quick=False)
    runs = {ALONE: run(0.1, 0), DIRECT: run(30.0, 100), NO_RESERVE: run(1.0, 99),
            THROUGH: run(0.2, 98)}  # fmt: skip
    figures = scenario.figures(runs)
    assert value(figures, "p95 over alone") == pytest.approx(2.0)
    assert value(figures, "p95, times better than direct") == pytest.approx(150.0)
    assert value(figures, "p95, times better than direct (no reserve)") == pytest.approx(30.0)
    share = "weighted engine tokens, share of direct"
    assert value(figures, share) == pytest.approx(0.98)
    assert value(figures, f"{share} (no reserve)") == pytest.approx(0.99)
    budgets = [f.budget.verdict(f.value) for f in figures if f.budget]
    assert budgets == ["met"] * 5
    worse = scenario.figures({**runs, THROUGH: run(0.6, 90)})
    judged = [f for f in worse if f.budget and "no reserve" not in f.name]
    assert [f.budget.verdict(f.value) for f in judged if f.budget] == ["missed"] * 3
    assert scenario.figures({ALONE: runs[ALONE], THROUGH: runs[THROUGH]})  # without an engine


def test_shares_are_judged_by_their_distance_from_the_weights() -> None:
    def run(large: float, small: float) -> Seen:
        return seen(of=samples(large=[large * n for n in range(62)],
                               small=[small * n for n in range(62)]))  # fmt: skip

    scenario = shares.shares(0, quick=False)
    runs: Mapping[str, Seen] = {DIRECT: run(8, 1), THROUGH: run(21, 20), WEIGHTED: run(3.6, 1)}
    figures = scenario.figures(runs)
    ratio = "service ratio, large : small"
    [through] = [f for f in figures if f.name == ratio]
    assert (through.direct, through.value) == (pytest.approx(8.0), pytest.approx(1.05))
    assert value(figures, "distance from 1 : 1") == pytest.approx(0.05)
    assert value(figures, "distance from 3 : 1") == pytest.approx(0.2)
    assert [f.budget.verdict(f.value) for f in figures if f.budget] == ["met", "missed"]


def test_ingress_is_judged_by_the_largest_difference_of_a_share() -> None:
    def run(**each: float) -> Seen:
        return seen(of=samples(**{u: [per * n for n in range(62)] for u, per in each.items()}))

    runs = {EVENLY: run(a=10, b=10, c=10), LOPSIDED: run(a=9.4, b=10.3, c=10.3)}
    figures = shares.ingress(0, quick=False).figures(runs)
    assert value(figures, "largest difference, of the share") == pytest.approx(0.06)
    assert value(figures, f"share of user {TRIO[0]}, lopsided") == pytest.approx(9.4 / 30)


# --- pictures


def column(panels: Sequence[Panel] | None = None) -> Column:
    dots = Series("one & other", BLUE, [(0.0, 0.1), (10.0, 100.0), (5.0, math.nan)])
    line = Series("a line", "#000000", [(0.0, 1.0), (10.0, 10.0)], line=True)
    found = [Panel("top", [dots], [Mark(1.0, "p95 < 1 s")]), Panel("bottom", [line])]
    return Column(
        title="t", x_label="s", x_max=10.0, y_min=0.1, y_max=100.0, log=True,
        y_ticks=log_ticks(0.1, 100.0), panels=found if panels is None else panels,
    )  # fmt: skip


def test_a_picture_is_well_formed_has_a_background_and_is_the_same_again() -> None:
    drawn = picture([column(), column()])
    assert drawn == picture([column(), column()])
    root = ET.fromstring(drawn)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    background = root.find(f"{SVG}rect")
    assert background is not None
    assert (float(background.attrib["width"]), float(background.attrib["height"])) == (
        width, height,
    )  # fmt: skip
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"t", "top", "bottom", "one & other", "p95 < 1 s", "0.1 s", "100 s"} <= set(texts)
    for element in root.iter(f"{SVG}circle"):
        assert 0 <= float(element.attrib["cx"]) <= width
        assert 0 <= float(element.attrib["cy"]) <= height
    dots = root.findall(f"{SVG}g/{SVG}circle")
    assert len(dots) == 2 * 2  # what is not a number is not drawn
    assert "nan" not in drawn


def test_axes_are_where_they_say_and_values_beyond_them_are_at_the_edge() -> None:
    axes = column()
    assert axes.y(100.0) == 0.0
    assert axes.y(0.1) == pytest.approx(PANEL_H)
    assert axes.y(10.0) - axes.y(100.0) == pytest.approx(PANEL_H / 3)
    assert axes.y(1e9) == axes.y(100.0)
    assert axes.y(0.0) == axes.y(0.1)
    assert 0 <= axes.x(0.0) < axes.x(5.0) < axes.x(10.0) == axes.x(99.0) <= PANEL_W
    assert axes.x(5.0) == pytest.approx(PANEL_W / 2)


@pytest.mark.parametrize(
    ("x_max", "gap"), [(6.0, 1.0), (7.0, 2.0), (60.0, 10.0), (100.0, 20.0), (0.5, 0.1)]
)
def test_ticks_are_round_numbers(x_max: float, gap: float) -> None:
    assert step(x_max) == pytest.approx(gap)


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        picture([])
    with pytest.raises(ValueError, match="panels"):
        picture([column([])])


# --- whom a key is for, and where requests go


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ((), ["", "", "", ""]),
        (("k0",), ["k0", "k0", "k0", "k0"]),
        (("k0", "k1"), ["k0", "k1", "k1", "k1"]),
        (("k0", "k1", "k2"), ["k0", "k1", "k2", "k1"]),
    ],
)
def test_the_heavy_users_key_is_nobody_elses(keys: Sequence[str], wanted: list[str]) -> None:
    assert [assigned(keys, n) for n in range(4)] == wanted


@pytest.mark.parametrize("with_engine", [True, False])
async def test_a_server_that_is_there_is_asked_only_what_it_can_answer(with_engine: bool) -> None:
    gateway, behind = Target("gateway", 80), Target("engine", 81)
    place = There(target=gateway, direct=behind if with_engine else None, engine="", model="m",
                  keys=["k0", "k1"], exact=False, pause_s=0.0)  # fmt: skip
    scenario = waits.flood(0, quick=True)
    asked = {}
    for side in scenario.sides:
        async with place.opened(scenario, side) as access:
            if access is not None:
                asked[side.name] = access.goals[LIGHT[0]][0]
    assert asked[THROUGH].target == gateway
    assert asked[THROUGH].key == "k1"
    assert NO_RESERVE not in asked
    assert asked[ALONE].target == (behind if with_engine else gateway)
    assert (DIRECT in asked) == with_engine
    if with_engine:
        assert (asked[DIRECT].target, asked[DIRECT].key) == (behind, "")


def test_a_setup_becomes_a_configuration_that_fairlane_reads(tmp_path: Path) -> None:
    path = tmp_path / "fairlane.toml"
    path.write_text(config(["http://127.0.0.1:1"], Setup(slots=8, reserved=2, weights={0: 3.0})))
    read = load(path, environment={})
    model = read.models["sim"]
    assert (model.reserved_slots, model.backends[0].max_num_seqs) == (2, 8)
    assert [k.weight for k in read.keys[:2]] == [3.0, 1.0]
    path.write_text(config(["http://127.0.0.1:1"], Setup()))
    model = load(path, environment={}).models["sim"]
    assert (model.reserved_slots, model.backends[0].max_num_seqs) == (None, None)


def test_names_of_figures_tell_the_side_only_where_it_is_not_the_usual_one() -> None:
    assert named("x", THROUGH) == "x"
    assert named("x", NO_RESERVE) == "x (no reserve)"


async def test_what_a_waiting_stream_was_told_is_kept_until_its_first_event() -> None:
    connection = Connection()
    connection.connection_made(asyncio.Transport())
    connection.answer = Answer(0.0)
    connection._done = asyncio.get_running_loop().create_future()
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for data in (head, b"19\r\n: queued position=3 eta=4\n\r\n", b"8\r\ndata: a\n\r\n"):
        connection.data_received(data)
    connection.data_received(b"19\r\n: queued position=9 eta=9\n\r\n")
    told_it = told(connection.answer.comments)
    assert [(t.position, t.eta_s) for t in told_it] == [(3, 4)]
    assert errors(told_it, told_it[0].at + 5.0) == [pytest.approx(0.2)]
