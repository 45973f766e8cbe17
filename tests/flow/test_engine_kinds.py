"""Fairlane in front of engines of each kind that can be simulated, and of one without metrics."""

import pytest

from common.outcomes import Outcome
from dispatcher.backend import Backend
from sim.settings import EngineSettings, Face
from sim.transport import EngineTransport
from tests.flow.world import World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

FACES: list[Face] = ["vllm", "tgi", "sglang"]


def engine(face: Face, **more: object) -> EngineSettings:
    values: dict[str, object] = {"model": "m1", "engine": face, "max_num_seqs": 4, "step_ms": 20.0}
    return EngineSettings(**{**values, **more})  # type: ignore[arg-type]


def backend(w: World) -> Backend:
    return w.dispatchers[0][1]._loops["m1"].backends[0]


@pytest.mark.parametrize("face", FACES)
async def test_an_engine_is_recognised_and_its_load_limits_what_it_gets(
    monkeypatch: pytest.MonkeyPatch, face: Face
) -> None:
    async with world(monkeypatch, {"e1": engine(face)}) as w:
        asked = [await w.ask(f"u{n % 3}", output=60, stream=bool(n % 2)) for n in range(40)]
        await wait_until(lambda: backend(w).reading.kind == face, timeout=5)
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert 1 <= w.engines["e1"].peak_waiting <= 3
        facts = backend(w).load.facts
        assert facts is not None and facts.tpot is not None
        assert facts.tpot.seconds / facts.tpot.count == pytest.approx(0.02, rel=0.1)
        assert facts.generated is not None and facts.generated > 400


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_busy_engine_refuses_is_sent_again_and_not_held_against_the_job(
    monkeypatch: pytest.MonkeyPatch, face: Face, stream: bool
) -> None:
    """Its own queue is shorter than what Fairlane lets wait in it."""
    async with world(
        monkeypatch, {"e1": engine(face, max_num_queued_reqs=1)}, dispatcher={"tries_max": 1}
    ) as w:
        asked = [await w.ask(f"u{n % 3}", output=60, stream=stream) for n in range(30)]
        await w.answers()
        assert {(a.outcome, a.status) for a in asked} == {(Outcome.FINISHED, 200)}
        assert w.engines["e1"].engine.stats.rejected > 0
        assert not any(b"overloaded" in a.data or b"queue is full" in a.data for a in asked)


async def test_an_engine_without_metrics_is_never_asked_for_them_and_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = [{"url": "http://e1", "engine": "none"}]
    async with world(monkeypatch, {"e1": engine("vllm")}, model={"backends": backends}) as w:
        sim = w.engines["e1"]
        asked = [await w.ask("u", output=10) for _ in range(12)]
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert backend(w).reading.kind == "none" and not backend(w).metrics_up
        assert {r.path for r in sim.log} == {"/v1/models", "/v1/chat/completions"}
        await pass_time(20)
        assert backend(w).reachable
        sim.kill()
        await wait_until(lambda: backend(w).reachable is False, timeout=5)
        sim.revive()
        await wait_until(lambda: backend(w).reachable, timeout=2)


async def test_another_engine_behind_the_same_url_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine("vllm")}) as w:
        await w.answers(await w.ask("u"))
        assert backend(w).reading.kind == "vllm"
        w.engines["e1"].kill()
        await pass_time(10)
        w.engines["e1"] = EngineTransport(engine("sglang"))
        asked = [await w.ask("u", output=100) for _ in range(20)]
        await wait_until(lambda: backend(w).reading.kind == "sglang", timeout=3)
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert w.engines["e1"].peak_waiting <= 3
