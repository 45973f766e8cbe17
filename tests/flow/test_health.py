"""Backends that are dead though they look well, busy ones that look dead, and ones that come back.
Virtual time, real code of both sides, simulated engines."""

import asyncio
import random

import httpx
import pytest

from common.outcomes import Outcome
from dispatcher.backend import Backend
from dispatcher.breaker import BACKOFF_MAX_S
from dispatcher.watchdog import GONE_S
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.flow.world import Asked, World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

SLOW = EngineSettings(model="m1", max_num_seqs=4, step_ms=200, seed=1)
FAST = EngineSettings(model="m1", max_num_seqs=8, step_ms=10, seed=1)
STALL_S, GIVEN_UP_S = 15.0, 8.0
PAGE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


def now() -> float:
    return asyncio.get_running_loop().time()


def backend(w: World, host: str) -> Backend:
    """As the leader sees it."""
    leader = w.leader()
    assert leader is not None
    return next(b for b in leader._loops["m1"].backends if b.url == f"http://{host}")


def state(w: World, host: str) -> str:
    return backend(w, host).health.breaker.state(now())


def sample(w: World, name: str, **labels: str) -> float:
    found = [s for f in w.registries["d0"].collect() for s in f.samples]
    return sum(s.value for s in found if s.name == name and labels.items() <= s.labels.items())


class Faulty:
    """Stands between a dispatcher and a simulated engine."""

    def __init__(self, engine: EngineTransport) -> None:
        self.engine = engine
        self.whole = engine.handle_async_request
        self.page: bytes | None = None
        """What GET is answered instead."""
        self.page_s = 0.0
        """How long a page takes."""
        self.port = True
        """Whether it takes connections."""
        engine.handle_async_request = self.handle  # type: ignore[method-assign]

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if not self.port:
            raise httpx.ConnectError("refused", request=request)
        if request.method != "GET":
            return await self.whole(request)
        await pass_time(self.page_s)
        if self.page is None:
            return await self.whole(request)
        return httpx.Response(200, content=self.page if request.url.path == "/metrics" else b"{}")

    def die(self) -> None:
        """The engine hangs for ever, behind pages on which all is well."""
        self.engine.freeze()
        self.page = PAGE

    def close_port(self) -> None:
        """As vLLM at SIGTERM: nothing is accepted, open streams hang without a byte."""
        self.engine.freeze()
        self.port = False

    def restart(self) -> None:
        """A new engine at the same address."""
        self.engine.kill()
        self.engine.revive()
        self.port, self.page = True, None


async def trickle(w: World, n: int, every_s: float, *, output: int = 5) -> list[Asked]:
    """Jobs that come one after the other, of a few users; half of them stream."""
    asked = []
    for i in range(n):
        asked.append(await w.ask(f"u{i % 5}", output=output, stream=i % 2 == 0))
        await pass_time(every_s)
    return asked


