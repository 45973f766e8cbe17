"""Random steps. One rule with many branches, for Hypothesis leaves out rules, but not branches."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.cost import Terms
from common.keys import path
from common.outcomes import Outcome
from tests.stateful.steps import IDS, OWNERS, TYPICAL, USERS, Steps
from tests.stateful.stores import REPLICAS

Step = tuple[str, dict[str, Any]]


def step(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """A call of the method `name` of Steps."""
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


def run_step(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """A step of one of the runs there have been."""
    return step(name, n=nth, who=callers, **arguments)


THEN = ["end", "collect", "cancel", "cancel after", "forget", "another", "nothing"]
ids = st.sampled_from(IDS)
classes = st.sampled_from(["interactive", "standard", "interactive", "standard", "batch"])
owners = st.sampled_from(OWNERS)
mostly = st.sampled_from([True, True, True, False])
rarely = st.sampled_from([False, False, False, True])
nth = st.integers(0, 5)
weights = st.sampled_from([1.0, 2.0, 0.3])
costs = st.sampled_from([64.0, 1000.0, 1400.0])
terms = st.sampled_from(
    [
        TYPICAL,
        Terms(1000.0, 0.0, 0.0, 0),
        Terms(64.0, 2.0, 0.0, 999),
        Terms(0, 0.1, 0.0, 7),
        Terms(0.0, 3.0, 0.5, 99),
    ]
)
bounds = st.sampled_from(
    ["none", "none", "none", "user_jobs", "user_bytes", "key_jobs", "key_bytes", "model_jobs",
     "model_bytes"]
)  # fmt: skip
anyone = st.sampled_from([None, None, 0, 1])
user_max = st.sampled_from([0, 0, 1, 2])
lookaheads = st.sampled_from([1, 1, 2, 8])
floors = st.sampled_from([0.0, 0.5, 0.5])
passing = st.sampled_from([1, 500, 1_000, 1_001, 2_000, 5_999, 6_000, -1, -20_000])
hows = st.sampled_from(["rightly", "rightly", "rightly", "an old term", "too late"])
callers = st.sampled_from([*["right"] * 5, "another", "before", "whoever"])
dead = st.sampled_from([[], ["g1"], ["g2"]])
backends = st.lists(st.sampled_from(["b1", "b2"]), max_size=3)
states = st.sampled_from(["running", "running", "waiting", "done", "orphaned"])
many = st.lists(st.tuples(ids, st.sampled_from(USERS)), min_size=2, max_size=5)

coming = st.one_of(
    step("enqueue_many", jobs=many, cls=classes, terms=terms, weight=weights, again=st.booleans()),
    step(
        "enqueue", job=ids, user=st.sampled_from(USERS), cls=classes, terms=terms, weight=weights,
        replica=st.sampled_from(REPLICAS), body=st.sampled_from([b"abc", b"abcdef", b""]),
        bound=bounds, enough=st.booleans(), wait_ms=st.sampled_from([1, 500, 9_000]),
        again=st.booleans(), repeat=rarely,
    ),
    step("cancel_before_it_comes", job=ids),
)  # fmt: skip
going = st.one_of(
    step("pop", owner=owners, how=hows, backends=backends, floor=floors),
    step("pop", owner=owners, how=hows, backends=backends, cls=classes, whole=mostly,
         anyone=anyone, user_max=user_max),
    step("pop", owner=owners, how=st.just("rightly"), backends=backends, cls=st.just("batch"),
         floor=floors),
    step("pop", owner=owners, how=st.just("rightly"), backends=st.just(["b1", "b1"]),
         floor=floors),
    step("pop_past", owner=owners, user=st.sampled_from(USERS), cls=classes, lookahead=lookaheads,
         nth=st.integers(0, 3), pops=st.integers(1, 4), lost=rarely),
    step("pop_and_give_back", cls=classes, owner=owners, insist=st.booleans()),
    step("pop_that_is_lost", owner=owners),
)  # fmt: skip
running = st.one_of(
    run_step("start", ring=st.booleans()),
    run_step("append", frames=st.integers(1, 2), again=st.sampled_from([0, 0, 1])),
    run_step("renew", backend=st.sampled_from(["", "b1", "b2"])),
    run_step("charge", cost=costs),
    run_step(
        "settle", heir=st.sampled_from([True, True, False]), twice=mostly, cost=st.none() | costs,
        outcome=st.sampled_from([Outcome.ORPHANED, Outcome.FINISHED]),
        learn=st.sampled_from([None, 0, 10, 30.5]), ring=st.booleans(),
    ),
    run_step("requeue", heir=mostly, count_try=st.just(True), tries_max=st.just(3),
             yields=st.just(False)),
    run_step("requeue", heir=mostly, count_try=st.booleans(), tries_max=st.integers(1, 3),
             yields=st.booleans()),
    run_step("restore", started=st.booleans(), raised=st.booleans()),
)  # fmt: skip
watching = st.one_of(
    step("ack", n=nth),
    step("forget", n=nth),
    step("log_of_one", job=ids, cls=classes, terms=terms, then=st.sampled_from(THEN),
         pieces=st.lists(st.sampled_from([(1, 0), (1, 0), (2, 0), (1, 1), (1, -1)]), max_size=3)),
    step("cancel", n=nth, state=states,
         due=rarely, frames=st.sampled_from([b"end", b""]),
         then=st.sampled_from(["requeue", "start", ""]),
         reason=st.sampled_from([Outcome.CANCELLED, Outcome.DEADLINE])),
    step("snapshot"),
    step("cancel", n=nth, state=st.just("waiting"), due=st.booleans(), frames=st.just(b""),
         then=st.just(""), reason=st.just(Outcome.CANCELLED)),
    step("reap", owner=owners, how=hows, cls=classes, dead=dead, sub=st.booleans()),
)  # fmt: skip
leading = st.one_of(
    step("time_passes", ms=passing, renewed=st.booleans()),
    step("clock_set_back", owner=owners, fresh=st.booleans()),
    step("reap", owner=owners, how=st.just("rightly"), cls=classes, dead=dead, sub=st.booleans()),
    step("leases_run_out", owner=owners, cls=classes, dead=dead),
    step("lead", op=st.sampled_from(["take", "renew", "renew", "give"]), owner=owners,
         honest=mostly, hold_ms=st.sampled_from([0, 0, 2_000])),
)  # fmt: skip
losing = st.one_of(
    step("time_passes", ms=passing, renewed=st.booleans()),
    step("snapshot"),
    step("lose_record", n=nth, waiting=mostly, popped=st.booleans()),
    step("keep_history"),
    step("lose_history", everything=rarely, told=st.integers(0, 4), started=st.booleans(),
         asked=st.integers(0, 3)),
)  # fmt: skip


GROUPS = [coming, coming, going, going, running, running, running, watching, leading, losing]


class QueueMachine(Steps, RuleBasedStateMachine):
    """Set `stores` in a subclass."""

    @initialize(jobs=many, cls=classes, terms=terms, weight=weights, pops=st.integers(0, 3))
    def begin(
        self,
        jobs: list[tuple[str, tuple[str, str]]],
        cls: str,
        terms: Terms,
        weight: float,
        pops: int,
    ) -> None:
        """An empty server; then some jobs, and some of these running."""
        self.raws = [store.run(store.roll_back([]))[1] for store in self.stores]
        self.enqueue_many(jobs, cls, terms, weight, False)
        self.pop(["b1"] * pops, OWNERS[0], "rightly")

    @rule(step=st.sampled_from(GROUPS).flatmap(lambda group: group))
    def take(self, step: Step) -> None:
        getattr(self, step[0])(**step[1])

    def pop_past(
        self, owner: str, user: tuple[str, str], cls: str, lookahead: int, nth: int, pops: int,
        lost: bool,
    ) -> None:  # fmt: skip
        """Of a user with many jobs, and again and again, those some way behind the first."""
        self.enqueue_many([(job, user) for job in IDS[1:]], cls, TYPICAL, 1.0, False)
        if lost:
            self.lose_record(nth, True, False)
        before = {job.id: job.passed for job in self.model.jobs.values()}
        for _ in range(pops):
            liked = [job.id for job in self.model.lane(cls, path(*user))[nth : nth + 2]]
            self.pop(["b1"] * (1 + lost), owner, "rightly", cls, lookahead=lookahead, liked=liked)
        for job in self.model.jobs.values():
            assert job.passed <= max(before[job.id], lookahead), "too many went before it"

    @invariant()
    def always(self) -> None:
        self.holds()
