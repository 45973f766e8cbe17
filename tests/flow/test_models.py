"""Models that come and go with what engines list. Virtual time, real code of both sides."""

import pytest
from prometheus_client.metrics import MetricWrapperBase

from common import keys, placed
from common.settings import BackendSettings
from common.wire import decode_announcement
from dispatcher.server import Dispatcher
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.flow.world import world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

ENGINE = EngineSettings(model="m1", max_num_seqs=4, step_ms=100, seed=1)


def with_adapter(name: str) -> EngineTransport:
    return EngineTransport(EngineSettings(model=("m1", name), max_num_seqs=4, step_ms=100, seed=1))


def measured(d: Dispatcher) -> set[str]:
    """The models that its metrics name."""
    metrics = [m for m in vars(d._metrics).values() if isinstance(m, MetricWrapperBase)]
    samples = [s for m in metrics for family in m.collect() for s in family.samples]
    return {s.labels["model"] for s in samples if "model" in s.labels}


async def test_a_model_that_is_known_no_more_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not before its jobs have ended, wherever they wait."""
    monkeypatch.setattr("common.known.FORGOTTEN_MS", 30_000)
    monkeypatch.setattr("dispatcher.server.MODELS_MAX", 2)
    async with world(monkeypatch, {"e1": ENGINE}, model={"backends": []}) as w:
        w.settings.models["a"] = w.settings.models["b"] = w.settings.models["m1"]
        broker, dispatchers = w.gateways[0][0].broker, [d for _, d in w.dispatchers]
        for d in dispatchers:
            d._settings = type(d._settings)(models={"m1": w.settings.models["m1"]})
        w.engines["e1"] = with_adapter("a")
        await placed.add(broker, BackendSettings(url="http://e1"))
        await wait_until(lambda: all("a" in d._loops for d in dispatchers), timeout=12)
        w.engines["e1"] = with_adapter("b")
        await pass_time(12)
        waits = await w.ask("u", model="a")
        await pass_time(60)
        assert all("a" in d._loops and "b" not in d._loops for d in dispatchers)
        assert caplog.text.count("not served: b") <= 2 * len(dispatchers), "once a minute"
        w.engines["e1"] = with_adapter("a")
        await w.answers()
        assert waits.end is not None
        w.engines["e1"] = with_adapter("b")
        for d in dispatchers:
            await wait_until(lambda d=d: d._loops.get("b") and d._loops["b"].backends, timeout=90)  # type: ignore[misc]
            assert set(d._loops) == set(d._looping) == {"m1", "b"}
            assert measured(d) == {"m1", "b"}
        asked = await w.ask("u", model="b")
        await w.answers()
        assert asked.end is not None


async def test_a_model_that_comes_back_while_it_is_forgotten_is_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lead is given up meanwhile, which takes as long as Redis does."""
    monkeypatch.setattr("common.known.FORGOTTEN_MS", 30_000)
    async with world(monkeypatch, {"e1": ENGINE}, model={"backends": []}) as w:
        (_, d), broker = w.dispatchers[0], w.gateways[0][0].broker
        w.engines["e1"] = with_adapter("a")
        await placed.add(broker, BackendSettings(url="http://e1"))
        await wait_until(lambda: "a" in d._loops, timeout=12)
        old = d._loops["a"]
        stop = old.stop

        async def back() -> None:
            w.engines["e1"] = with_adapter("a")
            await wait_until(lambda: "a" in d._loops, timeout=20)
            await stop()

        monkeypatch.setattr(old, "stop", back)
        w.engines["e1"] = with_adapter("b")
        await wait_until(lambda: d._loops.get("a") is not old, timeout=90)
        await wait_until(lambda: "a" in d._loops and d._loops["a"].election.leads, timeout=30)
        await pass_time(3)
        assert d._loops["a"].queue.keys.bell in d._subscriber._channels
        assert "a" in measured(d) and "a" in d._others._live


@pytest.mark.parametrize("after", [0.0, 2.0])
async def test_a_job_that_comes_while_its_model_is_forgotten_ends(
    monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    """Gateways take jobs until they know that the model is served no more."""
    monkeypatch.setattr("common.known.FORGOTTEN_MS", 30_000)
    async with world(monkeypatch, {"e1": ENGINE}, model={"backends": []}) as w:
        w.settings.models["a"] = w.settings.models["m1"]
        (_, d), broker = w.dispatchers[0], w.gateways[0][0].broker
        d._settings = type(d._settings)(models={"m1": w.settings.models["m1"]})

        async def announced() -> bool:
            data = await broker.command("HGET", keys.MODELS, d.owner)
            return bool(data) and "a" in {m.name for m in decode_announcement(data).models}

        async def no_more() -> bool:
            return not await announced()

        w.engines["e1"] = with_adapter("a")
        await placed.add(broker, BackendSettings(url="http://e1"))
        await wait_until(announced, timeout=12)
        w.engines["e1"] = with_adapter("b")
        await wait_until(no_more, timeout=90)
        await pass_time(after)
        asked = await w.ask("u", model="a", wait_ms=15_000)
        await wait_until(lambda: asked.end, timeout=30, what="its deadline")
        await wait_until(lambda: "a" not in d._loops, timeout=90, what="then it is")
        w.engines["e1"] = with_adapter("a")
        await w.answers(await w.ask("u", model="a"))
