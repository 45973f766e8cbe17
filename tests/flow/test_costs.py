"""What users are charged with each kind of fairness: expected at first, raised as it comes, real in
the end; by the real dispatcher, in virtual time."""

import asyncio
import itertools

import msgspec
import pytest

from common.cost import OUTPUT_ALPHA, TYPICAL, pricing
from common.keys import ModelKeys
from common.wire import Usage
from sim.settings import EngineSettings
from tests.flow.world import World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

STEP_MS = 50
ENGINE = EngineSettings(model="m1", max_num_seqs=8, step_ms=STEP_MS, per_seq_us=0.0)
MODELS: dict[str, dict[str, object]] = {
    "requests": {"fairness": "requests"},
    "tokens": {"fairness": "tokens"},
    "tokens of its own": {"tokens": {"input": 2, "cached": 1, "output": 5}},
    "time": {"fairness": "time"},
    "price": {"fairness": "price", "price": {"input": 0.1, "cached_input": 0.01, "output": 0.4}},
    "kv": {"fairness": "kv"},
}
KEYS = ModelKeys("m1")
COUNTER = KEYS.classes["standard"].counter


async def counter(w: World, user: str) -> float:
    """Of a user with nothing waiting."""
    return float(await w.gateways[0][0].broker.command("HGET", COUNTER, user) or 0)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "body"])
async def test_an_answer_costs_what_it_took(
    model: dict[str, object], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=model) as w:
        prices = pricing(w.settings.models["m1"])
        asked = await w.ask("ann", output=120, stream=stream)
        await wait_until(lambda: w.engines["e1"].running() == 1, what="it runs")
        terms = prices.terms(10, 120)
        x = min(prices.start, terms.most)
        booked = terms.fixed + terms.per_unit * x + terms.per_square * x * x
        assert await counter(w, "ann") == pytest.approx(booked), "what is expected counts at once"
        await w.answers()
        took = asyncio.get_running_loop().time() - asked.asked_at
        assert 120 * STEP_MS / 1000 <= took < 120 * STEP_MS / 1000 + 1
        assert asked.end is not None and asked.end.usage is not None
        usage = asked.end.usage
        assert usage.output == 120 and usage.input > 0
        await wait_until(lambda: w.engines["e1"].running() == 0, what="its end")
        slack = 500.0 if prices.ms else 0.0
        assert await counter(w, "ann") == pytest.approx(prices.real(usage, took), abs=slack + 1e-6)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "body"])
async def test_input_that_the_engine_had_computed_costs_less(
    model: dict[str, object], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = msgspec.structs.replace(ENGINE, cached_tokens=250)
    async with world(monkeypatch, {"e1": engine}, model=model) as w:
        prices = pricing(w.settings.models["m1"])
        asked = await w.ask("ann", output=10, stream=stream, text="x " * 500)
        await w.answers()
        took = asyncio.get_running_loop().time() - asked.asked_at
        assert asked.end is not None and asked.end.usage is not None
        usage = asked.end.usage
        assert usage.cached == 250 > 0.9 * usage.input
        slack = 500.0 if prices.ms else 0.0
        charged = await counter(w, "ann")
        assert charged == pytest.approx(prices.real(usage, took), abs=slack + 1e-6)
        full = prices.real(Usage(usage.input, 0, usage.output), took)
        assert (charged < full / 2) == (prices.cached < prices.input / 2)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
async def test_what_is_learned_of_a_user(
    model: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=model) as w:
        prices = pricing(w.settings.models["m1"])
        expected = 0.0
        for n, output in enumerate((20, 120)):
            asked = await w.ask("ann", output=output)
            await w.answers()
            took = asyncio.get_running_loop().time() - asked.asked_at
            unit = took * 1000 if prices.ms else output
            expected += (unit - expected) * (OUTPUT_ALPHA if n else 1.0)
            mean = float(await w.gateways[0][0].broker.command("HGET", KEYS.ewma, "ann"))
            assert mean == pytest.approx(expected, abs=500 if prices.ms else 1e-9)


@pytest.mark.parametrize("fairness", ["tokens", "time", "kv"])
async def test_a_charge_rises_while_an_answer_outgrows_what_was_expected(
    fairness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model={"fairness": fairness}) as w:
        asked = await w.ask("ann", output=1_000)  # 50 s; 200 tokens, or 5 s, are expected
        await wait_until(lambda: asked.first_at is not None, what="its first byte")
        seen = [await counter(w, "ann")]
        for _ in range(4):
            await pass_time(11)
            seen.append(await counter(w, "ann"))
        assert asked.end is None
        rises = [b - a for a, b in itertools.pairwise(seen)]
        assert rises[0] >= 0 and min(rises[1:]) > 300
        await w.answers()
        assert await counter(w, "ann") > seen[-1]


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
async def test_two_users_of_like_jobs_take_turns(
    model: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kind: one who comes second is not behind all of the first one's jobs."""
    engine = EngineSettings(model="m1", max_num_seqs=2, step_ms=STEP_MS, per_seq_us=0.0)
    async with world(monkeypatch, {"e1": engine}, model=model) as w:
        flood = [await w.ask("A", output=TYPICAL.output // 10) for _ in range(24)]
        await pass_time(0.5)
        late = [await w.ask("B", output=TYPICAL.output // 10) for _ in range(4)]
        await w.answers()
        behind = max(a.first_at or 0 for a in late)
        assert sum((a.first_at or 0) > behind for a in flood) >= 8
