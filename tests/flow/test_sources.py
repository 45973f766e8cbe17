"""Backends that come and go under load. Virtual time, real code of both sides."""

import asyncio
from collections.abc import Iterable

import pytest

from common import keys, placed
from common.broker import Broker
from common.known import remember
from common.outcomes import Outcome
from common.settings import BackendSettings, Settings
from common.wire import ServedBackend, decode_announcement
from dispatcher.loop import ModelLoop
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.flow.test_failures import at_rest, errors, started
from tests.flow.world import Asked, World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

ENGINE = EngineSettings(model="m1", max_num_seqs=4, step_ms=100, seed=1)
SLOW = EngineSettings(model="m1", max_num_seqs=4, step_ms=1_000, seed=1)
E1, E2 = "http://e1", "http://e2"
FOLLOW_S = 3.0
"""A change by HTTP reaches every dispatcher within this time."""


def broker(w: World) -> Broker:
    return w.gateways[0][0].broker


def at(url: str, *models: str) -> BackendSettings:
    return BackendSettings(url=url, models=models)


def loops(w: World, model: str = "m1") -> list[ModelLoop]:
    return [d._loops[model] for _, d in w.dispatchers]


def urls(w: World, model: str = "m1") -> list[set[str]]:
    """The backends that each dispatcher has for the model."""
    every = (d._loops.get(model) for _, d in w.dispatchers)
    return [{b.url for b in loop.backends} if loop else set() for loop in every]


async def has(w: World, *backends: str, model: str = "m1") -> None:
    """Every dispatcher has these backends for the model, and no others."""
    wanted = [set(backends)] * len(w.dispatchers)
    await wait_until(lambda: urls(w, model) == wanted, timeout=FOLLOW_S, what=str(backends))


async def drained(w: World, url: str, *, so: bool = True) -> None:
    def all_know() -> bool:
        found = [b for loop in loops(w) for b in loop.backends if b.url == url]
        return len(found) == len(w.dispatchers) and all(b.drained is so for b in found)

    await wait_until(all_know, timeout=FOLLOW_S, what=f"drained: {so}")


async def served(w: World) -> dict[str, list[ServedBackend]]:
    """Backend -> what each dispatcher announces of it."""
    found: dict[str, list[ServedBackend]] = {}
    flat = await broker(w).command("HGETALL", keys.MODELS)
    for data in flat[1::2]:
        for backend in decode_announcement(data).backends:
            found.setdefault(backend.url, []).append(backend)
    return found


def whole(asked: Iterable[Asked]) -> bool:
    """Each was answered as if nothing had happened."""
    return all(a.outcome is Outcome.FINISHED and not errors(a) for a in asked)


def sent(w: World, engine: str) -> int:
    return sum(r.path.endswith("completions") for r in w.engines[engine].log)


async def test_a_backend_that_is_added_runs_the_jobs_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, dispatchers=2, model={"backends": []}) as w:
        asked = [await w.ask(f"u{n % 3}") for n in range(6)]
        await pass_time(30)
        assert not any(a.end for a in asked), "jobs wait where there is no backend"
        assert await placed.add(broker(w), at(E1, "m1")) == "added"
        await has(w, E1)
        await w.answers()
        assert whole(asked)
        assert sent(w, "e1") == 6
        await at_rest(w)


