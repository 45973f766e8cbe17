"""Parts `short` and `streams`: how much goes through one gateway and one dispatcher."""

import asyncio
from collections.abc import Sequence
from time import monotonic

from bench.client import Target
from bench.engine import Engine
from bench.fleet import MODEL, Cores, Fleet, engines, fleet, key
from bench.load import Goal, Meter, Rate, between, body, closed_loop, open_requests, until
from bench.report import Budget, Figure, Part

ENGINES = 4
"""Admission lets 3 requests wait at each, so one alone would be the limit of short requests."""
SLOTS = 1_000
CONNECTIONS = 64
SHORT_STEP_S = 0.001
STREAM_STEP_S = 0.010
BEGIN_STEP_S = 0.050
"""The pace until every stream has begun, so that those which have leave room for the others."""
SHORT_TOKENS = 2
LONG_TOKENS = 1_000_000
STREAM_BUDGETS = {
    200: Budget(15_000, 17_000, more_is_better=True),
    500: Budget(25_000, 35_000, more_is_better=True),
}


def direct_goals(made: Sequence[Engine], n: int) -> list[Goal]:
    """`n` goals, the engines by turns."""
    return [Goal(Target.of(made[i % len(made)].url)) for i in range(n)]


def through_goals(through: Fleet, n: int) -> list[Goal]:
    """`n` goals, the users by turns."""
    return [Goal(through.target, key(i)) for i in range(n)]


async def measure_short(cores: Cores, *, quick: bool) -> Part:
    """A closed loop of short streamed requests."""
    warm, seconds = (0.5, 1.5) if quick else (2.0, 10.0)
    request = body(MODEL, stream=True, tokens=SHORT_TOKENS)
    async with engines(ENGINES, SHORT_STEP_S) as made:
        direct = await closed_loop(
            direct_goals(made, CONNECTIONS), request, warm_s=warm, measure_s=seconds
        )
        async with fleet(cores, [e.url for e in made], SLOTS) as through:
            rate = await closed_loop(
                through_goals(through, CONNECTIONS), request, warm_s=warm, measure_s=seconds,
                meter=through.cpu,
            )  # fmt: skip
    figure = Figure(
        name="short requests",
        unit="/s",
        value=rate.per_s,
        direct=direct.per_s,
        through=rate.per_s,
        budget=Budget(1_200, 2_500, more_is_better=True),
    )
    return Part(
        name="short",
        title=f"closed loop of {CONNECTIONS} connections, {SHORT_TOKENS} tokens streamed",
        figures=[figure],
        notes=[f"CPU a request: {rate.spent()}"],
    )


async def measure_streams(cores: Cores, *, quick: bool) -> Part:
    """Streams that are all under way, each offered one token a step."""
    counts = (50, 100) if quick else (200, 500)
    warm, seconds = (0.5, 1.5) if quick else (3.0, 10.0)
    figures, notes = [], []
    for n in counts:
        async with engines(ENGINES, STREAM_STEP_S) as made:
            direct = await streamed(made, direct_goals(made, n), warm, seconds)
            async with fleet(cores, [e.url for e in made], SLOTS) as through:
                goals = through_goals(through, n)
                rate = await streamed(made, goals, warm, seconds, through.cpu)
        figures.append(
            Figure(
                name=f"streamed tokens at {n} streams",
                unit="/s",
                value=rate.per_s,
                direct=direct.per_s,
                through=rate.per_s,
                budget=STREAM_BUDGETS.get(n),
            )
        )
        notes.append(
            f"{n} streams: offered {n / STREAM_STEP_S:,.0f}/s; CPU a token: {rate.spent()}"
        )
    return Part(name="streams", title="all streams under way, long answers",
                figures=figures, notes=notes)  # fmt: skip


async def streamed(
    made: Sequence[Engine],
    goals: list[Goal],
    warm_s: float,
    measure_s: float,
    meter: Meter = dict,
) -> Rate:
    """Events a second over all streams, once every one of them has begun."""
    for engine in made:
        engine.step_s = BEGIN_STEP_S
    request = body(MODEL, stream=True, tokens=LONG_TOKENS)
    async with open_requests(goals, request) as connections:
        await until(lambda: all(c.events for c in connections), 60, "a first event of each stream")
        for engine in made:
            engine.step_s = STREAM_STEP_S
        await asyncio.sleep(warm_s)
        before, began, cpu = sum(c.events for c in connections), monotonic(), meter()
        await asyncio.sleep(measure_s)
        count = sum(c.events for c in connections) - before
        return Rate(count, monotonic() - began, between(cpu, meter()))
