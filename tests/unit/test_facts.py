"""What the leader knows of its backends as it decides."""

import pytest
from prometheus_client import CollectorRegistry

from common.cost import Terms
from common.jobs import Lease
from common.metrics import DispatcherMetrics
from common.settings import BackendSettings, ClassSettings, ModelSettings
from dispatcher.aimd import START
from dispatcher.backend import Backend
from dispatcher.engines.facts import EngineFacts
from dispatcher.facts import Facts, wanted
from dispatcher.routing import Router
from dispatcher.turns import Round, Rules, View
from dispatcher.why import Why

NONE = {"interactive": 0, "standard": 0, "batch": 0}
METRICS = DispatcherMetrics(CollectorRegistry())


def backends(*slots: int | None) -> list[Backend]:
    """Reachable and idle, their metrics fresh for long."""
    made = [
        Backend(BackendSettings(url=f"http://gpu{i}:8000", max_num_seqs=n))
        for i, n in enumerate(slots)
    ]
    for backend in made:
        backend.load.polled(0, EngineFacts(0, 0, 0.0), period=1_000)
        backend.health.connected(0)
    return made


def run(backend: Backend, count: int, cls: str = "standard") -> None:
    for i in range(count):
        backend.sent(1, f"{backend.url}{cls}{i}", cls, streams=True)
        backend.started(1, f"{backend.url}{cls}{i}")


def view(facts: Facts) -> View:
    return facts.view(1, NONE, (), look=False, most=64)


def lease(backend: Backend, n: int, cls: str = "batch") -> Lease:
    return Lease(
        job=f"{backend.url}{cls}{n}", user="b", cls=cls, attempt=1, backend=backend.url,
        charged=1.0, terms=Terms(1, 1, 0, 1), weight=1.0, meta=b"", channel="", replica="",
        tries=0, arrival=n, deadline_ms=1, inflight=0, body=b"",
    )  # fmt: skip


def test_places_are_as_the_backends_and_the_class_s_limit_have_them() -> None:
    two = backends(16, 16)
    run(two[0], 2)
    limits = {"interactive": ClassSettings(queue_limit=5)}
    seen = view(Facts(ModelSettings(class_=limits), two))  # type: ignore[arg-type]
    places = {cls: seen.room(cls, False) for cls in NONE}
    assert [p.room for p in places["interactive"].values()] == [5, 5]
    assert [p.room for p in places["standard"].values()] == [3, 3]
    assert [(p.room, p.inflight) for p in places["batch"].values()] == [(1, 2), (1, 0)]
    assert [p.room for p in seen.room("batch", True).values()] == [3, 3], "for its floor share"
    run(two[1], 15, "batch")
    assert seen.room("batch", False)[two[1].url].why is Why.SLOTS


def test_each_class_has_its_own_limit_of_time_per_output_token() -> None:
    two = backends(None, None)
    for b in two:
        run(b, 1)
    two[0].load.signal.gaps.add(1, 0.12 * 20, 20)
    limits = {"standard": ClassSettings(tpot_ms=150), "batch": ClassSettings(tpot_ms=100)}
    seen = view(Facts(ModelSettings(class_=limits), two))  # type: ignore[arg-type]
    for floor in (False, True):
        assert [p.why for p in seen.room("batch", floor).values()] == [Why.TPOT, Why.OPEN]
    two[0].load.signal.gaps.add(1, 0.24 * 20, 20)
    assert [p.room for p in seen.room("standard", False).values()] == [0, 3], "0.18 s"
    assert [p.room for p in seen.room("interactive", False).values()] == [3, 3]


@pytest.mark.parametrize(
    ("waiting", "inflight", "slots"), [((0, 0, 0), (0, 0, 0), 0), ((1, 5, 0), (1, 2, 0), 9),
                                       ((0, 0, 9), (0, 0, 1), 4), ((0, 2, 9), (0, 1, 6), 7)],
)  # fmt: skip
def test_slots_are_wanted_for_what_waits_and_runs_as_far_as_its_class_may(
    waiting: tuple[int, ...], inflight: tuple[int, ...], slots: int
) -> None:
    settings = ModelSettings(class_={"batch": ClassSettings(inflight_max=4)})
    rules = Facts(settings, []).rules
    counts = (dict(zip(NONE, n, strict=True)) for n in (waiting, inflight))
    assert wanted(*counts, rules) == slots


