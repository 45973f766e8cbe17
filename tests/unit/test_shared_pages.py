"""Several models of one engine: its pages are asked for once for all of them, in virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from common.settings import BackendSettings
from dispatcher.backend import Backend
from dispatcher.backends import WARN_S, Poller
from dispatcher.health import MISSES_MAX
from dispatcher.pages import PAGES_MAX, Pages, Unreadable
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

URL = "http://engine:8000"
MODELS = tuple(f"m{n}" for n in range(8))


class Engine(httpx.AsyncBaseTransport):
    """A simulated one that can refuse connections, or take long to answer."""

    def __init__(self) -> None:
        self.engine = EngineTransport(EngineSettings(model=MODELS))
        self.refuses = False
        self.takes_s = 0.0
        self.asked: list[float] = []
        self.together = self.most = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(asyncio.get_running_loop().time())
        if self.refuses:
            raise httpx.ConnectError("nobody is there")
        self.together += 1
        self.most = max(self.most, self.together)
        try:
            await pass_time(self.takes_s)
        finally:
            self.together -= 1
        return await self.engine.handle_async_request(request)

    def polls(self, since: float) -> int:
        return sum(at > since for at in self.asked)


class Fleet:
    """A backend and a poller for each model."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.pages = Pages(self.engine)
        self.busy: set[str] = set()
        self.backends = [Backend(BackendSettings(url=URL), model=m) for m in MODELS]
        self.polled = dict.fromkeys(MODELS, 0)

    def poller(self, backend: Backend, seed: int) -> Poller:
        took = backend.polled
        model = str(backend.model)

        def polled(*args: object, **more: object) -> None:
            self.polled[model] += 1
            took(*args, **more)  # type: ignore[arg-type]

        backend.polled = polled  # type: ignore[method-assign]
        return Poller(
            self.pages, [backend], busy=lambda b: b.model in self.busy, changed=lambda _: None,
            rng=random.Random(seed),
        )  # fmt: skip

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[list[asyncio.Task[None]]]:
        async with asyncio.TaskGroup() as group:
            pollers = [self.poller(b, n) for n, b in enumerate(self.backends)]
            tasks = [group.create_task(p.run_load()) for p in pollers]
            yield tasks
            for task in tasks:
                task.cancel()

    def fresh(self) -> list[bool]:
        now = asyncio.get_running_loop().time()
        return [b.load.fresh(now) for b in self.backends]


async def test_an_engine_is_asked_as_often_as_for_one_model() -> None:
    """And each model is told as often as one that is alone."""
    fleet = Fleet()
    async with fleet.polling():
        await pass_time(5)
        for busy, most, least in ((set(), 13, 8), ({"m3"}, 113, 85), (set(MODELS), 125, 85)):
            fleet.busy = set(busy)
            await pass_time(2)
            began, told = asyncio.get_running_loop().time(), dict(fleet.polled)
            await pass_time(10)
            assert 8 <= fleet.engine.polls(began) <= most, busy
            for model in busy or MODELS:
                assert least <= fleet.polled[model] - told[model] <= 113
            assert all(fleet.fresh())


async def test_a_failed_poll_counts_once_for_each_model() -> None:
    """Three of them in a row take a backend out of use."""
    fleet = Fleet()
    async with fleet.polling():
        await pass_time(3)
        fleet.engine.refuses = True
        began = asyncio.get_running_loop().time()
        await wait_until(
            lambda: any(b.reachable is False for b in fleet.backends), timeout=10, what="noticed"
        )
        assert fleet.engine.polls(began) >= MISSES_MAX
        await pass_time(2)
        assert not any(b.reachable for b in fleet.backends)
        fleet.engine.refuses = False
        await wait_until(lambda: all(b.reachable for b in fleet.backends), timeout=10)


async def test_a_slow_page_holds_nobody_up_for_longer() -> None:
    fleet = Fleet()
    fleet.busy = set(MODELS)
    fleet.engine.takes_s = 1.0
    async with fleet.polling():
        await pass_time(3)
        told = dict(fleet.polled)
        await pass_time(12)
        assert all(fleet.polled[m] - told[m] >= 5 for m in MODELS)
        assert fleet.engine.most == 1, "an engine that answers slowly is not pressed"


async def test_what_is_wrong_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.engine.refuses = True
    async with fleet.polling():
        await pass_time(WARN_S * 3 - 5)
    assert caplog.text.count(f"backend {URL}: metrics unknown") == 3


async def test_models_that_leave(caplog: pytest.LogCaptureFixture) -> None:
    """Also while they wait for a page, or read it; nothing is kept for nobody."""
    fleet = Fleet()
    fleet.engine.takes_s = 0.5
    async with fleet.polling() as tasks:
        await pass_time(1.2)
        for task in tasks[:-1]:
            task.cancel()
            await pass_time(0.3)
        told = fleet.polled[MODELS[-1]]
        await pass_time(5)
        assert fleet.polled[MODELS[-1]] >= told + 3
        (page,) = fleet.pages._pages[URL].values()
        assert not page.found, "one reader alone needs nothing kept"
    assert not fleet.pages._pages and not fleet.pages._readers


async def test_models_with_other_keys_read_pages_of_their_own() -> None:
    """What an engine answers to one key is nothing of what it answers to another."""
    asked: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        key = request.headers.get("authorization", "none")
        asked.append(key)
        await pass_time(0.1)
        return httpx.Response(200 if key == "Bearer right" else 401, content=key.encode())

    pages = Pages(httpx.MockTransport(answer))

    async def read(api_key: str | None) -> str:
        backend = BackendSettings(url=URL, api_key=api_key)
        with pages.reading(URL):
            try:
                page, _ = await pages.read(backend, None, "/metrics", 0.0)
            except Unreadable as e:
                return str(e)
        return page.decode()

    await pass_time(1)
    keys = [None, "right", "wrong", "right"]
    found = await asyncio.gather(*map(read, keys))
    assert found == ["status 401", "Bearer right", "status 401", "Bearer right"]
    assert sorted(asked) == ["Bearer right", "Bearer wrong", "none"]
    assert not pages._pages


async def test_pages_of_keys_that_are_used_no_more_are_not_kept() -> None:
    pages = Pages(httpx.MockTransport(lambda _: httpx.Response(200, content=b"page")))
    with pages.reading(URL), pages.reading(URL):
        for n in range(200):
            backend = BackendSettings(url=URL, api_key=f"key{n}")
            await pages.read(backend, None, "/metrics", 0.0)
            assert len(pages._pages[URL]) <= PAGES_MAX