async def test_a_backend_serves_the_models_that_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names come and go with what it lists, within a poll of 10 s; jobs of one that went wait."""
    async with world(monkeypatch, {"e1": ENGINE}, model={"backends": []}) as w:
        await placed.add(broker(w), at(E1))
        await has(w, E1)
        both = EngineSettings(model=("m1", "lora"), max_num_seqs=4, step_ms=100, seed=1)
        w.engines["e1"] = EngineTransport(both)
        known = w.dispatchers[0][1]._loops
        await wait_until(lambda: "lora" in known, timeout=12, what="the new name")
        assert urls(w, "lora") == [{E1}]
        w.engines["e1"] = EngineTransport(
            EngineSettings(model="lora", max_num_seqs=4, step_ms=100, seed=1)
        )
        await wait_until(lambda: urls(w) == [set()], timeout=12, what="the old name is gone")
        waiting = await w.ask("a")
        await pass_time(5)
        assert waiting.end is None
        w.engines["e1"] = EngineTransport(both)
        await w.answers()
        assert whole([waiting])


async def test_a_drained_backend_ends_what_it_runs_and_gets_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": ENGINE, "e2": ENGINE}, dispatchers=2) as w:
        asked = [await w.ask(f"u{n % 3}", output=60) for n in range(30)]
        await started(*asked[:4])
        assert await placed.drain(broker(w), E1) == "added"
        await drained(w, E1)
        before = sent(w, "e1")
        assert before >= 4
        await w.answers()
        assert whole(asked)
        assert sent(w, "e1") == before, "it got no more"
        assert sent(w, "e1") + sent(w, "e2") == 30, "and nothing ran twice"
        assert {b.state for b in (await served(w))[E1]} == {"draining"}
        assert await placed.undrain(broker(w), E1)
        await drained(w, E1, so=False)
        again = [await w.ask("v", output=60) for _ in range(8)]
        await w.answers()
        assert whole(again)
        assert sent(w, "e1") > before
        await at_rest(w)


async def test_a_removed_backend_is_dropped_when_its_last_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": ENGINE, "e2": ENGINE}, dispatchers=2,
                     model={"backends": []}) as w:  # fmt: skip
        for url in (E1, E2):
            await placed.add(broker(w), at(url, "m1"))
        await has(w, E1, E2)
        asked = [await w.ask(f"u{n % 3}", output=80) for n in range(24)]
        await started(*asked[:4])
        assert await placed.remove(broker(w), E1)
        leader = w.leader()
        assert leader is not None
        loop = leader._loops["m1"]
        await wait_until(lambda: any(b.drained for b in loop.backends), timeout=FOLLOW_S)
        before = sent(w, "e1")
        assert {b.url for b in loop.backends} == {E1, E2}, "while it runs jobs it counts"
        await w.answers()
        assert whole(asked)
        assert sent(w, "e1") == before
        await has(w, E2)
        await at_rest(w)


async def test_what_has_not_begun_at_a_removed_backend_goes_elsewhere_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What streams goes on for as long as it takes."""
    settings = {"remove_s": 10}
    async with world(monkeypatch, {"e1": SLOW, "e2": ENGINE}, model={"backends": []},
                     dispatcher=settings) as w:  # fmt: skip
        await placed.add(broker(w), at(E1, "m1"))
        await has(w, E1)
        streams = [await w.ask("a", output=60) for _ in range(2)]
        await started(*streams)
        bodies = [await w.ask("b", output=60, stream=False) for _ in range(2)]
        await wait_until(lambda: sent(w, "e1") == 4, timeout=10)
        await placed.remove(broker(w), E1)
        await placed.add(broker(w), at(E2, "m1"))
        await w.answers(*bodies)
        assert not any(a.end for a in streams)
        assert sent(w, "e2") == 2
        await w.answers()
        assert whole([*streams, *bodies])
        await has(w, E2)
        await at_rest(w)


async def test_a_backend_may_come_back_before_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model={"backends": []}) as w:
        await placed.add(broker(w), at(E1, "m1"))
        await has(w, E1)
        asked = [await w.ask("a", output=80) for _ in range(6)]
        await started(*asked[:4])
        backend = loops(w)[0].backends[0]
        await placed.remove(broker(w), E1)
        await drained(w, E1)
        await placed.add(broker(w), at(E1, "m1"))
        await drained(w, E1, so=False)
        await w.answers()
        assert whole(asked)
        assert loops(w)[0].backends == [backend], "with what is known of its load"


async def test_a_name_s_addresses_are_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own load; one that the name lost ends what it runs; the engines are asked for
    the name."""
    backend = {"url": "http://gpu.svc:8000", "resolve": True}
    engines = {"10.0.0.1": ENGINE, "10.0.0.2": ENGINE, "10.0.0.3": ENGINE}
    async with world(monkeypatch, engines, model={"backends": [backend]}) as w:
        one, two, three = (f"http://{h}:8000" for h in engines)
        waiting = [await w.ask("a") for _ in range(2)]
        await pass_time(25)
        assert urls(w) == [set()], "the name is not known yet"
        w.names["gpu.svc"] = ["10.0.0.1", "10.0.0.2"]
        await w.answers()
        assert whole(waiting)
        assert urls(w) == [{one, two}]
        asked = [await w.ask(f"u{n % 3}", output=100) for n in range(12)]
        await started(*asked[:8])
        w.names["gpu.svc"] = ["10.0.0.2", "10.0.0.3"]
        await wait_until(lambda: three in urls(w)[0], timeout=12)
        del w.names["gpu.svc"]  # nothing changes by a lookup that fails
        await w.answers()
        assert whole(asked)
        assert urls(w) == [{one, two, three}]
        w.names["gpu.svc"] = ["10.0.0.2", "10.0.0.3"]
        await wait_until(lambda: urls(w) == [{two, three}], timeout=40)
        hosts = {r.headers["host"] for e in w.engines.values() for r in e.log}
        assert hosts == {"gpu.svc:8000"}
        await at_rest(w)


async def test_models_that_share_an_engine_do_not_starve_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one has waiting in the engine is no foreign load for the other."""
    both = EngineSettings(model=("m1", "m2"), max_num_seqs=4, step_ms=100, seed=1)
    async with world(monkeypatch, {"e1": both}, model={"backends": []}) as w:
        await placed.add(broker(w), at(E1, "m1", "m2"))
        await has(w, E1, model="m1")
        w.settings.models["m2"] = w.settings.models["m1"]
        first = [await w.ask("a", output=100) for _ in range(40)]
        await pass_time(3)
        late = await w.ask("b", output=10, model="m2")
        await pass_time(1)
        assert any(late.job.encode() in r.body for r in w.engines["e1"].log), "it waits in line"
        assert sum(a.first_at is not None for a in first) == 4, "behind three of the other's"
        await w.answers(late)
        assert whole([late])