@pytest.mark.parametrize("stream", [True, False])
async def test_met_08_three_requests_without_a_byte(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    limits = {"first_byte_s": 5.0}
    async with world(monkeypatch, {"e1": FAST, "e2": FAST}, dispatcher=limits) as w:
        dead = Faulty(w.engines["e1"])
        dead.die()
        victims = [await w.ask(f"u{n}", output=5, stream=stream) for n in range(8)]
        await w.answers()
        assert sum(a.outcome is Outcome.TIMEOUT for a in victims) <= 4
        await pass_time(1.0)
        assert state(w, "e1") == "open"
        assert sample(w, "fairlane_backend_state", backend="http://e1", state="open") == 1
        assert sample(w, "fairlane_backend_state", backend="http://e1", state="closed") == 0
        later = await trickle(w, 60, 0.1)
        await w.answers()
        good = sum(a.outcome is Outcome.FINISHED for a in later)
        assert good >= 57
        assert len(dead.engine.log) <= len(victims) + 8, "one trial at a time"


async def test_met_08_no_token_for_a_minute_with_jobs_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the default limits nobody waits for the five minutes that a first byte may take."""
    monkeypatch.setattr("dispatcher.health.STALL_S", STALL_S)  # a minute, and each second costs
    monkeypatch.setattr("dispatcher.watchdog.GIVEN_UP_S", GIVEN_UP_S)
    async with world(monkeypatch, {"e1": FAST, "e2": FAST}) as w:
        await trickle(w, 4, 0.1)
        await w.answers()
        dead = Faulty(w.engines["e1"])
        dead.die()
        died = now()
        victims = await trickle(w, 8, 0.1)
        held = [a for a in victims if a.end is None]
        assert held and len(held) < len(victims)
        await wait_until(lambda: state(w, "e1") == "open", timeout=STALL_S + 3, what="open")
        assert now() - died >= STALL_S
        await w.answers()
        assert {a.outcome for a in victims} == {Outcome.FINISHED}
        assert sample(w, "fairlane_retries_total", reason="silent") == len(held)
        later = await trickle(w, 12, 1.0)
        await w.answers()
        assert {a.outcome for a in later} == {Outcome.FINISHED}, "a trial is answered elsewhere"
        waits = [a.first_at - a.asked_at for a in later if a.first_at is not None]
        assert sum(wait > GIVEN_UP_S - 1 for wait in waits) == 1
        dead.restart()
        await wait_until(lambda: state(w, "e1") == "half_open", timeout=30, what="half open")
        await trickle(w, 2, 0.1)
        await w.answers()
        assert state(w, "e1") == "closed", "one real request brought it back"


async def test_met_10_a_busy_backend_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page hangs, then its port misses polls, while it streams: nothing is removed or cut."""
    async with world(monkeypatch, {"e1": SLOW}) as w:
        busy = Faulty(w.engines["e1"])
        streams = [await w.ask("a", output=180) for _ in range(2)]
        await wait_until(lambda: all(a.first_at for a in streams), timeout=10)
        busy.page_s = 15.0
        seen = set()
        late = []
        for n in range(20):
            await pass_time(1.0)
            seen.add(state(w, "e1"))
            if n % 10 == 5:
                late.append(await w.ask("b", output=3))
        await w.answers(*late)
        assert seen == {"closed"}
        assert {a.outcome for a in late} == {Outcome.FINISHED}
        busy.page_s, busy.port = 0.0, False
        await pass_time(8.0)
        assert state(w, "e1") == "closed"
        assert backend(w, "e1").reachable
        busy.port = True
        await w.answers()
        assert {a.outcome for a in streams} == {Outcome.FINISHED}


async def test_streams_survive_the_removal_of_their_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": SLOW, "e2": SLOW}) as w:
        drains = Faulty(w.engines["e1"])
        streams = [await w.ask("a", output=40) for _ in range(6)]
        await wait_until(lambda: all(a.first_at for a in streams), timeout=10)
        there = w.engines["e1"].running()
        drains.engine.refuse(500, "cannot schedule new futures after shutdown")
        late = await trickle(w, 12, 0.3)
        assert state(w, "e1") != "closed"
        assert w.engines["e1"].running() == there
        await w.answers()
        assert {a.outcome for a in [*streams, *late]} == {Outcome.FINISHED}
        assert sample(w, "fairlane_retries_total", reason="refused") > 0
        assert all(b"error" not in a.data for a in w.asked)


async def test_a_closed_port_ends_the_streams_that_hang_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before the two minutes that a stream may be silent; queued there is queued elsewhere."""
    async with world(monkeypatch, {"e1": SLOW, "e2": SLOW}) as w:
        stopped = Faulty(w.engines["e1"])
        asked = [await w.ask("a", output=100) for _ in range(8)]
        await wait_until(lambda: all(a.first_at for a in asked), timeout=20)
        more = [await w.ask(f"b{n}", output=3, stream=n % 2 == 0) for n in range(6)]
        await wait_until(w.engines["e1"].waiting, timeout=2)
        assert w.engines["e1"].running() == 4
        stopped.close_port()
        at = now()
        hung = [a for a in asked if a.end is None]
        await wait_until(lambda: sum(a.end is not None for a in hung) == 4, timeout=GONE_S + 6)
        assert now() - at >= GONE_S
        failed = [a for a in asked if a.outcome is Outcome.FAILED]
        assert len(failed) == 4
        assert all(a.data.count(b'"error"') == 1 for a in failed)
        await w.answers()
        assert {a.outcome for a in asked if a not in failed} == {Outcome.FINISHED}
        assert {a.outcome for a in more} == {Outcome.FINISHED}


async def test_streams_of_an_engine_that_was_replaced_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is there again at once, and none of its answers."""
    async with world(monkeypatch, {"e1": SLOW}) as w:
        replaced = Faulty(w.engines["e1"])
        asked = [await w.ask("a", output=100) for _ in range(3)]
        await wait_until(lambda: all(a.first_at for a in asked), timeout=20)
        await pass_time(2)
        w.engines["e1"].freeze()
        replaced.page = PAGE + b"vllm:generation_tokens_total 0\n"
        at = now()
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FAILED}
        assert GONE_S <= now() - at <= GONE_S + 6


