"""Numbers that tell whether a run was fair, and the oracle that knows what would have been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sim.fairness.jobs import INPUT_WEIGHT, Arrival, Job, Result
from sim.settings import EngineSettings


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of them do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has everything; NaN of none."""
    squares = len(values) * sum(v * v for v in values)
    return sum(values) ** 2 / squares if squares else math.nan


def fair_share(
    demand: Mapping[str, float], capacity: float, weights: Mapping[str, float]
) -> dict[str, float]:
    """The max-min fair division of a capacity: water rises in proportion to the weights, and who
    is content takes no more."""
    share: dict[str, float] = {}
    left = dict(demand)
    while left:
        total = sum(weights.get(u, 1.0) for u in left)
        level = {u: capacity * weights.get(u, 1.0) / total for u in left}
        content = {u: d for u, d in left.items() if d <= level[u]}
        if not content:
            return share | level
        share |= content
        capacity -= sum(content.values())
        left = {u: d for u, d in left.items() if u not in content}
    return share


def ideal(result: Result, weights: Mapping[str, float]) -> list[dict[str, float]]:
    """What each user would have got by each sample if, between samples, the service that was given
    in all had been divided max-min fair among those who had work left: a fluid that any engine can
    only follow job by job.

    Service counts when it is given, and a job's work from its arrival on.
    """
    arrivals = sorted((j.arrival for j in result.jobs), key=lambda a: a.at)
    got: dict[str, float] = {a.user: 0.0 for a in arrivals}
    asked = dict(got)
    due, before = 0, 0.0
    out: list[dict[str, float]] = []
    for sample in result.samples:
        while due < len(arrivals) and arrivals[due].at < sample.at:
            asked[arrivals[due].user] += arrivals[due].work
            due += 1
        total = sum(sample.served.values())
        want = {u: w - got[u] for u, w in asked.items() if w > got[u]}
        for user, amount in fair_share(want, total - before, weights).items():
            got[user] += amount
        before = total
        out.append(dict(got))
    return out


def behind(result: Result, weights: Mapping[str, float], until: float = math.inf) -> float:
    """The most weighted tokens that any user was ever behind the ideal, up to a time."""
    pairs = zip(result.samples, ideal(result, weights), strict=True)
    return max(
        (fair[u] - sample.served.get(u, 0.0) for sample, fair in pairs if sample.at <= until
         for u in fair),
        default=0.0,
    )  # fmt: skip


def weights_of(arrivals: Sequence[Arrival], interactive: float = 1.0) -> dict[str, float]:
    """Each user's weight; of those who ask as interactive times `interactive`."""
    return {a.user: a.weight * (interactive if a.cls == "interactive" else 1.0) for a in arrivals}


def speed(job: Job, engine: EngineSettings) -> float:
    """How fast a job was done compared with an empty engine, 0 to 1; 0 if it was not done."""
    if job.ended is None:
        return 0.0
    a = job.arrival
    step = engine.step_ms / 1e3 + engine.per_seq_us / 1e6
    alone = a.output * step + a.input / engine.prefill_tokens_per_s
    return min(1.0, alone / (job.ended - a.at))


def even_speed(result: Result, engine: EngineSettings) -> float:
    """Jain's index over the users' mean speeds."""
    users: dict[str, list[float]] = {}
    for job in result.jobs:
        users.setdefault(job.arrival.user, []).append(speed(job, engine))
    return jain([sum(v) / len(v) for v in users.values()])


def hits(result: Result) -> float:
    """The share of all input that the engines had computed before."""
    read = sum(j.arrival.input for j in result.jobs if j.first is not None)
    return sum(j.cached for j in result.jobs) / read if read else 0.0


def uneven(result: Result, engines: int) -> float:
    """The most weighted tokens that an engine computed, by the mean of all; 1 where all did the
    same."""
    done = [0.0] * engines
    for j in result.jobs:
        if j.ended is not None:
            done[j.engine] += j.arrival.work - INPUT_WEIGHT * j.cached
    return max(done) * engines / sum(done) if any(done) else 1.0
