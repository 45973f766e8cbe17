"""What the leader knows of its backends as it decides."""

from prometheus_client import CollectorRegistry

from common.metrics import DispatcherMetrics
from common.settings import BackendSettings, ClassSettings, ModelSettings
from dispatcher.aimd import START
from dispatcher.backends import Backend
from dispatcher.engines.facts import EngineFacts
from dispatcher.facts import Facts
from dispatcher.turns import Rules, View
from dispatcher.why import Why

NONE = {"interactive": 0, "standard": 0, "batch": 0}


def backends(*slots: int | None) -> list[Backend]:
    """Reachable and idle, their metrics fresh for long."""
    made = [
        Backend(BackendSettings(url=f"http://gpu{i}:8000", max_num_seqs=n))
        for i, n in enumerate(slots)
    ]
    for backend in made:
        backend.load.polled(0, EngineFacts(0, 0, 0.0), period=1_000)
        backend.connected()
    return made


def run(backend: Backend, count: int, cls: str = "standard") -> None:
    for i in range(count):
        backend.sent(1, f"{backend.url}{cls}{i}", cls, streams=True)
        backend.started(1, f"{backend.url}{cls}{i}")


def view(facts: Facts) -> View:
    return facts.view(1, NONE, (), look=False, most=64)


def test_places_are_as_the_backends_and_the_class_s_limit_have_them() -> None:
    two = backends(16, 16)
    run(two[0], 2)
    limits = {"interactive": ClassSettings(queue_limit=5)}
    seen = view(Facts(ModelSettings(class_=limits), two))  # type: ignore[arg-type]
    places = {cls: seen.room(cls, False) for cls in NONE}
    assert [p.room for p in places["interactive"].values()] == [5, 5]
    assert [p.room for p in places["standard"].values()] == [3, 3]
    assert [(p.room, p.inflight) for p in places["batch"].values()] == [(2, 2), (1, 0)]
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


def test_time_per_output_token_is_exported_while_it_is_known() -> None:
    (backend,) = backends(None)
    registry = CollectorRegistry()
    metrics, facts = DispatcherMetrics(registry), Facts(ModelSettings(), [backend])
    exported = []
    for now in (1.0, 1.5, 4.0):
        facts.measure(now, "m1", metrics)
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


def test_rules_are_the_class_s_settings() -> None:
    settings = {"standard": ClassSettings(inflight_max=7, user_inflight_max=2)}
    facts = Facts(ModelSettings(class_=settings), [])  # type: ignore[arg-type]
    assert facts.rules == {"interactive": Rules(), "standard": Rules(7, 2), "batch": Rules()}
    assert view(facts).busy_max is None


# --- why nothing is sent


def test_each_class_that_waits_is_told_why_it_has_no_room() -> None:
    two = backends(None, None)
    facts = Facts(ModelSettings(class_={"batch": ClassSettings(tpot_ms=100)}), two)
    assert facts.reasons(1) == {}
    facts.close(1, {"interactive": 1, "standard": 0, "batch": 5}, Why.OPEN)
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


def test_what_holds_back_beyond_the_engines_is_told_too() -> None:
    (backend,) = two = backends(32)
    facts = Facts(ModelSettings(), two)
    for why, words in [(Why.RESERVED, "nothing in flight"), (Why.USER_LIMIT, "one user may")]:
        facts.close(1, {"standard": 1}, why)
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
    facts.measure(1, "m1", metrics)
    facts.close(1, {"standard": 1, "batch": 0}, Why.LIMIT)
    facts.measure(1, "m1", metrics)
    facts.measure(1, "m1", metrics)
    name = "fairlane_backend_closed_total"
    assert value(name, {**labels, "reason": "limit"}) == 2
    assert value(name, {**labels, "class": "batch", "reason": "limit"}) is None
    name = "fairlane_backend_inflight_max"
    assert value(name, labels) == START
    assert value(name, {**labels, "class": "interactive"}) is None