def test_time_per_output_token_is_exported_while_it_is_known() -> None:
    (backend,) = backends(None)
    registry = CollectorRegistry()
    metrics, facts = DispatcherMetrics(registry), Facts(ModelSettings(), [backend])
    exported = []
    for now in (1.0, 1.5, 4.0):
        facts.measure(now, "m1", metrics, NONE)
        labels = {"model": "m1", "backend": backend.url}
        exported.append(registry.get_sample_value("fairlane_backend_tpot_seconds", labels))
        backend.load.signal.gaps.add(now, 0.5, 20)
    assert exported == [None, 0.025, None]


def test_slots_and_jobs_of_backends_that_cannot_be_used_do_not_count() -> None:
    two = backends(32, 32)
    run(two[0], 30)
    run(two[1], 20, "batch")
    facts = Facts(ModelSettings(), two)
    seen = view(facts)
    assert (seen.busy_max, seen.taken) == (62, 50)
    two[1].sent(1, "more", "batch", streams=True)
    two[1].refused(1, "more")
    seen = view(facts)
    assert (seen.busy_max, seen.taken) == (31, 30)
    assert seen.inflight == {"interactive": 0, "standard": 30, "batch": 20}


def test_a_total_is_divided_among_the_backends_for_batch() -> None:
    two = backends(None, None)
    for n in (14, 15):
        seen = view(Facts(ModelSettings(slots=32), two))
        assert seen.busy_max == 31
        run(two[0], n)
    room = view(Facts(ModelSettings(slots=32), two)).room("batch", False)
    assert [p.room for p in room.values()] == [0, 1]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_of_fewer_slots_than_backends_each_has_one_for_batch(slots: int) -> None:
    """Not as many as it takes: what is configured is known."""
    three = backends(None, None, None)
    for backend in three:
        run(backend, 1, "batch")
    facts = Facts(ModelSettings(slots=slots), three)
    for usable in (3, 1):
        for backend in three[usable:]:
            backend.drained = True
        places = view(facts).room("batch", False)
        assert {places[b.url].why for b in three[:usable]} == {Why.SLOTS}


def test_rules_are_the_class_s_settings() -> None:
    settings = {"standard": ClassSettings(inflight_max=7, user_inflight_max=2)}
    facts = Facts(ModelSettings(class_=settings), [])  # type: ignore[arg-type]
    assert facts.rules == {"interactive": Rules(), "standard": Rules(7, 2), "batch": Rules()}
    assert view(facts).busy_max is None


def test_slots_that_batch_would_give_back_are_free_for_others() -> None:
    two = backends(32, 32)
    run(two[0], 10)
    run(two[1], 20, "batch")
    facts, turns = Facts(ModelSettings(), two), Round((), {}, Router())
    for n in range(5):
        facts.sent(lease(two[1], n), floor=n == 0)
        facts.sent(lease(two[1], n, "standard"), floor=False)
    assert view(facts).taken == 26, "a job for the floor share is not given back"
    facts.kept(f"{two[1].url}batch1")
    assert view(facts).taken == 27
    assert facts.yielding(1, turns) == []
    run(two[1], 12)
    two[1].sent(1, "chat", "interactive", streams=True)
    assert facts.yielding(1, turns) == [f"{two[1].url}batch4"]
    off = Facts(ModelSettings(batch_yields=False), two)
    off.sent(lease(two[1], 1), floor=False)
    assert view(off).taken == 43 and off.yielding(1, turns) == []


