"""One user sends everything at once, another one request a second: who waits how long."""

import asyncio
import urllib.request
from collections import Counter
from random import Random
from time import monotonic

import msgspec

from bench.client import Answer, Client, Gone
from bench.load import Goal, body
from bench.report import percentile

WEIGHT_OUT = 2.0
"""An output token counts as two input tokens, as in the cost that users are charged."""
SAMPLE_S = 0.25
LIMIT_S = 600.0
HEAVY_IN, HEAVY_OUT = 512, (64, 448)
LIGHT_IN, LIGHT_OUT = 256, 128
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Sample(msgspec.Struct, frozen=True):
    """An engine's numbers, `at` seconds after the flood began."""

    at: float
    waiting: float
    running: float
    tokens: float
    """Weighted tokens so far."""


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
        before = self.samples[0]
        for sample in self.samples:
            if sample.at >= until:
                part = (until - before.at) / max(sample.at - before.at, 1e-9)
                made = before.tokens + part * (sample.tokens - before.tokens)
                return made - self.samples[0].tokens
            before = sample
        return before.tokens - self.samples[0].tokens

    def waiting(self, until: float) -> float:
        """p95 of the requests waiting in the engine, after the first second."""
        return percentile((s.waiting for s in self.samples if 1.0 <= s.at < until), 0.95)


class Contest:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = monotonic()
        self._random = Random(7)
        self._heavy: list[Client] = []
        self._light: list[Client] = []
        self._answers: list[Answer] = []
        self._waits: list[tuple[float, float]] = []
        self._failed: Counter[str] = Counter()
        self._samples: list[Sample] = []

    async def run(self) -> Seen:
        """Until every request is answered. Raises TimeoutError after LIMIT_S."""
        plan = self._plan
        try:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                asked = [group.create_task(self._ask_heavy(n)) for n in range(plan.requests)]
                while not self._over(asked[: plan.requests]):
                    asked.append(group.create_task(self._ask_light(len(self._light))))
                    await asyncio.sleep(plan.every_s)
                await asyncio.wait(asked)
                watch.cancel()
        finally:
            for client in (*self._heavy, *self._light):
                client.close()
        admitted = max((a.first for a in self._answers), default=self._began) - self._began
        return Seen(self._waits, admitted, len(self._answers), dict(self._failed), self._samples)

    def _over(self, heavy: "list[asyncio.Task[None]]") -> bool:
        """Whether all of the flood has begun, or failed; alone, whether the time is over."""
        if not heavy:
            return monotonic() >= self._began + self._plan.alone_s
        return all(task.done() for task in heavy) or (
            len(self._heavy) == len(heavy)
            and all(
                client.has_begun or task.done()
                for client, task in zip(self._heavy, heavy, strict=True)
            )
        )

    async def _ask_heavy(self, n: int) -> None:
        goal, tokens = self._plan.heavy, self._random.randint(*HEAVY_OUT)
        client = Client(goal.target)
        self._heavy.append(client)
        if answer := await self._ask(client, goal, HEAVY_IN, tokens, n, "heavy"):
            self._answers.append(answer)

    async def _ask_light(self, n: int) -> None:
        goal = self._plan.light
        client = Client(goal.target)
        self._light.append(client)
        if answer := await self._ask(client, goal, LIGHT_IN, LIGHT_OUT, 1_000_000 + n, "light"):
            self._waits.append((answer.sent - self._began, answer.first_s))

    async def _ask(
        self, client: Client, goal: Goal, size: int, tokens: int, seed: int, user: str
    ) -> Answer | None:
        """The answer to one streamed request; None, and counted, where there is no good one."""
        plan = self._plan
        asked = body(
            plan.model, stream=True, tokens=tokens, prompt_tokens=size, seed=seed,
            user=user if plan.users else "", exact=plan.exact,
        )  # fmt: skip
        try:
            answer = await client.ask(goal.target.request(asked, goal.key))
        except (Gone, OSError) as e:
            self._failed[str(e)] += 1
            return None
        finally:
            client.close()
        if answer.status == 200 and answer.first:
            return answer
        self._failed[f"status {answer.status}, {answer.events} events"] += 1
        return None

    async def _watch(self) -> None:
        while self._plan.engine:
            page = await asyncio.to_thread(read_metrics, self._plan.engine)
            self._samples.append(
                Sample(
                    monotonic() - self._began,
                    page["vllm:num_requests_waiting"],
                    page["vllm:num_requests_running"],
                    page["vllm:prompt_tokens_total"]
                    + WEIGHT_OUT * page["vllm:generation_tokens_total"],
                )
            )
            await asyncio.sleep(SAMPLE_S)


def read_metrics(url: str) -> dict[str, float]:
    """The samples of a page by name, labels added up."""
    found: dict[str, float] = {}
    with _opener.open(url + "/metrics", timeout=5.0) as response:
        for line in response.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found
