"""What fairness promises, on the model, the embedded broker and a real Redis alike.

The names are those of the invariants that the documentation of the fair order lists. I1, I2, I7, I9
and I12 hold in each step of the state machine beside this; I4 and I11 also need the loop that pops,
and have tests with it.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.cost import Terms
from common.jobs import Lease, Limits, NewJob
from common.keys import GROUPS
from common.outcomes import Outcome
from sim.model import Model
from tests.stateful.steps import BEGIN_MS
from tests.stateful.stores import Store
from tests.support.redis_server import RedisServer

WIDE = Limits(999, 1 << 30, 999, 1 << 30, 9_999, 1 << 30)
LIVE = GROUPS["weighted"][0][1]
USERS = ["u10", "a", "u2", "Z"]
MANY = settings(
    max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


class Side:
    """One implementation of the verbs."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.model = Model()

    def reset(self) -> None:
        self.model = Model()
        if self.store:
            self.store.run(self.store.roll_back([]))

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """One verb; on a server also its reply is the model's."""
        timed = verb not in ("charge",)
        kwargs |= {"now_ms": BEGIN_MS} if timed else {}
        want = getattr(self.model, verb)(*args, **kwargs)
        if self.store is None:
            return want
        result = getattr(self.store.queue, verb)(*args, **kwargs)
        assert inspect.isawaitable(result)
        got, _, _ = self.store.run(result)  # type: ignore[arg-type]
        assert got == want
        return got

    def counters(self) -> dict[str, float]:
        """Of the users of the upper group, wherever they are kept."""
        if self.store is None:
            return dict(self.model.counters["live"])
        keys = self.store.queue.keys.order("interactive", "u")
        found: dict[str, float] = {}
        for key in keys[:2]:
            raw, _, _ = self.store.run(
                self.store.broker.command("ZRANGE", key, 0, -1, "WITHSCORES")
            )
            found |= {n.decode(): float(c) for n, c in zip(raw[::2], raw[1::2], strict=True)}
        raw, _, _ = self.store.run(self.store.broker.command("HGETALL", keys[2]))
        return found | {n.decode(): float(c) for n, c in zip(raw[::2], raw[1::2], strict=True)}


class Play:
    """A queue under load, and a count of who got what."""

    def __init__(self, side: Side) -> None:
        side.reset()
        self.side = side
        self.term = side.call("lead", "take", "d1").term
        self.jobs = 0
        self.running: list[Lease] = []
        self.most: Counter[str] = Counter()
        self.over, self.under, self.charge = 0.0, 0.0, 0.0
        """Greatest correction upwards and downwards, greatest charge at a pop."""

    def come(
        self, user: str, cost: float = 1000.0, cls: str = "standard", weight: float = 1.0
    ) -> None:
        self.jobs += 1
        new = NewJob(
            id=f"j{self.jobs}", user=user, cls=cls, wait_ms=9_000_000, weight=weight,
            terms=Terms(cost, 0.0, 0.0, 0), replica="g1", meta=b"", body=b"",
        )  # fmt: skip
        assert self.side.call("enqueue", new, WIDE).word == "queued"

    def pop(self, classes: tuple[str, ...] = LIVE, floor: float = 0.0) -> Lease | None:
        popped = self.side.call("pop", classes, ["b"], "d1", self.term, floor=floor)
        self.due = popped.due
        for lease in popped.leases:
            self.running.append(lease)
            flying = Counter(run.user for run in self.running)
            self.most = self.most | flying
            self.charge = max(self.charge, lease.charged)
        return popped.leases[0] if popped.leases else None

    def end(self, n: int, factor: float) -> Lease | None:
        """The n-th running job ends, and costs so many times what was booked."""
        if not self.running:
            return None
        run = self.running.pop(n % len(self.running))
        cost = run.charged * run.weight * factor
        self.over = max(self.over, cost / run.weight - run.charged)
        self.under = max(self.under, run.charged - cost / run.weight)
        self.side.call("settle", run, "d1", Outcome.FINISHED, b"", cost=cost)
        return run

    def waiting(self) -> set[str]:
        return {j.user for j in self.side.model.waiting()}


