"""The fast engine does what the engine model does, at the same times."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import Engine
from sim.events import EngineRequest, Finished
from sim.fairness.engine import FastEngine
from sim.settings import EngineSettings

Fact = tuple[str, int, float]


def constants(
    slots: int = 8, chunk: int = 256, kv: int = 100_000, priorities: bool = False
) -> EngineSettings:
    return EngineSettings(
        max_num_seqs=slots, prefill_chunk_tokens=chunk, kv_tokens=kv, max_model_len=kv,
        step_ms=9.7, per_seq_us=313.0, prefill_tokens_per_s=7_919.0, priority_mode=priorities,
    )  # fmt: skip


def slow(engine: Engine, now: float) -> list[Fact]:
    facts: list[Fact] = []
    for event in engine.advance(now):
        if isinstance(event, Finished):
            facts.append(("end", event.request_id, event.at))
        elif event.index == 0:
            facts.append(("first", event.request_id, event.at))
    return facts


def same(ours: list[Fact], theirs: list[Fact]) -> None:
    """Equal but for the order within one instant and the last digits of sums."""
    assert [f[:2] for f in sorted(ours, key=lambda f: (f[1], f[0]))] == [
        f[:2] for f in sorted(theirs, key=lambda f: (f[1], f[0]))
    ]
    pairs = zip(sorted(ours, key=lambda f: f[1::-1]), sorted(theirs, key=lambda f: f[1::-1]),
                strict=True)  # fmt: skip
    for mine, other in pairs:
        assert mine[2] == pytest.approx(other[2], abs=1e-6), (mine, other)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    slots=st.integers(1, 8),
    chunk=st.sampled_from([16, 64, 256]),
    kv=st.sampled_from([200, 300, 700, 100_000]),
    gap=st.sampled_from([0.01, 0.1, 0.5]),
    priorities=st.booleans(),
    aborts=st.sampled_from([0.0, 0.5]),
)
def test_the_fast_engine_equals_the_engine_model(
    seed: int, slots: int, chunk: int, kv: int, gap: float, priorities: bool,
    aborts: float,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    constant = constants(slots, chunk, kv, priorities)
    fast, model, now = FastEngine(constant), Engine(constant), 0.0
    ours: list[Fact] = []
    theirs: list[Fact] = []
    for _ in range(40):
        now += rng.expovariate(1 / gap)
        ours += [(h.kind, h.id, h.at) for h in fast.advance(now)]
        theirs += slow(model, now)
        gauges, facts = model.gauges(), fast.facts(now)
        assert (facts.waiting, facts.running, facts.preemptions) == (
            gauges.waiting, gauges.running, gauges.preemptions,
        )  # fmt: skip
        assert facts.kv == pytest.approx(gauges.kv_usage)
        prompt, output, urgency = rng.randint(1, 120), rng.randint(1, 60), rng.randint(0, 2)
        request = EngineRequest(prompt_tokens=prompt, output_tokens=output, priority=urgency)
        assert fast.submit(now, prompt, output, urgency) == model.submit(now, request)
        if rng.random() < aborts:
            gone = rng.randint(1, 60)
            assert fast.abort(now, gone) == model.abort(now, gone)
    while (end := fast.next_event()) is not None:
        ours += [(h.kind, h.id, h.at) for h in fast.advance(end + 1e-9)]
    theirs += slow(model, now + 1e4)
    same(ours, theirs)


def test_tokens_so_far_are_told_between_events() -> None:
    fast = FastEngine(constants(slots=2))
    one = fast.submit(0.0, 100, 50)
    step, first = 0.0097 + 0.000313, 0.0097 + 0.000313 + 100 / 7_919
    assert fast.generated(first / 2, one) == 0
    fast.advance(first)
    assert [fast.generated(first + (n + 0.5) * step, one) for n in range(4)] == [1, 2, 3, 4]
    assert fast.generated(9.0, 77) == 0


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (99_999, 2)])
def test_a_request_that_cannot_run_is_refused(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="cannot run"):
        FastEngine(constants()).submit(0.0, prompt, output)
