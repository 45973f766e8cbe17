"""Simulated courses: what is sent when, counted by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from sim.fairness.cases import GEN
from sim.fairness.engine import FastEngine
from sim.fairness.fronts import Direct, EnginePriority, RateLimit
from sim.fairness.gateway import Gateway, Rules
from sim.fairness.jobs import Arrival, Result
from sim.fairness.order import Order
from sim.fairness.policies import POLICIES
from sim.fairness.world import World
from sim.settings import EngineSettings

ENGINE = EngineSettings(
    max_num_seqs=2, step_ms=10.0, per_seq_us=0.0, prefill_tokens_per_s=10_000.0,
    prefill_chunk_tokens=1_000,
)  # fmt: skip


def course(
    policy: str, arrivals: Sequence[Arrival], *, engines: int = 1, until: float = 1e3, **rules: Any
) -> Result:
    chosen = POLICIES[policy]
    settings = [ENGINE] * engines
    world = World([FastEngine(s) for s in settings])
    return world.run(chosen.front(world, Rules(**rules)), arrivals, until)


def test_without_gateway_requests_wait_in_the_engine() -> None:
    arrivals = [Arrival(0.0, u, 100, 10) for u in "abc"]
    result = course("direct", arrivals)
    # a: 100 tokens in one step; b comes into the second; c waits until a is done.
    steps = [j.seen for j in result.jobs]
    assert steps[0] == pytest.approx(0.02)
    assert steps[1] == pytest.approx(0.04)
    assert result.jobs[0].ended == pytest.approx(0.04 + 8 * 0.01)
    assert steps[2] == pytest.approx(0.12 + 0.02)
    assert result.ended == pytest.approx(result.jobs[2].ended or 0)


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    result = course("direct", [Arrival(0.0, "a", 100, 10)] * 4, engines=2)
    assert [j.engine for j in result.jobs] == [0, 1, 0, 1]


def test_a_gateway_costs_two_hops_and_keeps_the_queue_of_the_engine_short() -> None:
    arrivals = [Arrival(0.0, "a", 100, 50) for _ in range(20)]
    result = course("fair", arrivals, hop=0.003)
    assert result.jobs[0].seen == pytest.approx(0.003 + 0.02 + 0.003)
    assert max(s.waiting for s in result.samples) <= 3
    assert all(j.ended is not None for j in result.jobs)


@pytest.mark.parametrize("policy", ["fifo", "rr", "fair", "deep", "reserve"])
@pytest.mark.parametrize("delay", [0.0, 5.0])
def test_no_slot_stays_free_while_jobs_wait(policy: str, delay: float) -> None:
    arrivals = [Arrival(0.0, f"u{n % 3}", 100, 20 + n % 50) for n in range(60)]
    result = course(policy, arrivals, delay=delay)
    direct = course("direct", arrivals)
    assert result.ended <= direct.ended * 1.03


def test_the_reserve_is_for_users_with_nothing_in_flight() -> None:
    world = World([FastEngine(GEN)])
    gateway = Gateway(world, Order(), Rules(slots=32))
    arrivals = [Arrival(0.0, "a", 10, 900) for _ in range(40)] + [Arrival(5.0, "b", 10, 10)]
    result = world.run(gateway, arrivals, 20.0)
    assert sum(j.seen is not None for j in result.jobs if j.arrival.user == "a") == 31
    assert (result.jobs[-1].seen or 99) - 5.0 < 0.1


def test_the_youngest_batch_job_makes_room_and_runs_again() -> None:
    work = [Arrival(0.01 * n, "b", 100, 300, "batch", streams=False) for n in range(5)]
    chat = [Arrival(2.0, "c", 100, 10, "interactive"), Arrival(2.0, "d", 100, 10, "interactive")]
    settings = {"slots": 2, "headroom": 0, "reserved": 0, "floor": 0.0}
    taken, kept = (course(p, work + chat, **settings) for p in ("reserve", "no-yield"))
    waits = [[(j.seen or 99) - 2.0 for j in r.jobs[5:]] for r in (taken, kept)]
    assert max(waits[0]) < 0.1 < max(waits[1])
    assert all(j.ended is not None for j in taken.jobs)
    assert taken.served(0.0, 999.0) == sum(a.work for a in work + chat)


def test_a_rate_limit_lets_a_burst_through_and_then_one_at_a_time() -> None:
    world = World([FastEngine(ENGINE)])
    sent: list[float] = []

    class Watch(RateLimit):
        def _send(self, now: float, job: Any, priority: int) -> None:
            sent.append(now)
            super()._send(now, job, priority)

    arrivals = [Arrival(0.0, "a", 10, 1)] * 5 + [Arrival(20.0, "a", 10, 1)] * 4
    world.run(Watch(world, per_second=0.5, burst=2), arrivals, 100.0)
    assert sent == pytest.approx([0, 0, 2, 4, 6, 20, 20, 22, 24])


def test_an_engine_in_priority_mode_takes_a_users_first_before_others_tenth() -> None:
    settings = EngineSettings(**{**{f: getattr(ENGINE, f) for f in ENGINE.__struct_fields__},
                                 "priority_mode": True})  # fmt: skip
    arrivals = [Arrival(0.0, "a", 100, 10)] * 10 + [Arrival(0.05, "b", 100, 10)]
    waits = {}
    for front in (Direct, EnginePriority):
        world = World([FastEngine(settings)])
        result = world.run(front(world), arrivals, 100.0)
        waits[front] = (result.jobs[-1].seen or 99) - 0.05
    assert waits[EnginePriority] < waits[Direct] / 3


def test_a_run_that_is_cut_tells_how_long_the_rest_has_waited() -> None:
    result = course("direct", [Arrival(0.0, "a", 100, 900)] * 4, until=5.0)
    assert result.ended == 5.0
    assert sorted(result.ttfts(frozenset("a")))[2:] == [5.0, 5.0]
    assert result.served(0.0, 5.0) == pytest.approx(2 * 100 + 2 * 2 * 497, rel=0.01)
    assert result.sample(2.5).at == 2.0


def test_priorities_are_by_class_and_by_what_is_in_flight() -> None:
    world = World([FastEngine(ENGINE)])
    told: list[int] = []
    plain = world.send

    def send(now: float, job: Any, engine: int, hop: float, priority: int = 0) -> None:
        told.append(priority)
        plain(now, job, engine, hop, priority)

    world.send = send  # type: ignore[method-assign]
    arrivals = [
        Arrival(1.0, "a", 10, 10), Arrival(1.0, "a", 10, 10),
        Arrival(1.0, "b", 10, 10, "interactive"),
    ]  # fmt: skip
    world.run(Gateway(world, Order(), Rules(limit=9, priority=True)), arrivals, 10.0)
    assert told == [1_000, 1_001, 0]