async def test_what_redis_lost_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": ENGINE, "e2": ENGINE}, dispatchers=2) as w:
        await placed.add(broker(w), at("http://e3", "m1"))
        await placed.drain(broker(w), E1)
        await has(w, E1, E2, "http://e3")
        await drained(w, E1)
        await broker(w).command("FLUSHALL")
        await pass_time(5)
        now = await placed.read(broker(w))
        assert set(now.added) == {"http://e3"} and now.drained == {E1}
        await has(w, E1, E2, "http://e3")
        assert await placed.remove(broker(w), "http://e3")
        await has(w, E1, E2)


async def test_a_dispatcher_that_starts_knows_what_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model={"backends": []}) as w:
        await placed.add(broker(w), at(E1))
        await has(w, E1)
        process, _ = w.dispatchers.pop()
        await process.kill()
        await w.add_dispatcher("d9")
        await has(w, E1)
        asked = await w.ask("a")
        await w.answers()
        assert whole([asked])
        assert asyncio.get_running_loop().time() < 60


def demand(w: World, name: str) -> tuple[float | None, float | None]:
    """What an autoscaler is told by a dispatcher: batch jobs waiting, and slots wanted."""
    value = w.registries[name].get_sample_value
    return (
        value("fairlane_queue_depth", {"model": "m1", "class": "batch"}),
        value("fairlane_wanted_slots", {"model": "m1"}),
    )


async def test_jobs_wait_for_the_first_backend_and_tell_how_many_slots_they_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is left of a model is its name in Redis."""
    limits = {"class": {"batch": {"inflight_max": 3}}}
    async with world(monkeypatch, {"e1": ENGINE}, dispatchers=2, model=limits) as w:
        w.engines.clear()
        w.settings.models["m2"] = w.settings.models["m1"]
        late = await w.ask("a", wait_ms=20_000)
        jobs = [await w.ask("a", cls="batch") for _ in range(5)]
        await pass_time(10)
        assert late.end is None
        led = [n for n, (_, d) in enumerate(w.dispatchers) if d._loops["m1"].election.leads]
        (leader,) = led
        assert demand(w, f"d{leader}") == (5, 4), "batch may have three at once"
        assert demand(w, f"d{1 - leader}") == (None, None), "others tell nothing"
        await w.answers(late)
        assert late.outcome is Outcome.DEADLINE
        await pass_time(1)
        assert demand(w, f"d{leader}") == (5, 3)
        await w.dispatchers[leader][1].stop()
        await wait_until(lambda: demand(w, f"d{1 - leader}") == (5, 3), timeout=10)
        assert demand(w, f"d{leader}") == (None, None)
        w.engines["e1"] = EngineTransport(ENGINE)
        await w.answers()
        assert whole(jobs)
        await pass_time(2)
        assert demand(w, f"d{1 - leader}") == (0, 0)


async def test_a_model_that_had_a_backend_once_is_led_though_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by a dispatcher that starts afterwards, as long as its name is kept."""
    monkeypatch.setattr("common.known.FORGOTTEN_MS", 30_000)
    lists = EngineSettings(model="m2", max_num_seqs=4, step_ms=100, seed=1)
    async with world(monkeypatch, {"e2": lists}, model={"backends": []}) as w:
        w.settings.models["m2"] = w.settings.models["m1"]
        await placed.add(broker(w), at(E2))
        await has(w, E2, model="m2")
        await pass_time(12)
        await placed.remove(broker(w), E2)
        process, _ = w.dispatchers.pop()
        await process.kill()
        settings, w.settings = w.settings, Settings()
        again = await w.add_dispatcher("d9")
        w.settings = settings
        await wait_until(lambda: "m2" in again._loops, timeout=3, what="it is known")
        asked = await w.ask("a", model="m2")
        await pass_time(5)
        await placed.add(broker(w), at(E2))
        await w.answers()
        assert whole([asked])
        await placed.remove(broker(w), E2)
        await pass_time(45)
        assert await remember(broker(w), []) == []