@pytest.fixture(scope="module", params=["model", "embedded", "redis"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    if request.param == "model":
        yield Side(None)
        return
    if request.param == "embedded":
        with Store(None) as store:
            yield Side(store)
        return
    with RedisServer() as server, Store(server.url) as store:
        yield Side(store)


FEW = settings(MANY, max_examples=12)
user = st.sampled_from(USERS)
cost = st.sampled_from([1000.0, 1500.0, 8000.0])
op = st.one_of(
    st.tuples(st.just("come"), user, cost, st.sampled_from(LIVE), st.sampled_from([1.0, 2.0, 0.5])),
    st.tuples(st.just("pop")),
    st.tuples(st.just("pop")),
    st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from([0.25, 1.0, 1.0, 3.0])),
)


def play(side: Side, ops: list[Any], check: Callable[[Play], None] = lambda _: None) -> Play:
    p = Play(side)
    for name, *args in ops:
        getattr(p, name)(*args)
        check(p)
    return p


@MANY
@given(st.lists(op, max_size=60))
def test_i3_counters_of_who_waits_stay_close(side: Side, ops: list[Any]) -> None:
    """C_f - C_g <= greatest charge + N_f * greatest rise + N_g * greatest refund, and the lift's
    fraction."""

    def close(p: Play) -> None:
        counters = p.side.counters()
        waiting = sorted(p.waiting())
        for f in waiting:
            for g in waiting:
                bound = p.charge + p.most[f] * p.over + p.most[g] * p.under + 1
                assert counters[f] - counters[g] <= bound

    play(side, ops, close)


@MANY
@given(st.lists(op, max_size=60).map(lambda ops: [o for o in ops if o[0] != "end"]))
def test_i5_a_newcomer_waits_for_those_lifted_before_it(side: Side, ops: list[Any]) -> None:
    p = play(side, ops)
    p.come("new")
    counters = p.side.counters()
    before = {u for u in p.waiting() - {"new"} if counters[u] <= counters["new"]}
    pops = 0
    while (lease := p.pop()) is not None and lease.user != "new":
        pops += 1
    assert lease is not None
    assert pops <= len(before)


@FEW
@given(st.integers(0, 20), cost, cost, st.integers(1, 12))
def test_i6_being_away_saves_nothing(
    side: Side, away: int, mine: float, other: float, turns: int
) -> None:
    """After however long, the two share from the moment on at which both wait, to within a job of
    each (the bound of start-time fair queueing)."""
    p = Play(side)
    for _ in range(away + 14):
        p.come("busy", other)
    for _ in range(away):
        p.pop()
    for _ in range(14):
        p.come("back", mine)
    got = Counter[str]()
    for _ in range(turns):
        lease = p.pop()
        assert lease is not None
        got[lease.user] += int(lease.charged)
    assert abs(got["busy"] - got["back"]) <= mine + other + 1


@MANY
@given(st.lists(op, max_size=60))
def test_i8_counters_grow_by_what_was_charged_and_by_lifts(side: Side, ops: list[Any]) -> None:
    p = Play(side)
    total = 0.0
    for name, *args in ops:
        before = sum(p.side.counters().values())
        result = getattr(p, name)(*args)
        grown = sum(p.side.counters().values()) - before
        if name == "come":
            assert grown >= 0, "a lift only raises"
            total += grown
        elif result is not None:
            want = result.charged if name == "pop" else result.charged * (args[1] - 1)
            assert grown == pytest.approx(want, abs=1e-6)
            total += want
    assert sum(p.side.counters().values()) == pytest.approx(total, abs=1e-3)


@FEW
@given(st.sampled_from([0.02, 0.1, 0.5]), cost, cost, st.integers(5, 40))
def test_i10_a_lower_group_gets_its_floor(
    side: Side, floor: float, upper: float, lower: float, turns: int
) -> None:
    """Over any time in which both wait it gets its share, to within one job each way."""
    p = Play(side)
    for _ in range(turns):
        p.come("chat", upper)
        p.come("night", lower, "batch")
    got = Counter[str]()
    p.due = ()
    for _ in range(turns):
        lease = p.pop(("batch",) if p.due else LIVE, floor)
        assert lease is not None
        got[lease.cls] += int(lease.charged)
        assert got["batch"] <= floor * got["standard"] + lower
        assert got["batch"] >= floor * (got["standard"] - upper) - lower


@FEW
@given(st.sampled_from([1.0, 2.0, 3.0]), cost, cost, st.integers(8, 40))
def test_weights_divide_the_service(
    side: Side, weight: float, one: float, two: float, turns: int
) -> None:
    p = Play(side)
    for _ in range(turns):
        p.come("heavy", one, "interactive", weight)
        p.come("light", two)
    got = Counter[str]()
    for _ in range(turns):
        lease = p.pop()
        assert lease is not None
        got[lease.user] += int(lease.charged * lease.weight)
        assert abs(got["heavy"] / weight - got["light"]) <= one / weight + two + 1


def test_the_plays_are_of_a_queue_that_counts(side: Side) -> None:
    """A run of the helper itself: what it says was popped is what waited."""
    p = Play(side)
    p.come("a", 1000.0)
    p.come("b", 8000.0)
    first, second = p.pop(), p.pop()
    assert first is not None and second is not None
    assert (first.user, second.user, p.pop()) == ("a", "b", None)
    assert msgspec.structs.asdict(first)["charged"] == 1000.0
    assert p.end(0, 3.0) is first
    assert (p.over, p.side.counters()["a"]) == (2000.0, 3000.0)
