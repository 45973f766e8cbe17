"""One scenario, several policies, several seeds: what is told of each policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from sim.fairness.cases import Case
from sim.fairness.engine import FastEngine
from sim.fairness.gateway import Rules
from sim.fairness.jobs import Result
from sim.fairness.measures import (
    behind,
    even_speed,
    hits,
    jain,
    percentile,
    uneven,
    weights_of,
)
from sim.fairness.policies import POLICIES, Policy
from sim.fairness.world import World


class Scenario(msgspec.Struct, frozen=True):
    """Cases by seed, and what is worth comparing on them."""

    name: str
    about: str
    make: Callable[[int], Case]
    policies: tuple[str, ...]
    columns: tuple[str, ...]
    """Fields of `Row`, in order."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one policy. NaN: the scenario does not ask. Times are in seconds, over all
    light users' jobs of all seeds."""

    policy: str
    p50: float
    p95: float
    p99: float
    alone: float
    """p95 as a multiple of the light users' p95 alone on the engine."""
    alone99: float
    """The same of p99."""
    better: float
    """p95 without gateway as a multiple of this one."""
    tokens: float
    """Weighted tokens that the engine gave, relative to no gateway."""
    even: float
    """Jain's index over users of how fast their jobs were done, relative to an empty engine."""
    behind: float
    """The most weighted tokens that a user was ever behind its max-min fair share."""
    ratio: float = math.nan
    """Service of the first of two users by that of the second, mean over the seeds."""
    ratio_min: float = math.nan
    ratio_max: float = math.nan
    jain: float = math.nan
    """Jain's index over the services of the two, least of the seeds."""
    share: float = math.nan
    """The most that the first took of both users' service in any window."""
    rest: float = math.nan
    """Batch's service as a share of the capacity that interactive users left."""
    idle: float = math.nan
    """Batch's service as a share of the capacity when nobody else asks."""
    hits: float = 0.0
    """Share of the input that engines had computed before, mean over the seeds."""
    uneven: float = 1.0
    """The most that an engine computed by the mean of all, most of the seeds."""


class _Sums:
    """What one policy's runs add up to."""

    def __init__(self) -> None:
        self.ttfts: list[float] = []
        self.tokens = 0.0
        self.evens: list[float] = []
        self.behinds: list[float] = []
        self.ratios: list[float] = []
        self.jains: list[float] = []
        self.shares: list[float] = []
        self.rests: list[float] = []
        self.idles: list[float] = []
        self.hits: list[float] = []
        self.unevens: list[float] = []


def run(case: Case, policy: Policy, rules: Rules | None = None) -> Result:
    """One policy on one case."""
    engine = msgspec.structs.replace(case.engine, priority_mode=policy.priority_mode)
    engines = [
        FastEngine(engine, peak_memory=case.peak_memory, cache_blocks=case.cache_blocks)
        for _ in range(case.engines)
    ]
    world = World(engines)
    return world.run(policy.front(world, rules or case.rules), case.arrivals, case.until)


def alone(case: Case, classes: Sequence[str] | None = None) -> Result:
    """Without gateway and the light users only; or the jobs of these classes only."""
    arrivals = [
        a for a in case.arrivals
        if (a.user in case.light if classes is None else a.cls in classes)
    ]  # fmt: skip
    return run(msgspec.structs.replace(case, arrivals=arrivals), POLICIES["direct"])


def compare(scenario: Scenario, seeds: Sequence[int], policies: Sequence[str] = ()) -> list[Row]:
    """A row for each policy, the one without gateway first; that one always runs."""
    names = list(dict.fromkeys(["direct", *(policies or scenario.policies)]))
    sums = {name: _Sums() for name in names}
    ref: list[float] = []
    for seed in seeds:
        case = scenario.make(seed)
        if "alone" in scenario.columns:
            ref += alone(case).ttfts(case.light, case.since)
        capacity = _capacity(case)
        horizon = case.horizon
        for name in names:
            result = run(case, POLICIES[name])
            if horizon is None:  # the first one is the one without gateway
                horizon = result.busy_until()
            _add(sums[name], case, result, horizon, capacity)
    return [_row(name, sums[name], sums["direct"], ref) for name in names]


def _capacity(case: Case) -> float:
    """Weighted tokens a second that batch work alone gets; 0 where that is not asked."""
    if case.users or not case.windows:
        return 0.0
    begin, end = case.windows[0]
    return alone(case, ["batch"]).served(begin, end) / (end - begin)


def _add(s: _Sums, case: Case, result: Result, horizon: float, capacity: float) -> None:
    s.ttfts += result.ttfts(case.light, case.since)
    s.tokens += result.served(case.since, horizon)
    s.evens.append(even_speed(result, case.engine))
    s.hits.append(hits(result))
    s.unevens.append(uneven(result, case.engines))
    rules = case.rules
    urgent = rules.interactive_weight if rules.policy == "weighted" else 1.0
    s.behinds.append(behind(result, weights_of(case.arrivals, urgent), horizon))
    if case.users:
        for begin, end in case.windows:
            one, two = (result.served(begin, end, [user]) for user in case.users)
            s.ratios.append(one / two if two else math.inf)
            s.jains.append(jain([one, two]))
            s.shares.append(one / (one + two))
    elif capacity:
        (begin, end), (from_, to) = case.windows
        batch = {a.user for a in case.arrivals if a.cls == "batch"}
        left = capacity * (end - begin) - result.served(begin, end, case.light)
        s.rests.append(result.served(begin, end, batch) / left)
        s.idles.append(result.served(from_, to, batch) / (capacity * (to - from_)))


def _row(name: str, s: _Sums, direct: _Sums, ref: list[float]) -> Row:
    p95, p99 = percentile(s.ttfts, 0.95), percentile(s.ttfts, 0.99)
    return Row(
        policy=name, p50=percentile(s.ttfts, 0.5), p95=p95, p99=p99,
        alone=p95 / percentile(ref, 0.95), alone99=p99 / percentile(ref, 0.99),
        better=percentile(direct.ttfts, 0.95) / p95, tokens=s.tokens / direct.tokens,
        even=_mean(s.evens), behind=max(s.behinds), ratio=_mean(s.ratios),
        ratio_min=min(s.ratios, default=math.nan), ratio_max=max(s.ratios, default=math.nan),
        jain=min(s.jains, default=math.nan), share=max(s.shares, default=math.nan),
        rest=_mean(s.rests), idle=_mean(s.idles), hits=_mean(s.hits), uneven=max(s.unevens),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
