"""Scenarios `flood` and `slice`: how long light users wait beside a heavy one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from bench.crowd import Ask
from bench.fairness.scenario import (
    DIRECT,
    SLOTS,
    THROUGH,
    Runs,
    Scenario,
    Seen,
    Side,
    Source,
    Workload,
    both,
    engine,
    named,
    ratio,
)
from bench.fairness.svg import BLUE, ORANGE, Column, Mark, Panel, Series, log_ticks
from bench.report import Budget, Figure, percentile
from bench.setup import Setup
from sim.fairness.trace_cases import azure
from sim.fairness.traces import SLICE_S

HEAVY, LIGHT = "heavy", tuple(f"light{n}" for n in range(10))
ALONE, NO_RESERVE = "alone", f"{THROUGH}, no reserve"
WINDOW = 0.95
"""The part of the shorter backlog that is looked at: at its very end slots run empty."""
HEAVY_IN, HEAVY_OUT = 512, (64, 448)
LIGHT_IN, LIGHT_OUT = 256, 128
TRACE_HEAVY = "H"
TRACE_PER_S = 2.71
"""More than the engine can do, which is about 2.5 a second of this trace."""
NO_RESERVE_SETUP = Setup(reserved=0)


def flood(seed: int, *, quick: bool, slots: int = SLOTS) -> Scenario:
    """One user sends everything at once; of ten others each second one asks, so each of them has
    nothing in flight when it does."""
    speed, requests, every_s, alone_s = (6.0, 100, 0.2, 2.0) if quick else (1.5, 300, 1.0, 20.0)
    requests = requests * slots // SLOTS
    rng = Random(seed)
    at_once = [Ask(HEAVY, HEAVY_IN, rng.randint(*HEAVY_OUT)) for _ in range(requests)]
    light = [
        Source(user, [Ask(user, LIGHT_IN, LIGHT_OUT, n * every_s) for n in range(first, 600, 10)])
        for first, user in enumerate(LIGHT)
    ]
    load = Workload([Source(HEAVY, at_once), *light], 600.0, [HEAVY])
    return Scenario(
        name="flood",
        title=f"{requests} requests at once on {slots} slots; ten light users, each asks every "
        f"{10 * every_s:g} s",
        users=[HEAVY, *LIGHT],
        engine=engine(speed, slots),
        sides=[
            Side(name=ALONE, workload=Workload(light, alone_s)),
            Side(name=DIRECT, workload=load),
            Side(name=NO_RESERVE, workload=load, setup=NO_RESERVE_SETUP, ours=True),
            Side(name=THROUGH, workload=load, setup=Setup()),
        ],
        figures=_flood_figures,
        notes=[
            _speed(speed),
            f"heavy {HEAVY_IN} tokens in, {HEAVY_OUT[0]} to {HEAVY_OUT[1]} out; light {LIGHT_IN} "
            f"in, {LIGHT_OUT} out",
            "slots: learned from the engine's metrics in an earlier, smaller flood",
        ],
        columns=lambda runs: [_waits(runs, LIGHT, HEAVY, "One user floods", _window(runs))],
    )


def slice_of_trace(seed: int, *, quick: bool, slots: int = SLOTS) -> Scenario:
    """Azure's conversations, with users given to them, faster than they were."""
    speed, until_s = (6.0, 8.0) if quick else (3.0, SLICE_S / 3.0)
    asks = [
        Ask(a.user, a.input, a.output, a.at / speed)
        for a in azure(seed, TRACE_PER_S).arrivals
        if a.at / speed < until_s
    ]
    counts = {u: sum(a.user == u for a in asks) for u in sorted({a.user for a in asks})}
    users = sorted(counts, key=lambda u: -counts[u])
    light = [u for u in users if u != TRACE_HEAVY]
    load = Workload(
        [Source(u, [a for a in asks if a.user == u]) for u in users], 2 * until_s, users
    )
    return Scenario(
        name="slice",
        title=f"{len(asks)} Azure conversations in {until_s:.0f} s, 60 % of one user",
        users=users,
        engine=engine(speed, slots),
        sides=[
            Side(name=DIRECT, workload=load),
            Side(name=NO_RESERVE, workload=load, setup=NO_RESERVE_SETUP, ours=True),
            Side(name=THROUGH, workload=load, setup=Setup()),
        ],
        figures=lambda runs: _slice_figures(runs, light, until_s),
        notes=[
            _speed(speed) + f"; {TRACE_PER_S:g} requests a second of the trace's own time",
            f"light: the {len(light)} others, by Zipf's law",
        ],
        columns=lambda runs: [_waits(runs, light, TRACE_HEAVY, "Azure conversations, overload")],
    )


def _speed(speed: float) -> str:
    return f"engine: {speed:g} times as fast as 850 tokens a second with 32 slots taken"