async def test_rat_08_counts_are_exact_after_a_thousand_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = {f"e{n}": SLOW for n in range(3)}
    rng = random.Random(8)
    async with world(monkeypatch, engines) as w:

        async def abort(n: int) -> None:
            asked = await w.ask(f"u{n % 7}", output=rng.randrange(1, 12), stream=rng.random() < 0.7)
            await pass_time(rng.uniform(0.0, 0.6))
            if asked.end is None:
                await w.cancel(asked)

        def same() -> bool:
            pairs = [(backend(w, h), w.engines[h]) for h in engines]
            return all(b.load.counts(now()).inflight == e.running() + e.waiting() for b, e in pairs)

        for n in range(0, 1_000, 100):
            await asyncio.gather(*(abort(n + i) for i in range(100)))
        await wait_until(same, timeout=5, what="the same counts")
        await wait_until(
            lambda: not any(backend(w, h).load.counts(now()).inflight for h in engines), timeout=20
        )
        assert not any(e.running() + e.waiting() for e in w.engines.values())
        for host in engines:
            load = backend(w, host).load
            assert [load.inflight(c) for c in ("interactive", "standard", "batch")] == [0, 0, 0]
            assert load.counts(now()).unstarted == 0


@pytest.mark.parametrize("down_s", [0.2, 12.0])
async def test_rat_08_a_restarted_backend_gets_its_share_and_no_flood(
    monkeypatch: pytest.MonkeyPatch, down_s: float
) -> None:
    """Of three under load, one restarts: at once, between polls, or for long."""
    engines = {f"e{n}": SLOW for n in range(3)}
    async with world(monkeypatch, engines) as w:
        running = asyncio.ensure_future(trickle(w, 330 + int(15 * down_s), 1 / 15, output=3))
        await pass_time(2.0)
        e1 = w.engines["e1"]
        e1.kill()
        await pass_time(down_s)
        e1.revive()
        back = now()

        def posts(host: str) -> list[float]:
            log = w.engines[host].log
            return [r.at for r in log if r.method == "POST" and r.at >= back]

        most = 0
        while sum(len(posts(h)) for h in engines) < 300:
            await pass_time(0.05)
            if now() - back <= 1.0:
                most = max(most, e1.waiting())
        share = len(posts("e1")) / sum(len(posts(h)) for h in engines)
        assert 0.25 <= share <= 0.45
        assert most <= 3
        await running
        await w.answers()
        failed = [a for a in w.asked if a.outcome is not Outcome.FINISHED]
        assert len(failed) <= 8, "but for what had begun there"
        assert state(w, "e1") == "closed"


async def test_a_dead_backend_costs_a_bounded_number_of_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refusals do not count among tries, and the waits between them grow."""
    async with world(monkeypatch, {"e1": FAST}) as w:
        w.engines["e1"].refuse(503, "overloaded")
        asked = [await w.ask(f"u{n}", output=3) for n in range(5)]
        await pass_time(30.0)
        posts = [r for r in w.engines["e1"].log if r.method == "POST"]
        assert 5 <= len(posts) <= 3 + 5 + 30 / BACKOFF_MAX_S
        assert not any(a.end for a in asked)
        w.engines["e1"].revive()
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}


async def test_a_job_that_broke_goes_to_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though that one is busy, and the one where it broke a second time is free and in use."""
    async with world(monkeypatch, {"e1": SLOW, "e2": SLOW, "e3": SLOW}) as w:
        tried: list[str] = []
        for host in ("e1", "e2", "e3"):
            engine = w.engines[host]
            whole = engine.handle_async_request

            async def handle(
                request: httpx.Request, host: str = host, whole: object = whole
            ) -> httpx.Response:
                if b"poison" in request.content:
                    tried.append(host)
                    if len(tried) < 3:
                        raise httpx.ReadError("Connection reset by peer", request=request)
                return await whole(request)  # type: ignore[operator,no-any-return]

            monkeypatch.setattr(engine, "handle_async_request", handle)
        busy = await w.ask("b", output=20)
        await wait_until(lambda: busy.first_at, timeout=5)
        asked = await w.ask("a", output=3, text="poison")
        await w.answers()
        assert asked.outcome is Outcome.FINISHED
        assert len(set(tried)) == 3
        assert sample(w, "fairlane_retries_total", reason="broken") == 2
