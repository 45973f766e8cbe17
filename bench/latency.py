"""Part `latency`: what one request at a time pays for the way through Fairlane."""

import asyncio
from collections.abc import Callable

from bench.client import Answer, Client, Target
from bench.fleet import MODEL, Cores, fleet, key, simulated
from bench.load import Goal, body, checked
from bench.report import Budget, Figure, Part, percentile
from sim.settings import EngineSettings

STEP_MS = 1.0
SLOTS = 64
WARM = 50
TITLE = "one request at a time on warm connections"


async def measure(cores: Cores, *, quick: bool) -> Part:
    """Requests by turns direct and through Fairlane, so that the machine's moods hit both."""
    n = 60 if quick else 1_000
    settings = EngineSettings(max_num_seqs=SLOTS, step_ms=STEP_MS)
    with simulated(cores, settings) as engine:
        async with fleet(cores, [engine.url], SLOTS) as through:
            goals = [Goal(Target.of(engine.url)), Goal(through.target, key(0))]
            streams = await pairs(goals, body(MODEL, stream=True, tokens=2), n)
            whole = await pairs(goals, body(MODEL, stream=False, tokens=2), n // 2)
    figures = [
        added("added time to first byte, p50", streams, first, 0.50, Budget(2.0, 1.2)),
        added("added time to first byte, p99", streams, first, 0.99, Budget(5.0, 2.5)),
        added("added time, not streamed, p50", whole, total, 0.50),
        added("added time, not streamed, p99", whole, total, 0.99),
    ]
    return Part(
        name="latency",
        title=f"{TITLE}, {n} streamed and {n // 2} not, 2 tokens each",
        figures=figures,
        notes=["p99: the difference of the two p99s, not the p99 of differences"],
    )


async def pairs(goals: list[Goal], request: bytes, n: int) -> list[list[Answer]]:
    """Ask each goal `n` times, by turns; the answers of each."""
    clients = [Client(goal.target) for goal in goals]
    asked = [goal.target.request(request, goal.key) for goal in goals]
    answers: list[list[Answer]] = [[] for _ in goals]
    try:
        async with asyncio.timeout(60 + n * 0.2):
            for turn in range(WARM + n):
                for i, client in enumerate(clients):
                    answer = checked(await client.ask(asked[i]))
                    if turn >= WARM:
                        answers[i].append(answer)
    finally:
        for client in clients:
            client.close()
    return answers


def first(answer: Answer) -> float:
    """Seconds to the first event."""
    return answer.first_s


def total(answer: Answer) -> float:
    """Seconds to the end."""
    return answer.whole_s


def added(
    name: str,
    answers: list[list[Answer]],
    what: Callable[[Answer], float],
    share: float,
    budget: Budget | None = None,
) -> Figure:
    """The difference of a percentile, in milliseconds."""
    direct, through = (1_000 * percentile(map(what, side), share) for side in answers)
    return Figure(
        name=name, unit="ms", value=through - direct, direct=direct, through=through, budget=budget
    )