def _flood_figures(runs: Runs) -> list[Figure]:
    beside, until = {side: seen for side, seen in runs.items() if side != ALONE}, _window(runs)
    figures = []
    for share in (0.50, 0.95):
        name = f"light users' time to first token, p{100 * share:.0f}"
        figures += both(name, "s", beside, lambda seen, p=share: seen.wait(LIGHT, p, until))  # type: ignore[misc]
        by_itself = runs[ALONE].wait(LIGHT, share)
        figures.append(
            Figure(name=f"the same alone, p{100 * share:.0f}", unit="s", value=by_itself)
        )
    alone = runs[ALONE].wait(LIGHT, 0.95)
    for side, seen in beside.items():
        if side == DIRECT:
            continue
        here, reserve = seen.wait(LIGHT, 0.95, until), side == THROUGH
        figures.append(
            Figure(name=named("p95 over alone", side), unit="×", value=ratio(here, alone),
                   budget=Budget(5) if reserve else None)
        )  # fmt: skip
        figures += _better(beside, side, here, LIGHT, until, 100 if reserve else 15)
        figures += _tokens(beside, side, until, 0.97 if reserve else 0.98)
    figures += both("heavy user's time to first token, p50", "s", beside,
                    lambda seen: seen.wait([HEAVY], 0.50))  # fmt: skip
    if THROUGH in runs:
        figures.append(Figure(name="slots learned before", unit="", value=runs[THROUGH].slots))
        figures += _eta(runs[THROUGH])
    figures.append(Figure(name="window", unit="s", value=until))
    return figures


def _eta(seen: Seen) -> list[Figure]:
    """How true the times were that waiting streams were told in their comments."""
    return [
        Figure(name=f"error of the times told, p{100 * share:.0f}", unit="×",
               value=percentile(seen.eta_errors, share))
        for share in (0.50, 0.90)
    ]  # fmt: skip


def _window(runs: Runs) -> float:
    """How long every side of the flood has a queue, in seconds."""
    return WINDOW * min(seen.admitted_s(HEAVY) for side, seen in runs.items() if side != ALONE)


def _slice_figures(runs: Runs, light: Sequence[str], until_s: float) -> list[Figure]:
    until_s = min([until_s, *(seen.ended_s for seen in runs.values())])
    figures = []
    for share in (0.50, 0.95):
        name = f"light users' time to first token, p{100 * share:.0f}"
        figures += both(name, "s", runs, lambda seen, p=share: seen.wait(light, p))  # type: ignore[misc]
    for side, seen in runs.items():
        if side != DIRECT:
            figures += _better(runs, side, seen.wait(light, 0.95), light, math.inf, 6)
            figures += _tokens(runs, side, until_s, 0.97 if side == THROUGH else 0.995)
    figures += both("heavy user's time to first token, p95", "s", runs,
                    lambda seen: seen.wait([TRACE_HEAVY], 0.95))  # fmt: skip
    return figures


def _better(
    runs: Runs, side: str, here: float, users: Sequence[str], until: float, must: float
) -> list[Figure]:
    if DIRECT not in runs:
        return []
    there = runs[DIRECT].wait(users, 0.95, until)
    return [
        Figure(name=named("p95, times better than direct", side), unit="×",
               value=ratio(there, here), budget=Budget(must, more_is_better=True))
    ]  # fmt: skip


def _tokens(runs: Runs, side: str, until: float, must: float) -> list[Figure]:
    if DIRECT not in runs:
        return []
    there, here = runs[DIRECT].tokens(until), runs[side].tokens(until)
    return [
        Figure(name=named("weighted engine tokens, share of direct", side), unit="×",
               value=ratio(here, there), direct=there, through=here,
               budget=Budget(must, more_is_better=True))
    ]  # fmt: skip


def _waits(
    runs: Runs, light: Sequence[str], heavy: str, title: str, until: float = math.inf
) -> Column:
    """Each request's time to the first token by when it was sent: light over heavy dots. The p95
    told is of those sent before `until`."""
    shown = [side for side in (DIRECT, THROUGH) if side in runs]
    panels = []
    for side in shown:
        seen = runs[side]
        p95 = seen.wait(light, 0.95, until)
        mark = Mark(p95, f"light, p95: {p95:.2g} s", BLUE)
        panels.append(
            Panel(
                "Direct to the engine" if side == DIRECT else f"Through {side}",
                [Series("heavy user", ORANGE, _dots(seen, [heavy])),
                 Series("light users", BLUE, _dots(seen, light))],
                [mark],
            )
        )  # fmt: skip
    low, high = 0.01, 100.0
    return Column(
        title=f"{title}: time to first token", x_label="seconds since the start, of sending",
        x_max=max(r.at for side in shown for r in runs[side].requests) or 1.0,
        y_min=low, y_max=high, y_ticks=log_ticks(low, high), panels=panels, log=True,
    )  # fmt: skip


def _dots(seen: Seen, users: Sequence[str]) -> list[tuple[float, float]]:
    return [(r.at, r.first_s) for r in seen.requests if r.user in users]
