"""The flood of `bench.vllm_pair`: a heavy user's requests at once, those of light ones by turns."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx
import msgspec

from bench.vllm_asks import USAGE, WORDS, chat
from bench.vllm_engine import ANSWER_S

HEAVY_OUT = (32, 160)
LIGHT_OUT = 16
TURNS_MAX = 10_000
LIGHT = tuple(f"light{n}" for n in range(20))
_GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.M)
_BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.M)
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


class Plan(msgspec.Struct, frozen=True):
    """How much is asked."""

    heavy: int
    """Requests of the heavy user, all at once."""
    light_every_s: float = 0.5
    """Seconds between requests of the light users, while the heavy one's are open. Who has one
    open leaves its turn out."""
    light_alone: int = 0
    """So many of the light users where the heavy one asks nothing."""

    def alone(self) -> "Plan":
        """The light users' part alone."""
        return Plan(heavy=0, light_every_s=self.light_every_s, light_alone=40)

    endless: bool = False
    """The heavy user sends another for each that ends, until it has `enough`."""

    def without_end(self) -> "Plan":
        """For as long as an engine takes to end and to start again."""
        return msgspec.structs.replace(self, endless=True)


class Got(msgspec.Struct):
    """One answer."""

    asked: int
    """Output tokens."""
    first_s: float = 0.0
    """From sending to the first event."""
    flaw: str = "open"
    """What is wrong with it; empty: nothing."""


class Flood:
    """One run of a plan against `goals`, by turns; `engines` are those whose pages are read."""

    def __init__(self, goals: Sequence[str], engines: Sequence[str], plan: Plan) -> None:
        self.heavy: list[Got] = []
        self.light: list[Got] = []
        self.enough = False
        self.tokens_per_s = 0.0
        """Of all engines, while the heavy user's requests were open."""
        self._goals = itertools.cycle(goals)
        self._engines = engines
        self._plan = plan
        self._random = Random(plan.heavy)

    @property
    def all(self) -> list[Got]:
        """Every answer, also those that are not there yet."""
        return [*self.heavy, *self.light]

    @property
    def begun(self) -> int:
        """Answers of the heavy user whose first event came."""
        return sum(got.first_s > 0 for got in self.heavy)

    @property
    def open(self) -> int:
        """Answers of the heavy user that are not at their end."""
        return sum(got.flaw == "open" for got in self.heavy)

    async def run(self) -> None:
        """Until the heavy user has all answers, and the light ones those they asked for."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        began = asyncio.get_running_loop().time()
        before = await self._made()
        async with (
            httpx.AsyncClient(timeout=8 * ANSWER_S, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            heavy = [group.create_task(self._heavy(http)) for _ in range(self._plan.heavy)]
            light = group.create_task(self._lights(http, group))
            if heavy:
                await asyncio.wait(heavy)
                seconds = asyncio.get_running_loop().time() - began
                self.tokens_per_s = (await self._made() - before) / seconds
                light.cancel()

    async def _heavy(self, http: httpx.AsyncClient) -> None:
        await self._ask(http, "heavy", self._random.randint(*HEAVY_OUT))
        while self._plan.endless and not self.enough:
            await self._ask(http, "heavy", self._random.randint(*HEAVY_OUT))

    async def _lights(self, http: httpx.AsyncClient, group: asyncio.TaskGroup) -> None:
        asking: dict[str, asyncio.Task[None]] = {}
        for user in itertools.islice(itertools.cycle(LIGHT), self._plan.light_alone or TURNS_MAX):
            if user not in asking or asking[user].done():
                asking[user] = group.create_task(self._ask(http, user, LIGHT_OUT))
            await asyncio.sleep(self._plan.light_every_s)

    async def _ask(self, http: httpx.AsyncClient, user: str, tokens: int) -> None:
        got = Got(tokens)
        (self.heavy if user == "heavy" else self.light).append(got)
        text = " ".join(self._random.choices(WORDS.split(), k=40))
        _, body = chat(text, tokens, **USAGE)
        try:
            await self._stream(http, next(self._goals), user, body, got)
        except httpx.HTTPError as e:
            got.flaw = repr(e)

    async def _stream(
        self, http: httpx.AsyncClient, goal: str, user: str, body: dict[str, Any], got: Got
    ) -> None:
        now = asyncio.get_running_loop().time
        sent, data = now(), b""
        headers = {"authorization": f"Bearer sk-{user}"}
        url = f"{goal}/v1/chat/completions"
        async with http.stream("POST", url, json=body, headers=headers) as response:
            async for piece in response.aiter_raw():
                data += piece
                if not got.first_s and (data.startswith(b"data: ") or b"\ndata: " in data):
                    got.first_s = now() - sent
            got.flaw = _flaw(response.status_code, data, got.asked)

    async def _page(self, n: int) -> str:
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            return (await http.get(f"{self._engines[n]}/metrics")).text

    async def generated(self, n: int) -> int:
        """Output tokens that an engine has made since its start."""
        return int(sum(map(float, _GENERATED.findall(await self._page(n)))))

    async def empty(self, n: int) -> bool:
        """Whether nothing runs or waits in an engine."""
        return not any(map(float, _BUSY.findall(await self._page(n))))

    async def _made(self) -> int:
        made = 0
        for n in range(len(self._engines)):
            with contextlib.suppress(httpx.HTTPError):
                made += await self.generated(n)
        return made


def _flaw(status: int, data: bytes, asked: int) -> str:
    """What is wrong with an answer: it must be whole and have as many tokens as were asked for."""
    if status != 200:
        return f"status {status}: {data[:200]!r}"
    if b'"error"' in data or not data.rstrip().endswith(b"data: [DONE]"):
        return f"ends with {data[-200:]!r}"
    usage = _USAGE.findall(data)
    if not usage or int(usage[-1]) != asked:
        return f"{usage[-1:]} tokens of {asked}"
    return ""
