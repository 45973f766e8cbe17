"""Part `memory`: what a process, a stream and a waiting job hold."""

import asyncio
from typing import Any

import redis

from bench.fleet import MODEL, Cores, Fleet, engines, fleet
from bench.load import between, body, open_requests, until
from bench.report import Budget, Figure, Part
from bench.throughput import ENGINES, LONG_TOKENS, SLOTS, through_goals
from common.keys import ModelKeys

STEP_S = 0.1
"""Ten tokens a second and stream: nothing lags, so buffers hold what they must."""
MB, KB = 1e6, 1e3
SETTLE_S = 3.0


async def measure(cores: Cores, *, quick: bool) -> Part:
    """Resident memory as the system counts it; a job in Redis by Redis's own count."""
    counts, jobs = ((20, 50), 200) if quick else ((200, 500), 5_000)
    figures = [*await streams(cores, counts, quick), *await waiting(cores, jobs)]
    return Part(
        name="memory",
        title="resident memory",
        figures=figures,
        notes=["a stream: growth since rest, so what the first requests load counts against it"],
    )


def resident(through: Fleet) -> dict[str, float]:
    """Bytes held by each process."""
    return {"gateway": through.gateway.rss(), "dispatcher": through.dispatcher.rss()}


async def streams(cores: Cores, counts: tuple[int, ...], quick: bool) -> list[Figure]:
    """Processes at rest, then with so many streams under way."""
    request = body(MODEL, stream=True, tokens=LONG_TOKENS)
    figures = []
    async with (
        engines(ENGINES, STEP_S) as made,
        fleet(cores, [e.url for e in made], SLOTS) as through,
    ):
        rest = resident(through)
        for name, held in rest.items():
            figures.append(
                Figure(name=f"{name} at rest", unit="MB", value=held / MB,
                       budget=Budget(80, 50))
            )  # fmt: skip
        for n in counts:
            async with open_requests(through_goals(through, n), request) as connections:
                await until(lambda c=connections: all(x.events for x in c), 60, "all begin")  # type: ignore[misc]
                await asyncio.sleep(0.5 if quick else SETTLE_S)
                grown = between(rest, resident(through))
            figures.append(
                Figure(name=f"a stream, gateway and dispatcher, of {n}", unit="KB",
                       value=sum(grown.values()) / n / KB, budget=Budget(40))
            )  # fmt: skip
            for name, held in grown.items():
                figures.append(Figure(name=f"of it in the {name}", unit="KB", value=held / n / KB))
    return figures


async def waiting(cores: Cores, jobs: int) -> list[Figure]:
    """Jobs that wait because the one engine is full."""
    request = body(MODEL, stream=True, tokens=LONG_TOKENS)
    async with engines(1, STEP_S) as made, fleet(cores, [made[0].url], 1) as through:
        client = redis.Redis.from_url(through.redis.url)
        goals = through_goals(through, jobs)
        async with open_requests(goals[: jobs // 10], request):
            await until(lambda: waits(client) > 0, 60, "the queue fills")
        await until(lambda: waits(client) == 0, 60, "the queue is empty again")
        before, held = used_memory(client), through.gateway.rss()
        async with open_requests(goals, request):
            await until(lambda: waits(client) >= jobs - 8, 120, f"{jobs} jobs wait")
            count = waits(client)
            stored = (used_memory(client) - before) / count - len(request)
            grown = (through.gateway.rss() - held) / count
        client.close()
    return [
        Figure(name=f"a waiting job in Redis beyond its body, of {jobs}", unit="KB",
               value=stored / KB, budget=Budget(2)),
        Figure(name="the same in the gateway, its connection included", unit="KB",
               value=grown / KB),
    ]  # fmt: skip


def waits(client: "redis.Redis") -> int:
    """Jobs waiting in Redis."""
    found: Any = client.zcard(ModelKeys(MODEL).deadlines)
    return int(found or 0)


def used_memory(client: "redis.Redis") -> int:
    """Bytes that Redis has allocated."""
    found: Any = client.info("memory")
    return int(found["used_memory"])
