"""Learned slots that are too few: found out by probes whatever the other backends are like."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from common.keys import GROUPS
from common.metrics import DispatcherMetrics
from common.settings import ModelSettings
from dispatcher.backend import Backend
from dispatcher.engines.facts import EngineFacts
from dispatcher.facts import Facts
from dispatcher.health import MISSES_MAX
from dispatcher.routing import Router
from dispatcher.slots import PROBE_S
from dispatcher.turns import Round
from dispatcher.why import Why
from tests.unit.test_facts import NONE, backends, run

METRICS = DispatcherMetrics(CollectorRegistry())
WAITING = {**NONE, "batch": 9}


def too_few(backend: Backend, slots: int) -> None:
    """It is learned that it has so many slots."""
    for n in range(20):
        backend.load.polled(2 + n, EngineFacts(1, slots, None), period=10_000)
    backend.load.polled(30, EngineFacts(0, 0, None), period=10_000)
    assert backend.load.slots.value == slots


def drained(backend: Backend, now: float) -> None:
    backend.drained = True


def refuses(backend: Backend, now: float) -> None:
    backend.sent(now, "refused", "batch", streams=True)
    backend.refused(now, "refused")


def dead(backend: Backend, now: float) -> None:
    for _ in range(MISSES_MAX):
        backend.unread(now, refused=True)
    refuses(backend, now)


def full(backend: Backend, now: float) -> None:
    for n in range(backend.load.unstarted, 64):
        backend.sent(now, f"{backend.url}{n}", "batch", streams=True)


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("how", [drained, dead, refuses, full])
def test_what_holds_batch_back_is_probed_beside_any_other_backends(
    how: Callable[[Backend, float], None], first: bool
) -> None:
    three = backends(None, None, None)
    small = three[0 if first else 2]
    too_few(small, 4)
    facts = Facts(ModelSettings(), three)
    run(small, 3, "batch")
    room, now = 0, 100.0
    while not room and now < 100 + 3 * PROBE_S:
        now += 0.5
        for other in three:
            if other is not small:
                how(other, now)
        turns = Round(GROUPS["weighted"], facts.rules, Router())
        view = facts.view(now, WAITING, (), look=False, most=64)
        room = view.room("batch", False)[small.url].room
        if not room:
            assert turns.next(view) is None
            facts.closed(now, turns.why, WAITING, "m1", METRICS, turns.held)
    assert room > 0


def test_nothing_is_probed_while_others_are_what_waits() -> None:
    (small,) = one = backends(None)
    too_few(small, 4)
    facts = Facts(ModelSettings(), one)
    run(small, 3, "batch")
    full(small, 99)
    for now in range(100, 400, 10):
        waiting = {**WAITING, "standard": 5}
        turns = Round(GROUPS["weighted"], facts.rules, Router())
        assert turns.next(facts.view(now, waiting, (), look=False, most=64)) is None
        facts.closed(now, turns.why, waiting, "m1", METRICS, turns.held)
        assert not small.load.slots.probed


def test_jobs_at_backends_that_are_not_used_take_none_of_the_slots_kept() -> None:
    """A probe begins when the reserve is taken."""
    two = backends(None, None)
    for backend in two:
        too_few(backend, 32)
        run(backend, 31)
    two[1].drained = True
    facts = Facts(ModelSettings(), two)
    now = two[0].load.slots.confirmed_at + PROBE_S + 1
    for taken in (31, 32):
        view = facts.view(now, WAITING, (), look=False, most=64)
        assert (view.busy_max, view.taken) == (31, taken)
        facts.closed(now, Why.RESERVED, WAITING, "m1", METRICS)
        assert two[0].load.slots.probed == (taken == 32)
        two[0].sent(now, "light", "standard", streams=True)
