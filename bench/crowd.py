"""Requests of several users at one server, and what each of them gets while it is looked at."""

import asyncio
import contextlib
import math
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic

import msgspec

from bench.client import Answer, Client, Gone
from bench.load import Goal, body

WEIGHT_OUT = 2.0
"""An output token counts as two input tokens, as in the cost that users are charged."""
SAMPLE_S = 0.25
GENERATED = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Ask(msgspec.Struct, frozen=True):
    """One request: so many tokens in and out."""

    user: str
    input: int
    output: int
    at: float = 0.0
    """Not before so many seconds after the beginning."""


class Sent(msgspec.Struct):
    """A request and what has come of it so far."""

    ask: Ask
    client: Client
    at: float
    """When it was sent, in seconds since the beginning."""
    ended: bool = False

    @property
    def answer(self) -> Answer | None:
        """Its good answer, once there is a first token."""
        answer = self.client.connection.answer if self.client.connection is not None else None
        return answer if answer is not None and answer.first and answer.status == 200 else None

    @property
    def first_s(self) -> float | None:
        """Time to the first token; None: there is none (yet)."""
        return self.answer.first_s if self.answer is not None else None

    @property
    def begun(self) -> bool:
        """Whether its first token is there, or nothing more will come."""
        return self.ended or self.answer is not None

    def work(self) -> float:
        """Weighted tokens that have reached its client: input counts with the first token."""
        if self.answer is None:
            return 0.0
        # The first event names the role; behind the last token come up to two more.
        tokens = min(self.ask.output, max(0, self.answer.events - 1))
        return self.ask.input + WEIGHT_OUT * tokens


class Sample(msgspec.Struct, frozen=True):
    """The state, `at` seconds after the beginning."""

    at: float
    waiting: float
    running: float
    tokens: float
    """Weighted tokens that the engine has computed; where it does not say, that came from it."""
    served: dict[str, float] = {}
    """Weighted tokens that have reached each user."""


class Crowd:
    """All requests of one run; what has been sent stays known until it is closed."""

    def __init__(
        self,
        model: str,
        goals: Mapping[str, Sequence[Goal]],
        *,
        named: bool = False,
        exact: bool = True,
        engine: str = "",
    ) -> None:
        """A user's requests go to its goals by turns. `named`: the body says who asks. `engine` is
        the URL of the engine whose metrics are read."""
        self.sent: list[Sent] = []
        self.failed: Counter[str] = Counter()
        """Requests without a good answer, by what came instead."""
        self.samples: list[Sample] = []
        self._model = model
        self._goals = goals
        self._named = named
        self._exact = exact
        self._engine = engine
        self._began = monotonic()
        self._turns: Counter[str] = Counter()
        self._open: dict[str, list[Sent]] = {user: [] for user in goals}
        self._done: dict[str, float] = dict.fromkeys(goals, 0.0)

    def now(self) -> float:
        """Seconds since the beginning."""
        return monotonic() - self._began

    def served(self) -> dict[str, float]:
        """Weighted tokens that have reached each user so far."""
        return {u: self._done[u] + sum(s.work() for s in sent) for u, sent in self._open.items()}

    async def ask(self, ask: Ask) -> None:
        """One request, when its time has come; returns when its answer is over."""
        if (wait := ask.at - self.now()) > 0:
            await asyncio.sleep(wait)
        goals = self._goals[ask.user]
        goal = goals[self._turns[ask.user] % len(goals)]
        self._turns[ask.user] += 1
        asked = body(
            self._model, stream=True, tokens=ask.output, prompt_tokens=ask.input,
            seed=len(self.sent), user=ask.user if self._named else "", exact=self._exact,
        )  # fmt: skip
        client = Client(goal.target)
        sent = Sent(ask, client, self.now())
        self.sent.append(sent)
        self._open[ask.user].append(sent)
        try:
            await self._follow(sent, goal.target.request(asked, goal.key))
        finally:
            self._done[ask.user] += sent.work()
            self._open[ask.user].remove(sent)
            client.close()

    async def _follow(self, sent: Sent, request: bytes) -> None:
        try:
            answer = await sent.client.ask(request)
        except (Gone, OSError) as e:
            self.failed[str(e)] += 1
        else:
            if sent.answer is None:
                self.failed[f"status {answer.status}, {answer.events} events"] += 1
        finally:
            sent.ended = True

    async def many(self, asks: Iterable[Ask], at_once: int | None = None) -> None:
        """All of these, or so many at a time in their order."""
        rest = iter(asks)

        async def one_by_one() -> None:
            for ask in rest:
                await self.ask(ask)

        async with asyncio.TaskGroup() as group:
            if at_once is None:
                for ask in rest:
                    group.create_task(self.ask(ask))
            else:
                for _ in range(at_once):
                    group.create_task(one_by_one())

    async def watch(self) -> None:
        """Take samples for ever; none while an engine that should have metrics has none."""
        while True:
            page = await asyncio.to_thread(read_metrics, self._engine) if self._engine else {}
            if not self._engine or GENERATED in page:
                self.samples.append(self._sample(page))
            await asyncio.sleep(SAMPLE_S)

    def _sample(self, page: Mapping[str, float]) -> Sample:
        served = self.served()
        tokens = sum(served.values())
        if page:
            tokens = page["vllm:prompt_tokens_total"] + WEIGHT_OUT * page[GENERATED]
        return Sample(
            at=self.now(),
            waiting=page.get("vllm:num_requests_waiting", math.nan),
            running=page.get(RUNNING, math.nan),
            tokens=tokens,
            served=served,
        )

    def close(self) -> None:
        """Cut all connections."""
        for sent in self.sent:
            sent.client.close()


def read_metrics(url: str) -> dict[str, float]:
    """The samples of an engine's page by name, labels added up; nothing where there is no page."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), _opener.open(url + "/metrics", timeout=5.0) as response:
        for line in response.read().decode().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found


def made(samples: Sequence[Sample], until: float) -> float:
    """Weighted tokens computed from the first sample up to `until`, between two in line."""
    before = samples[0]
    for sample in samples:
        if sample.at >= until:
            part = (until - before.at) / max(sample.at - before.at, 1e-9)
            return before.tokens + part * (sample.tokens - before.tokens) - samples[0].tokens
        before = sample
    return before.tokens - samples[0].tokens
