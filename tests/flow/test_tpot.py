"""A limit of time per output token keeps batch from making everybody's streams slow."""

import asyncio
import random
import statistics

import pytest

from common.wire import JobMeta
from dispatcher.tpot import CHUNKS_MIN, HELD_UP_S
from sim.settings import EngineSettings
from tests.flow.pops import Pops
from tests.flow.world import World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

STEP_MS, PER_JOB_MS = 20.0, 2.0
"""A step, and how much longer it is for each job in it."""
PEOPLE = 8
LIMIT_MS = 60.0
FITS = (LIMIT_MS - STEP_MS) / PER_JOB_MS - PEOPLE
"""Batch jobs with which a step is as long as the limit: 12."""
SETTLED_S = 12.0
LASTS_S = 40.0


async def person(w: World, user: str, gaps: list[float]) -> None:
    """Chats without a pause; the mean gap between chunks of each answer that came once settled."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while (now := loop.time()) < began + LASTS_S:
        asked = await w.ask(user, output=50, cls="interactive")
        await w.answers(asked)
        assert asked.first_at is not None
        if now >= began + SETTLED_S:
            gaps.append((loop.time() - asked.first_at) / 49)


async def beside_batch(
    monkeypatch: pytest.MonkeyPatch, batch: dict[str, object]
) -> tuple[float, list[int], dict[str, float]]:
    """Mean gap of all that chat, ms; batch jobs in flight, sampled; what metrics say at the end."""
    engine = EngineSettings(
        model="m1", max_num_seqs=128, step_ms=STEP_MS, per_seq_us=PER_JOB_MS * 1e3
    )
    model: dict[str, object] = {"class": {"batch": batch}}
    async with world(monkeypatch, {"e1": engine}, model=model) as w:
        load = Pops(w, monkeypatch).loop.backends[0].load
        rng = random.Random(1)
        for n in range(300):
            await w.ask(f"b{n % 3}", output=rng.randint(50, 250), cls="batch")
        gaps: list[float] = []
        people = [asyncio.ensure_future(person(w, f"c{n}", gaps)) for n in range(PEOPLE)]
        await pass_time(SETTLED_S)
        flying = []
        while not all(p.done() for p in people):
            flying.append(load.inflight("batch"))
            await pass_time(0.1)
        await asyncio.gather(*people)
        metric = w.registries["d0"].get_sample_value
        backend, closed = "fairlane_backend_tpot_seconds", "fairlane_admission_closed_total"
        told = {
            "tpot": metric(backend, {"model": "m1", "backend": "http://e1"}) or 0.0,
            "closed": metric(closed, {"model": "m1", "reason": "tpot"}) or 0.0,
        }
        mean = statistics.mean(gaps) * 1e3
        print(
            f"{mean=:.1f} ms, batch {min(flying)}..{max(flying)}, "
            f"mean {statistics.mean(flying):.1f}, {told}"
        )
        return mean, flying, told


async def test_batch_stops_where_streams_would_be_slower_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mean, flying, told = await beside_batch(monkeypatch, {"tpot_ms": LIMIT_MS})
    assert 0.7 * LIMIT_MS <= mean <= LIMIT_MS, "below it nine tenths of the time"
    assert 0.5 * FITS <= statistics.mean(flying) <= FITS
    assert max(flying) <= 3 * FITS
    assert told["closed"] > 0
    assert 0.5 * LIMIT_MS <= told["tpot"] * 1e3 <= 2 * LIMIT_MS


async def test_without_the_limit_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, flying, told = await beside_batch(monkeypatch, {})
    assert mean >= 2 * LIMIT_MS
    assert max(flying) >= 5 * FITS
    assert told["closed"] == 0


# --- what is measured


def one_engine() -> dict[str, EngineSettings]:
    return {"e1": EngineSettings(model="m1", step_ms=50.0, per_seq_us=0.0)}


@pytest.mark.parametrize("choices", [1, 2])
async def test_only_streams_of_one_choice_are_measured(
    choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meta(**fields: object) -> JobMeta:
        return JobMeta(**{**fields, "choices": choices})  # type: ignore[arg-type]

    monkeypatch.setattr("tests.flow.world.JobMeta", meta)
    async with world(monkeypatch, one_engine()) as w:
        tpot = Pops(w, monkeypatch).loop.backends[0].load.signal.gaps
        asked = await w.ask("u", output=2 * CHUNKS_MIN)
        await w.answers(asked)
        assert asked.data.count(b"data:") >= 2 * CHUNKS_MIN
        mean = tpot.mean(asyncio.get_running_loop().time())
        assert mean == (pytest.approx(0.05, rel=0.05) if choices == 1 else None)


async def test_a_stream_that_its_client_held_up_is_not_measured_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.publish.JOB_WINDOW", 20_000)
    loop = asyncio.get_running_loop()
    async with world(monkeypatch, one_engine()) as w:
        tpot = Pops(w, monkeypatch).loop.backends[0].load.signal.gaps
        asked = await w.ask("u", output=600)
        await wait_until(lambda: tpot.mean(loop.time()) is not None, timeout=5, what="a mean")
        reply = w.gateways[0][1]._replies[asked.job]
        assert asked.task is not None
        asked.task.cancel()
        await pass_time(12.0)
        assert tpot.mean(loop.time()) is None
        seen = len(asked.data)
        asked.task = asyncio.ensure_future(w._follow(asked, reply))
        await pass_time(0.9 * HELD_UP_S)
        assert asked.data.count(b"data:", seen) > 3 * CHUNKS_MIN, "what gathered came"
        assert tpot.mean(loop.time()) is None
        await wait_until(lambda: tpot.mean(loop.time()) is not None, timeout=5, what="another")
        assert tpot.mean(loop.time()) == pytest.approx(0.05, rel=0.05)