def test_slots_for_which_batch_gives_way_are_those_known_best() -> None:
    (backend,) = backends(None)
    run(backend, 9, "batch")
    backend.sent(1, "chat", "standard", streams=True)
    for slots, count in ((None, 0), (8, 1), (32, 0)):
        facts = Facts(ModelSettings(slots=slots), [backend])
        facts.sent(lease(backend, 1), floor=False)
        assert len(facts.yielding(1, Round((), {}, Router()))) == count, slots
    for n in range(20):
        backend.load.slots.polled(2 + n, EngineFacts(1, 8, None), 0)
    for probing in (False, True):
        facts = Facts(ModelSettings(reserved_slots=1), [backend])
        facts.sent(lease(backend, 1), floor=False)
        facts.view(100, NONE, (), look=False, most=64)
        if probing:
            facts.closed(100, Why.RESERVED, NONE, "m1", DispatcherMetrics(CollectorRegistry()))
        gone = facts.yielding(100, Round((), {}, Router()))
        assert len(gone) == 1 - probing, "there may be more than were learned"


# --- why nothing is sent


def test_each_class_that_waits_is_told_why_it_has_no_room() -> None:
    two = backends(None, None)
    facts = Facts(ModelSettings(class_={"batch": ClassSettings(tpot_ms=100)}), two)
    assert facts.reasons(1) == {}
    facts.closed(1, Why.OPEN, {"interactive": 1, "standard": 0, "batch": 5}, "m1", METRICS)
    assert facts.reasons(1) == {"interactive": "", "batch": ""}, "there is room for both"
    for b in two:
        run(b, 1)
        b.load.signal.gaps.add(1, 0.162 * 20, 20)
    told = facts.reasons(1)
    assert told == {"interactive": "", "batch": "TPOT 162 ms > 100 ms (2 of 2 engines)"}
    for n in range(3):
        two[0].sent(1, f"wait{n}", "standard", streams=True)
    assert facts.reasons(1)["interactive"] == "", "one has room"
    del two[1]
    assert facts.reasons(1)["interactive"] == "3 waiting ≥ limit 3"


def test_engines_that_are_out_of_use_are_no_reason_where_another_has_one() -> None:
    three = backends(None, None, None)
    facts = Facts(ModelSettings(), three)
    waiting = {**NONE, "interactive": 1}
    for n in range(3):
        three[2].sent(1, f"wait{n}", "standard", streams=True)
    for drained, why, text in (
        (2, Why.LIMIT, "3 waiting ≥ limit 3 (1 of 3 engines)"),
        (3, Why.DRAINED, "drained (3 of 3 engines)"),
    ):
        for backend in three[:drained]:
            backend.drained = True
        turns = Round((("live", ("interactive",)),), facts.rules, Router())
        assert turns.next(facts.view(1, waiting, (), look=False, most=64)) is None
        assert turns.why is why
        facts.closed(1, turns.why, waiting, "m1", METRICS, turns.held)
        assert facts.reasons(1) == {"interactive": text}


def test_what_holds_back_beyond_the_engines_is_told_too() -> None:
    (backend,) = two = backends(32)
    facts = Facts(ModelSettings(), two)
    for why, words in [(Why.RESERVED, "nothing in flight"), (Why.USER_LIMIT, "one user may")]:
        facts.closed(1, why, {"standard": 1}, "m1", METRICS)
        assert words in facts.reasons(1)["standard"]
    two.remove(backend)
    assert facts.reasons(1)["standard"] == "the model has no engine"


def test_closed_backends_and_limits_are_exported_by_class() -> None:
    (backend,) = two = backends(None)
    facts = Facts(ModelSettings(class_={"standard": ClassSettings(tpot_ms=150)}), two)
    registry = CollectorRegistry()
    metrics, value = DispatcherMetrics(registry), registry.get_sample_value
    labels = {"model": "m1", "backend": backend.url, "class": "standard"}
    for n in range(3):
        backend.sent(1, f"wait{n}", "standard", streams=True)
    facts.measure(1, "m1", metrics, NONE)
    facts.closed(1, Why.LIMIT, {"standard": 1, "batch": 0}, "m1", METRICS)
    facts.measure(1, "m1", metrics, NONE)
    facts.measure(1, "m1", metrics, NONE)
    name = "fairlane_backend_closed_total"
    assert value(name, {**labels, "reason": "limit"}) == 2
    assert value(name, {**labels, "class": "batch", "reason": "limit"}) is None
    name = "fairlane_backend_inflight_max"
    assert value(name, labels) == START
    assert value(name, {**labels, "class": "interactive"}) is None
