"""The poller against simulated engines, and against pages that real ones have shown, in virtual
time."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from common.settings import BackendSettings
from dispatcher.admission import Counts, Room
from dispatcher.backend import Backend
from dispatcher.backends import Poller
from dispatcher.engines.facts import EngineFacts
from dispatcher.health import MISSES_MAX
from dispatcher.pages import PAGE_BYTES_MAX, Pages
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

CASES = Path(__file__).resolve().parents[1] / "cases"
URL = "http://engine:8000"
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Watch:
    """One polled backend: whether jobs wait for it, and what its poller told."""

    def __init__(self, **options: Any) -> None:
        self.backend = Backend(BackendSettings(url=URL, **options), model="m1")
        self.busy = True
        self.changes = 0

    def changed(self, backend: Backend) -> None:
        assert backend is self.backend
        self.changes += 1

    def room(self, cls: str = "standard", limit: int = 3) -> Room:
        now = asyncio.get_running_loop().time()
        return self.backend.room(now, cls, limit)

    def counts(self) -> Counts:
        return self.backend.load.counts(asyncio.get_running_loop().time())


@asynccontextmanager
async def polling(transport: httpx.AsyncBaseTransport, watch: Watch) -> AsyncIterator[None]:
    """A poller that runs meanwhile; its failure is the test's."""
    poller = Poller(
        Pages(transport),
        [watch.backend],
        busy=lambda _: watch.busy,
        changed=watch.changed,
        rng=random.Random(7),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(poller.run())
        yield
        running.cancel()


def serving(metrics: Handler) -> httpx.MockTransport:
    """An engine whose metrics page is the handler's."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return await metrics(request)
        return httpx.Response(200, json={"object": "list", "data": [{"id": "m1"}]})

    return httpx.MockTransport(handle)


def paths(engine: EngineTransport, path: str = "/metrics") -> list[float]:
    return [r.at for r in engine.log if r.path == path]


async def stream(engine: EngineTransport, tokens: int = 400) -> httpx.Response:
    """A request to the engine that did not come from here; the head of its answer."""
    body = {"model": "m1", "prompt": "x", "stream": True, "max_tokens": tokens, "ignore_eos": True}
    request = httpx.Request("POST", f"{URL}/v1/completions", json=body)
    response = await engine.handle_async_request(request)
    assert response.status_code == 200
    return response


# --- a simulated engine


async def test_an_engine_is_polled_often_while_busy_and_else_each_second() -> None:
    engine, watch = EngineTransport(EngineSettings(model="m1")), Watch()
    watch.busy = False
    async with polling(engine, watch):
        await pass_time(10)
        assert 9 <= len(paths(engine)) <= 12
        assert watch.backend.load.fresh(asyncio.get_running_loop().time())
        before = len(paths(engine))
        watch.busy = True
        await pass_time(0.12)
        assert len(paths(engine)) == before + 1, "not only after the rest of the second"
        await pass_time(10)
        assert 90 <= len(paths(engine)) - before <= 113
    gaps = [b - a for a, b in zip(paths(engine)[-20:], paths(engine)[-19:], strict=False)]
    assert 0.089 < min(gaps) < max(gaps) < 0.111 and len(set(gaps)) > 10, "jittered"
    told = len(engine.log)
    await pass_time(5)
    assert len(engine.log) == told, "not polled any more"


async def test_facts_stay_fresh_when_a_busy_backend_becomes_idle() -> None:
    watch = Watch()
    async with polling(EngineTransport(EngineSettings(model="m1")), watch):
        await pass_time(3)
        watch.busy = False
        for _ in range(50):
            await pass_time(0.05)
            assert watch.room() == Room(3)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("old", [False, True])
async def test_foreign_load_is_seen_and_told(labels: int, old: bool) -> None:
    engine = EngineTransport(
        EngineSettings(model="m1", max_num_seqs=2, engine_labels=labels, old_metric_names=old)
    )
    watch = Watch()
    async with polling(engine, watch):
        await wait_until(lambda: watch.backend.load.facts)
        assert watch.room() == Room(3)
        assert watch.backend.metrics_up and watch.backend.reachable
        changes = watch.changes
        streams = [await stream(engine) for _ in range(4)]
        await wait_until(lambda: watch.counts().foreign == 2)
        assert watch.changes > changes
        facts = watch.backend.load.facts
        assert facts is not None and facts.running == 2 and facts.kv
        assert watch.room() == Room(1)
        assert watch.room("batch", 9).reason == "2 of others waiting"
        for response in streams:
            await response.aclose()
        await wait_until(lambda: watch.counts().foreign == 0, timeout=0.2)


async def test_an_unchanging_engine_wakes_nobody() -> None:
    engine, watch = EngineTransport(EngineSettings(model="m1")), Watch()
    async with polling(engine, watch):
        await wait_until(lambda: watch.backend.load.facts and watch.backend.models)
        changes = watch.changes
        await pass_time(12)
        assert watch.changes == changes


async def test_a_dead_engine_is_not_reachable_and_back_when_it_is_back() -> None:
    engine, watch = EngineTransport(EngineSettings(model="m1")), Watch()
    async with polling(engine, watch):
        await wait_until(lambda: watch.backend.reachable)
        engine.kill()
        changes = watch.changes
        await wait_until(lambda: not watch.backend.metrics_up, timeout=0.2)
        await wait_until(lambda: watch.backend.reachable is False, timeout=0.4)
        assert watch.changes == changes + 2
        await pass_time(1)
        assert watch.room().n == 0
        engine.revive()
        await wait_until(lambda: watch.backend.reachable and watch.room() == Room(1), timeout=0.2)
        assert not watch.backend.usable(asyncio.get_running_loop().time()), "one job is its trial"


async def test_a_backend_that_misses_a_few_polls_stays_reachable() -> None:
    engine, watch = EngineTransport(EngineSettings(model="m1")), Watch()
    async with polling(engine, watch):
        await wait_until(lambda: watch.backend.reachable)
        for _ in range(5):
            engine.kill()
            await wait_until(lambda: not watch.backend.metrics_up)
            await pass_time(0.11)  # a second miss
            assert watch.backend.reachable
            engine.revive()
            await wait_until(lambda: watch.backend.metrics_up)


async def test_a_backend_that_answers_jobs_is_reachable_whatever_its_polls_say() -> None:
    backend = Backend(BackendSettings(url=URL))
    backend.unread(0.0, refused=True)
    assert backend.reachable is False, "one never reached"
    for n in range(5):
        backend.started(10.0 * n, "job")
        for _ in range(MISSES_MAX):
            backend.unread(10.0 * n + 9.9, refused=True)
        assert backend.reachable
    backend.unread(50.0, refused=True)
    assert backend.reachable is False


async def test_a_hanging_page_makes_facts_stale_and_is_one_request_at_a_time() -> None:
    engine, watch = EngineTransport(EngineSettings(model="m1")), Watch()
    async with polling(engine, watch):
        await pass_time(1)
        engine.freeze()
        asked = len(paths(engine))
        await pass_time(1)
        assert watch.room() == Room(1)
        assert watch.backend.reachable
        assert len(paths(engine)) <= asked + 1
        await pass_time(30)
        assert len(paths(engine)) <= asked + 16, "each ends after two seconds"
        assert not watch.backend.metrics_up
        engine.revive()
        await wait_until(lambda: watch.room() == Room(3), timeout=2.5)


async def test_served_models_are_read_until_known_and_then_each_ten_seconds() -> None:
    engine, watch = EngineTransport(EngineSettings(model=("m1", "alias"))), Watch(api_key="key")
    engine.kill()
    watch.busy = False
    async with polling(engine, watch):
        await pass_time(5)
        assert watch.backend.models is None
        engine.revive()
        await wait_until(lambda: watch.backend.models == ("m1", "alias"), timeout=1.2)
        engine.log.clear()
        await pass_time(60)
        assert 5 <= len(paths(engine, "/v1/models")) <= 7
        assert all(r.headers["authorization"] == "Bearer key" for r in engine.log)
        engine.kill()
        await pass_time(60)
        assert watch.backend.models == ("m1", "alias"), "what it served is not forgotten"


# --- pages that engines have shown


def variants(case: str) -> list[Any]:
    data = json.loads((CASES / f"{case}.json").read_text())
    each = [{**data, **v} for v in data.get("variants", [{"name": ""}])]
    return [pytest.param(v, id=f"{case}-{v['name']}") for v in each]


class Timeline:
    """The `backend_metrics` of a case: what the page says when, from its first request on."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers
        self.began: float | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        now = asyncio.get_running_loop().time()
        self.began = now if self.began is None else self.began
        due = [a for a in self.answers if a["at_ms"] <= 1_000 * (now - self.began)]
        await pass_time(due[-1].get("hang_ms", 0) / 1_000)
        return httpx.Response(due[-1].get("status", 200), text=due[-1]["body"])


@pytest.mark.parametrize("case", [*variants("MET-01"), *variants("MET-03")])
async def test_a_saturated_engine_is_left_alone_until_it_is_not(case: dict[str, Any]) -> None:
    """Renamed gauges; several engine processes. Full from 0 s, free from 3 s."""
    watch = Watch()
    async with polling(serving(Timeline(case["backend_metrics"])), watch):
        await pass_time(0.5)
        for _ in range(24):
            assert watch.room().n == 0
            await pass_time(0.1)
        await wait_until(lambda: watch.room() == Room(3), timeout=0.5)


@pytest.mark.parametrize("case", variants("MET-06"))
async def test_an_engine_without_metrics_is_used_within_its_own_limit(
    case: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watch = Watch()
    async with polling(serving(Timeline(case["backend_metrics"])), watch):
        await pass_time(3)
        assert watch.room() == Room(1)
        assert watch.backend.metrics_up is False
        assert watch.backend.reachable is True
        watch.backend.sent(asyncio.get_running_loop().time(), "a", "standard", streams=True)
        assert watch.room().reason == "metrics unknown: 1 waiting ≥ limit 1"
        watch.busy = False
        await pass_time(130)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 3 and all(f"backend {URL}: metrics unknown: " in w for w in warnings)


async def _large(request: httpx.Request) -> httpx.Response:
    sample = b"vllm:num_requests_waiting 5\n"
    return httpx.Response(200, content=sample + b"# x\n" * (PAGE_BYTES_MAX // 4))


async def _reset(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("Connection reset by peer")


async def _not_http(request: httpx.Request) -> httpx.Response:
    raise aiohttp.ClientPayloadError("Expected HTTP/")


async def _disconnected(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectTimeout("Server disconnected") from aiohttp.ServerDisconnectedError()


async def _no_route(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectTimeout("no route") from aiohttp.ConnectionTimeoutError()


async def _no_name(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text="a..b".encode("idna").decode())


@pytest.mark.parametrize(
    ("handler", "reachable"),
    [(_large, True), (_reset, True), (_not_http, True), (_disconnected, True), (_no_route, False),
     (_no_name, False)],
)  # fmt: skip
async def test_whatever_goes_wrong_the_poller_goes_on(handler: Handler, reachable: bool) -> None:
    watch, failing = Watch(), True

    async def page(request: httpx.Request) -> httpx.Response:
        if failing:
            return await handler(request)
        return httpx.Response(200, text="vllm:num_requests_waiting 2\n")

    async with polling(serving(page), watch):
        await pass_time(1)
        assert watch.backend.load.facts is None
        assert watch.backend.load.failures > 5
        assert watch.backend.reachable is reachable
        failing = False
        await wait_until(lambda: watch.backend.load.facts == EngineFacts(waiting=2), timeout=0.2)


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"data": null}', b'{"data":[{"id":5}]}', b"\xff"])
async def test_a_list_of_models_that_is_none_is_asked_for_again(answer: bytes) -> None:
    watch, asked = Watch(), []

    async def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, content=answer if len(asked) < 9 else b'{"data":[{"id":"x"}]}')

    async with polling(httpx.MockTransport(handle), watch):
        await wait_until(lambda: watch.backend.models == ("x",), timeout=3)


# --- load and breaker together


async def test_a_refusal_takes_a_backend_out_of_use_and_a_first_byte_brings_it_back() -> None:
    watch = Watch()
    backend = watch.backend
    async with polling(EngineTransport(EngineSettings(model="m1")), watch):
        await wait_until(lambda: watch.room() == Room(3))
        now = asyncio.get_running_loop().time()
        backend.sent(now, "a", "standard", streams=True)
        backend.refused(now, "a")
        assert watch.room().reason == "refused, next try in 0.5 s"
        assert watch.counts().inflight == 0
        await pass_time(0.5)
        assert watch.room() == Room(1)
        now += 0.5
        backend.sent(now, "b", "standard", streams=True)
        assert watch.room().reason == "refused, on trial"
        backend.ended(now, "b")
        assert watch.room() == Room(1), "cancelled before it told anything"
        backend.sent(now, "c", "standard", streams=True)
        backend.started(now, "c")
        assert watch.room() == Room(2), "slowly"
        await pass_time(1)
        assert watch.room() == Room(3)
