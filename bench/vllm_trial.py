"""The phases of `bench.vllm`: what is sent, and what must come of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bench.vllm_asks import (
    SAME,
    USAGE,
    USERS,
    WRONG,
    chat,
    comparable,
    differs,
    flaw,
    mixed,
    official,
    openai_client,
    output,
    without_usage,
)
from bench.vllm_engine import PATHS, SLOTS, Asker, Got, Look, Report, Role, until

RUN_S = 900.0
"""The whole run, without installation and start of the engine."""
LIMIT = 3
"""Jobs that Fairlane lets wait inside the engine."""
LATE = 1
"""One more may show: the engine hears of a disconnect a little later than its place is given."""
ABORT_S = 2.0
FLOOD = 40
TRIES = 10


class Trial:
    """One run; each method is a phase."""

    def __init__(self, ask: Asker, gateway: Role, dispatcher: Role, report: Report, n: int) -> None:
        self._ask = ask
        self._gateway = gateway
        self._dispatcher = dispatcher
        self._add = report.add
        self._n = n
        self._finished = 0

    async def run(self) -> None:
        """All phases."""
        async with asyncio.timeout(RUN_S), asyncio.TaskGroup() as group:
            sampler = group.create_task(self._ask.sample())
            await self._warm()
            await self.wrong()
            await self.same()
            await self.mixed()
            await self.flood()
            await self.disconnects()
            await self.after_a_pause()
            sampler.cancel()
        self.samples()
        await self.end()

    async def _warm(self) -> None:
        """The engine's first requests of some kinds take seconds."""
        for kind, body in SAME:
            await self._ask.post(self._ask.engine, PATHS[kind], body)

    async def _both(self, kind: str, body: dict[str, Any]) -> tuple[Got, Got]:
        """The engine's own answer, asked for as Fairlane asks, and Fairlane's.

        Fairlane asks for usage with every stream and drops the event of clients who did not; vLLM
        puts its `system_fingerprint` into the last event, so it goes with it.
        """
        more = USAGE if body.get("stream") else {}
        direct = await self._ask.post(self._ask.engine, PATHS[kind], body | more)
        if "stream_options" not in body:
            direct.body = without_usage(direct.body)
        return direct, await self._ask.post(self._ask.gateway, PATHS[kind], body)

    async def wrong(self) -> None:
        """The engine's own refusals come through."""
        bad, codes = [], []
        for kind, body in WRONG:
            direct, got = await self._both(kind, body)
            codes.append(got.status)
            one, other = ((g.status, g.kind, g.body) for g in (direct, got))
            if one != other or not 400 <= got.status < 500:
                bad.append(f"{one} became {other}")
        self._add(not bad, "engine's refusals unchanged", f"{codes} {bad or ''}")

    async def same(self) -> None:
        """Answers are the engine's, byte for byte. How a stream is cut into events is chance (the
        engine merges what it has not sent), so each may be asked for again."""
        bad, size, tries = [], 0, 0
        for kind, body in SAME:
            why = ""
            for _ in range(TRIES):
                tries += 1
                direct, got = await self._both(kind, body)
                self._finished += 1
                if not (why := flaw(body, got) or differs(comparable(direct), comparable(got))):
                    break
            size += len(got.body)
            bad += [why] if why else []
        figure = f"{len(SAME) - len(bad)} of {len(SAME)}, {size} bytes, {tries} tries {bad or ''}"
        self._add(not bad, "answers byte for byte", figure)

    def _tokens(self, kind: str) -> int:
        return int(self._dispatcher.metric("fairlane_tokens", f'kind="{kind}"'))

    async def mixed(self) -> None:
        """Requests of all shapes at once, half of them by OpenAI's client."""
        asks = mixed(self._n)
        inputs = sum([await self._ask.prompt_tokens(body) for _, body in asks])
        outputs = sum(output(body) for _, body in asks)
        tokens, page = [self._tokens(k) for k in ("input", "output")], await self._ask.page()
        async with self._phase("mixed") as now, openai_client(self._gateway.url) as client:
            calls = [
                official(client, *ask) if i % 2 else self._raw(*ask) for i, ask in enumerate(asks)
            ]
            flaws = [f for f in await asyncio.gather(*calls) if f]
            took = now()
        self._finished += len(asks)
        figure = f"{len(asks) - len(flaws)} of {len(asks)} in {took:.1f} s {flaws or ''}"
        self._add(not flaws, "mixed requests, raw and OpenAI's client", figure)
        found = [self._tokens(k) - t for k, t in zip(("input", "output"), tokens, strict=True)]
        made = (await self._ask.page()).generated - page.generated
        self._add(
            found == [inputs, outputs] and made == outputs, "usage counted",
            f"input {found[0]} (tokenizer {inputs}), output {found[1]} (engine {made})",
        )  # fmt: skip

    async def _raw(self, kind: str, body: dict[str, Any]) -> str:
        return flaw(body, await self._ask.post(self._gateway.url, PATHS[kind], body, body["user"]))

    async def flood(self) -> None:
        """One user's many requests, and another's one in their midst. What is sent when is seen in
        Redis: by their first bytes, the way back to the clients would count too."""
        alone, *_ = await self._flooded(self._ask.engine)
        looks: list[Look] = []
        async with self._phase("flood"), self._ask.looks(looks):
            took, first, gots = await self._flooded(self._gateway.url)
        flaws = [f for f in (flaw(a, g) for a, g in gots) if f]
        self._finished += len(gots)
        self._add(not flaws, f"flood of {FLOOD} and one", f"all whole {flaws or ''}")
        self._add(True, "flood: time, and straight to the engine", f"{took:.2f} s, {alone:.2f} s")
        job = gots[-1][1].job
        came = next(i for i, s in enumerate(looks) if job in s.waiting | s.running)
        sent = next((i for i, s in enumerate(looks) if job in s.running), len(looks) - 1)
        between = frozenset().union(*(s.running for s in looks[came : sent + 1]))
        between -= looks[came].running | {job}
        left = len(looks[sent].waiting)
        self._add(
            len(between) <= LATE and left > 0, "the newcomer is sent next",
            f"after {len(between)} more of the flood, before {left}; {first:.2f} s to its first "
            "byte",
        )  # fmt: skip

    async def _flooded(self, base: str) -> tuple[float, float, list[tuple[dict[str, Any], Got]]]:
        """Seconds it took, seconds to the newcomer's first byte, asked and got."""
        asks = [chat(f"flood {i}", 60, stream=True)[1] for i in range(FLOOD + 1)]
        gots = [Got() for _ in asks]
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def a_third() -> bool:
            return sum(g.began > 0 for g in gots) >= FLOOD // 3

        async with asyncio.TaskGroup() as group:
            for body, got in zip(asks[:-1], gots, strict=False):
                group.create_task(self._post(body, "flooder", got, base))
            await until(a_third, "a third of the flood has begun")
            sent = loop.time()
            await self._post(asks[-1], "newcomer", gots[-1], base)
        first = gots[-1].began - sent
        return loop.time() - began, first, list(zip(asks, gots, strict=True))

    async def _post(self, body: dict[str, Any], user: str, got: Got, base: str = "") -> None:
        await self._ask.post(base or self._gateway.url, PATHS["chat"], body, user, got)

    async def disconnects(self) -> None:
        """Clients leave: waiting ones never reach the engine, running ones stop there."""
        sent, page = self._sent(), await self._ask.page()
        tokens = self._tokens("output")
        in_engine = await self._leavers(SLOTS + LIMIT, "first")
        await until(self._engine_is(SLOTS, LIMIT), "the engine is full")
        waiting = await self._leavers(5, "second")
        await until(self._queued_is(5), "five wait in Fairlane")
        took = await self._leave(waiting, self._queued_is(0))
        self._add(took < ABORT_S, "5 waiting clients leave: their jobs are gone", f"{took:.2f} s")
        took = await self._leave(in_engine, self._engine_is(0, 0))
        sent = self._sent() - sent
        self._add(sent == SLOTS + LIMIT, "none of them reached the engine", f"{sent:g} sent")
        self._add(took < ABORT_S, "4 running, 3 unstarted leave: engine empty", f"{took:.2f} s")
        made = (await self._ask.page()).generated - page.generated
        counted = self._tokens("output") - tokens
        self._add(
            0 < counted <= made + 2 * (SLOTS + LIMIT), "tokens of those who left",
            f"{counted} counted (events), {made} generated",
        )  # fmt: skip

    def _sent(self) -> float:
        metric = self._dispatcher.metric
        return metric("fairlane_popped") - metric("fairlane_requeued")

    async def _leavers(self, n: int, tag: str) -> list[asyncio.Task[None]]:
        asks = [chat(f"{tag} {i}", 1900, stream=True)[1] for i in range(n)]
        users = [USERS[i % len(USERS)] for i in range(n)]
        return [
            asyncio.create_task(self._post(body, user, Got()))
            for body, user in zip(asks, users, strict=True)
        ]

    async def _leave(
        self, clients: list[asyncio.Task[None]], seen: Callable[[], Awaitable[bool]]
    ) -> float:
        """Seconds from their leaving until it is seen."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await until(seen, "the clients' leaving shows")
        return loop.time() - began

    def _engine_is(self, running: int, waiting: int) -> Callable[[], Awaitable[bool]]:
        async def seen() -> bool:
            page = await self._ask.page()
            return (page.running, page.waiting) == (running, waiting)

        return seen

    def _queued_is(self, jobs: int) -> Callable[[], Awaitable[bool]]:
        async def seen() -> bool:
            return await self._ask.queued() == jobs

        return seen

    async def after_a_pause(self) -> None:
        """The engine closes idle connections after 5 s."""
        asks = [chat(f"pause {i}", 5)[1] for i in range(SLOTS)]
        flaws = []
        for seconds in (0.0, 4.95, 5.0, 5.05):
            await asyncio.sleep(seconds)
            gots = [Got() for _ in asks]
            await asyncio.gather(*(self._post(b, "u", g) for b, g in zip(asks, gots, strict=True)))
            flaws += [f for f in map(flaw, asks, gots) if f]
            self._finished += len(asks)
        self._add(not flaws, "requests after pauses of 5 s", f"16 whole {flaws or ''}")

    @contextlib.asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[Callable[[], float]]:
        """Take samples meanwhile; gives the seconds since its begin."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._ask.phase = name
        try:
            yield lambda: loop.time() - began
        finally:
            self._ask.phase = ""

    def samples(self) -> None:
        """What the engine's own metrics said meanwhile."""
        for name, limit in (("mixed", 2 * LIMIT), ("flood", LIMIT)):  # the engine counts choices
            seen = [s for s in self._ask.samples if s.phase == name]
            most = max((s.waiting for s in seen), default=-1)
            self._add(
                0 <= most <= limit + LATE, f"{name}: waiting inside vLLM",
                f"at most {most} in {len(seen)} samples",
            )  # fmt: skip
            running = [s.running for s in seen if s.queued]
            self._add(
                max(running, default=0) >= SLOTS, f"{name}: running while jobs wait",
                f"{sum(running) / max(1, len(running)):.1f} of {SLOTS} slots, {running}",
            )  # fmt: skip

    async def end(self) -> None:
        """Nothing is left over, and every job ended as it should."""
        await until(self._engine_is(0, 0), "the engine is idle")
        self._add(True, "at the end nothing runs or waits in vLLM", "0, 0")
        with contextlib.suppress(TimeoutError):  # the line below says what is left
            await until(self._clean, "Redis is clean", 10.0)
        left = await self._ask.leftovers()
        self._add(not left, "Redis holds only permanent keys", str(left or "none else"))
        ended = {
            outcome: int(self._dispatcher.metric("fairlane_jobs", f'outcome="{outcome}"'))
            for outcome in ("finished", "refused", "cancelled", "failed", "timeout", "tries")
        }
        wanted = {"finished": self._finished, "refused": len(WRONG), "cancelled": SLOTS + LIMIT}
        figure = ", ".join(f"{n} {outcome}" for outcome, n in ended.items() if n)
        self._add({k: n for k, n in ended.items() if n} == wanted, "jobs by outcome", figure)
        again = self._dispatcher.metric("fairlane_requeued")
        self._add(again == 0, "no run given back to the queue", f"{again:g}")
        logs = self._gateway.log() + self._dispatcher.log()
        bad = [x for x in logs.splitlines() if "ERROR" in x or "WARN" in x or "Traceback" in x]
        self._add(not bad, "no error or warning in the logs", str(bad or "none"))

    async def _clean(self) -> bool:
        return not await self._ask.leftovers()
