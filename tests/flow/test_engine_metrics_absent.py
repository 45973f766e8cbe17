"""What an engine's page does not say is unknown, not 0, and what is optional changes nothing."""

import httpx
import msgspec
import pytest

from common.outcomes import Outcome
from dispatcher.blind import START
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.flow.world import World, world
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime

ENGINE = EngineSettings(model="m1", max_num_seqs=2, step_ms=20.0, seed=1)
LOAD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
HISTOGRAM = "vllm:inter_token_latency_seconds"
LABELS = {"model": "m1", "backend": "http://e1"}


class Older(EngineTransport):
    """An engine whose page has only samples that begin with one of `kept`."""

    def __init__(self, settings: EngineSettings, kept: tuple[str, ...]) -> None:
        super().__init__(settings)
        self._kept = kept

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path != "/metrics":
            return response
        lines = (await response.aread()).decode().splitlines(keepends=True)
        kept = "".join(line for line in lines if line.startswith(self._kept))
        return httpx.Response(200, text=kept)


def exported(w: World, name: str) -> float | None:
    return w.registries["d0"].get_sample_value(f"fairlane_backend_{name}", LABELS)


async def sent(monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...]) -> list[tuple[float, int]]:
    """When which job of a fixed load was sent to an engine with such a page."""
    async with world(monkeypatch, {"e1": ENGINE}) as w:
        w.engines["e1"] = Older(ENGINE, kept)
        await pass_time(5)
        asked = [await w.ask(f"u{n % 3}", output=40, stream=False) for n in range(30)]
        order = {a.job: n for n, a in enumerate(asked)}
        for _ in range(8):
            await pass_time(0.25)
            assert HISTOGRAM.startswith(kept) or exported(w, "tpot_seconds") is None
            assert exported(w, "foreign") == (0 if LOAD[1].startswith(kept) else None)
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        calls = [r for r in w.engines["e1"].log if r.method == "POST"]
        began = calls[0].at
        return [
            (round(r.at - began, 1), n)
            for r in calls
            for job, n in order.items()
            if job.encode() in r.body
        ]


async def test_without_what_is_optional_the_same_is_sent_at_the_same_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = await sent(monkeypatch, ("vllm:",))
    assert len(whole) == 30 and whole[-1][0] > 5
    assert await sent(monkeypatch, LOAD) == whole


async def test_without_the_number_that_waits_less_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await sent(monkeypatch, ("vllm:",))
    blind = await sent(monkeypatch, LOAD[2:])
    assert blind != whole


async def running(
    monkeypatch: pytest.MonkeyPatch, *, even: bool, **model: object
) -> tuple[list[int], list[int]]:
    """What runs and what waits in an engine of 12 slots without metrics, each eighth of a second,
    while more answers are to come that do not stream."""
    engine = msgspec.structs.replace(ENGINE, max_num_seqs=12)
    model["backends"] = [{"url": "http://e1", "engine": "none"}]
    async with world(monkeypatch, {"e1": engine}, model=model) as w:
        for n in range(240):
            await w.ask(f"u{n % 3}", output=30 if even else 10 + 11 * n % 50, stream=False)
        seen = []
        for _ in range(80):
            await pass_time(0.125)
            seen.append((w.engines["e1"].running(), w.engines["e1"].waiting()))
    runs, waits = zip(*seen, strict=True)
    assert runs[0] <= START + 1
    return list(runs), list(waits)


@pytest.mark.parametrize("even", [False, True])
async def test_without_metrics_and_streams_it_is_learned_how_many_run_at_once(
    monkeypatch: pytest.MonkeyPatch, even: bool
) -> None:
    runs, waits = await running(monkeypatch, even=even)
    assert sum(runs[40:]) / 40 >= 11.5
    assert max(waits) <= 6 and sum(waits[40:]) / 40 <= 3


async def test_not_where_the_engine_orders_its_queue_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, _ = await running(monkeypatch, even=False, engine_priority=True)
    assert max(runs) <= START + 1
