"""Scenarios `shares` and `ingress`: what users get who always have work."""

from __future__ import annotations

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
    ratio,
)
from bench.fairness.svg import BLUE, GREEN, ORANGE, Column, Mark, Panel, Series
from bench.report import Budget, Figure
from bench.setup import Setup

LARGE, SMALL = "large", "small"
WEIGHTED = f"{THROUGH}, weights 3:1"
EVENLY, LOPSIDED = f"{THROUGH}, evenly", f"{THROUGH}, lopsided"
WINDOW_S = 5.0
ASKS_MAX = 20_000
OPEN = 2
"""So many requests for each slot these users keep open, each of them."""
APART_S = 0.02
"""All begin by turns: else the first one's requests would all come before the others'."""
SIZES = {LARGE: (1_024, (384, 640)), SMALL: (128, (48, 80))}
TRIO = ("a", "b", "c")
GATEWAYS, DISPATCHERS = 3, 2


def shares(seed: int, *, quick: bool, slots: int = SLOTS) -> Scenario:
    """Two users always have work; the requests of one are eight times as large."""
    speed, until_s = (8.0, 6.0) if quick else (2.0, 60.0)
    at_once = OPEN * slots
    sources = [Source(user, _asks(user, *SIZES[user], seed + n, at_once), at_once)
               for n, user in enumerate(SIZES)]  # fmt: skip
    load = Workload(sources, until_s)
    window_s = 1.0 if quick else WINDOW_S
    return Scenario(
        name="shares",
        title=f"two users with requests of 8:1, {at_once} each always open, for {until_s:g} s",
        users=[LARGE, SMALL],
        engine=engine(speed, slots),
        sides=[
            Side(name=DIRECT, workload=load),
            Side(name=THROUGH, workload=load, setup=Setup()),
            Side(name=WEIGHTED, workload=load, setup=Setup(weights={0: 3.0}), ours=True),
        ],
        figures=lambda runs: _share_figures(runs, until_s, window_s),
        notes=[
            f"engine: {speed:g} times as fast as 850 tokens a second with 32 slots taken",
            "service: input + 2 × output tokens, when they reach the client",
        ],
        columns=lambda runs: [_column(runs, until_s, window_s)],
    )


def ingress(seed: int, *, quick: bool, slots: int = SLOTS) -> Scenario:
    """Three users always have work; one comes through one gateway only, or all through all."""
    speed, until_s = (8.0, 5.0) if quick else (2.0, 60.0)
    at_once = OPEN * slots
    sources = [Source(user, _asks(user, 512, (64, 448), seed + n, at_once), at_once)
               for n, user in enumerate(TRIO)]  # fmt: skip
    load = Workload(sources, until_s)
    setup = Setup(gateways=GATEWAYS, dispatchers=DISPATCHERS)
    return Scenario(
        name="ingress",
        title=f"{DISPATCHERS} dispatchers, {GATEWAYS} gateways: user a's requests all through one, "
        "or evenly",
        users=TRIO,
        engine=engine(speed, slots),
        sides=[
            Side(name=EVENLY, workload=load, setup=setup, ours=True),
            Side(name=LOPSIDED, workload=load, setup=setup, ours=True, lopsided=TRIO[0]),
        ],
        figures=lambda runs: _ingress_figures(runs, until_s),
        notes=[
            f"engine: {speed:g} times as fast as 850 tokens a second with 32 slots taken",
            "shares of service after the first fifth of the time",
        ],
    )


def _asks(user: str, size: int, outputs: tuple[int, int], seed: int, at_once: int) -> list[Ask]:
    rng = Random(seed)
    return [
        Ask(user, size, rng.randint(*outputs), APART_S * n if n < at_once else 0.0)
        for n in range(ASKS_MAX)
    ]


def _service_ratio(seen: Seen, since: float, until: float) -> float:
    return ratio(seen.served(LARGE, since, until), seen.served(SMALL, since, until))


def windows(seen: Seen, until_s: float, window_s: float) -> list[tuple[float, float]]:
    """(middle of the window, share of the larger requests' user in it)."""
    found = []
    for n in range(int(until_s / window_s + 1e-9)):
        since, until = n * window_s, (n + 1) * window_s
        large, small = (seen.served(u, since, until) for u in (LARGE, SMALL))
        found.append(((since + until) / 2, ratio(large, large + small)))
    return found


def _share_figures(runs: Runs, until_s: float, window_s: float) -> list[Figure]:
    figures = both("service ratio, large : small", "×", runs,
                   lambda seen: _service_ratio(seen, 0.0, until_s))  # fmt: skip
    for side, wanted in ((THROUGH, 1.0), (WEIGHTED, 3.0)):
        if side not in runs:
            continue
        off = abs(_service_ratio(runs[side], 0.0, until_s) / wanted - 1)
        figures.append(Figure(name=f"distance from {wanted:g} : 1", unit="", value=off,
                              budget=Budget(0.1)))  # fmt: skip
        of_large = [share for _, share in windows(runs[side], until_s, window_s)]
        for name, pick in (("least", min), ("most", max)):
            figures.append(
                Figure(name=f"{name} share of large in windows of {window_s:g} s, {wanted:g} : 1",
                       unit="", value=pick(of_large))
            )  # fmt: skip
    if DIRECT in runs:
        there = runs[DIRECT].tokens(until_s)
        here = runs[THROUGH].tokens(until_s)
        figures.append(Figure(name="weighted engine tokens, share of direct", unit="×",
                              value=ratio(here, there), direct=there, through=here))  # fmt: skip
    return figures


def _ingress_figures(runs: Runs, until_s: float) -> list[Figure]:
    since = until_s / 5
    shares = {side: _shares(seen, since, until_s) for side, seen in runs.items()}
    even, lopsided = shares[EVENLY], shares[LOPSIDED]
    figures = [
        Figure(name=f"share of user {user}, {how}", unit="", value=share)
        for how, found in (("evenly", even), ("lopsided", lopsided))
        for user, share in zip(TRIO, found, strict=True)
    ]
    off = max(abs(ratio(b, a) - 1) for a, b in zip(even, lopsided, strict=True))
    return [*figures, Figure(name="largest difference, of the share", unit="", value=off,
                             budget=Budget(0.05))]  # fmt: skip


def _shares(seen: Seen, since: float, until: float) -> list[float]:
    served = [seen.served(user, since, until) for user in TRIO]
    return [ratio(s, sum(served)) for s in served]


def _column(runs: Runs, until_s: float, window_s: float) -> Column:
    """The larger requests' user's share of both services over time."""
    panels = []
    for side in (DIRECT, THROUGH):
        if side not in runs:
            continue
        large = windows(runs[side], until_s, window_s)
        series = [
            Series("large requests", ORANGE, large, line=True),
            Series("small requests", BLUE, [(at, 1 - share) for at, share in large], line=True),
        ]
        if side == THROUGH and WEIGHTED in runs:
            weighted = windows(runs[WEIGHTED], until_s, window_s)
            series.append(Series("large, weight 3", GREEN, weighted, line=True))
        marks: Sequence[Mark] = [Mark(0.5, "equal")]
        title = "Direct to the engine" if side == DIRECT else f"Through {side}"
        panels.append(Panel(title, series, marks))
    return Column(
        title="Two users, requests of 8:1: share of service", x_label="seconds since the start",
        x_max=until_s, y_min=0.0, y_max=1.0,
        y_ticks=[(n / 4, f"{25 * n} %") for n in range(5)], panels=panels,
    )  # fmt: skip
