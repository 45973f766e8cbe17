"""Kinds of load: bodies, closed loops, open streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import msgspec

from bench.client import Answer, Client, Connection, Gone, Target, connect


class Refused(Exception):
    """An answer was not 200, so that a figure would be of nothing."""


class Goal(msgspec.Struct, frozen=True):
    """Whom to ask, and with whose key."""

    target: Target
    key: str = ""


def body(
    model: str,
    *,
    stream: bool,
    tokens: int,
    prompt_tokens: int = 8,
    seed: int = 0,
    user: str = "",
    exact: bool = True,
) -> bytes:
    """A chat of about so many tokens in, and so many out; `seed` makes prompts differ.

    `exact` asks for all of them with a field that vLLM knows and OpenAI's own service refuses.
    """
    text = f"{seed:08d}" + " and" * max(0, prompt_tokens - 2)
    asked: dict[str, object] = {
        "model": model,
        "stream": stream,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
    }
    if exact:
        asked["ignore_eos"] = True
    if user:
        asked["user"] = user
    return msgspec.json.encode(asked)


def checked(answer: Answer) -> Answer:
    """The answer, if it is a good one. Raises Refused."""
    if answer.status != 200 or not answer.first:
        raise Refused(f"status {answer.status}, {answer.events} events")
    return answer


class Rate(msgspec.Struct, frozen=True):
    """What came in a time."""

    count: int
    seconds: float
    cpu: dict[str, float] = {}
    """CPU seconds of each process in that time."""

    @property
    def per_s(self) -> float:
        """Things a second."""
        return self.count / self.seconds

    def spent(self) -> str:
        """CPU time of each process for one thing."""
        if not self.count:
            return "nothing came"
        return ", ".join(f"{n} {1e6 * s / self.count:.0f} µs" for n, s in self.cpu.items())


Meter = Callable[[], dict[str, float]]
"""Tells the CPU seconds that each process has used."""


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was used meanwhile."""
    return {name: after[name] - before[name] for name in before}


async def closed_loop(
    goals: Sequence[Goal], request: bytes, *, warm_s: float, measure_s: float, meter: Meter = dict
) -> Rate:
    """One request after another on a connection for each goal; answers counted after `warm_s`."""
    begin = monotonic() + warm_s
    end = begin + measure_s
    counted = 0

    async def run(goal: Goal) -> None:
        nonlocal counted
        client = Client(goal.target)
        asked = goal.target.request(request, goal.key)
        try:
            while monotonic() < end:
                answer = checked(await client.ask(asked))
                counted += begin <= answer.last < end
        finally:
            client.close()

    async with asyncio.timeout(warm_s + measure_s + 60), asyncio.TaskGroup() as group:
        for goal in goals:
            group.create_task(run(goal))
        await asyncio.sleep(warm_s)
        before = meter()
        await asyncio.sleep(measure_s)
        used = between(before, meter())
    return Rate(counted, measure_s, used)


@asynccontextmanager
async def open_requests(
    goals: Sequence[Goal], request: bytes, *, at_once: int = 64
) -> AsyncIterator[list[Connection]]:
    """One request for each goal, all under way; afterwards they are cut."""
    gate = asyncio.Semaphore(at_once)
    connections: list[Connection] = []
    asking: list[asyncio.Task[Answer]] = []

    async def begin(goal: Goal) -> None:
        async with gate:
            connection = await connect(goal.target)
        connections.append(connection)
        asked = goal.target.request(request, goal.key)
        asking.append(asyncio.create_task(connection.ask(asked)))

    try:
        async with asyncio.TaskGroup() as group:
            for goal in goals:
                group.create_task(begin(goal))
        yield connections
        for task in asking:
            if task.done():
                checked(task.result())
    finally:
        for connection in connections:
            connection.close()
        for task in asking:
            task.cancel()
        with contextlib.suppress(Gone):
            await asyncio.gather(*asking, return_exceptions=True)


async def until(holds: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look every 20 ms. Raises TimeoutError with `what` in it."""
    end = monotonic() + timeout_s
    while not holds():
        if monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.02)
