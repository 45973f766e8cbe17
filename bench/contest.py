"""One user sends everything at once, another one request a second: who waits how long."""

import asyncio
from random import Random

import msgspec

from bench.crowd import Ask, Crowd, Sample, Sent, made
from bench.load import Goal
from bench.report import percentile

LIMIT_S = 600.0
HEAVY_IN, HEAVY_OUT = 512, (64, 448)
LIGHT_IN, LIGHT_OUT = 256, 128
HEAVY, LIGHT = "heavy", "light"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks what."""

    model: str
    heavy: Goal
    light: Goal
    requests: int = 300
    """The heavy user's, at once; 0: the light user is alone."""
    every_s: float = 1.0
    """Pause between the light user's requests."""
    alone_s: float = 15.0
    """So long the light user asks where there is no flood; else until all of it has begun."""
    users: bool = False
    """Name the users in the body, for a server without keys."""
    exact: bool = True
    engine: str = ""
    """URL of the engine whose metrics are read."""


class Seen(msgspec.Struct, frozen=True):
    """What happened; times are seconds since the beginning."""

    light: list[tuple[float, float]]
    """(sent, time to the first token) of each of the light user's requests."""
    admitted: float
    """When the last of the flood had its first token: there was a queue until then."""
    answered: int
    """The heavy user's requests that were answered."""
    failed: dict[str, int]
    """Requests of both without a good answer, by what came instead."""
    samples: list[Sample]

    def first_tokens(self, until: float) -> list[float]:
        """The light user's times to the first token, of requests sent before `until`."""
        return [took for sent, took in self.light if sent < until]

    def tokens(self, until: float) -> float:
        """Weighted tokens that the engine has computed by then, between two samples in line."""
        return made(self.samples, until)

    def waiting(self, until: float) -> float:
        """p95 of the requests waiting in the engine, after the first second."""
        return percentile((s.waiting for s in self.samples if 1.0 <= s.at < until), 0.95)


class Contest:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._crowd = Crowd(
            plan.model, {HEAVY: [plan.heavy], LIGHT: [plan.light]}, named=plan.users,
            exact=plan.exact, engine=plan.engine,
        )  # fmt: skip
        random = Random(7)
        self._flood = [
            Ask(HEAVY, HEAVY_IN, random.randint(*HEAVY_OUT)) for _ in range(plan.requests)
        ]

    async def run(self) -> Seen:
        """Until every request is answered. Raises TimeoutError after LIMIT_S."""
        plan, crowd = self._plan, self._crowd
        try:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
                watch = group.create_task(crowd.watch())
                asked = [group.create_task(crowd.many(self._flood))]
                while not self._over():
                    asked.append(group.create_task(crowd.ask(Ask(LIGHT, LIGHT_IN, LIGHT_OUT))))
                    await asyncio.sleep(plan.every_s)
                await asyncio.wait(asked)
                watch.cancel()
        finally:
            crowd.close()
        heavy = [(s.at, s.first_s) for s in self._of(HEAVY) if s.first_s is not None]
        return Seen(
            light=[(s.at, s.first_s) for s in self._of(LIGHT) if s.first_s is not None],
            admitted=max((at + took for at, took in heavy), default=0.0),
            answered=len(heavy),
            failed=dict(crowd.failed),
            samples=crowd.samples,
        )

    def _of(self, user: str) -> list[Sent]:
        return [s for s in self._crowd.sent if s.ask.user == user]

    def _over(self) -> bool:
        """Whether all of the flood has begun, or failed; alone, whether the time is over."""
        if not self._flood:
            return self._crowd.now() >= self._plan.alone_s
        heavy = self._of(HEAVY)
        return len(heavy) == len(self._flood) and all(s.begun for s in heavy)
