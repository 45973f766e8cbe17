"""Random steps. Few rules with many branches: Hypothesis leaves whole rules out of an example."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.cost import Terms
from common.outcomes import Outcome
from tests.stateful.steps import CLASSES, IDS, OWNERS, TYPICAL, USERS, Steps
from tests.stateful.stores import REPLICAS

Step = tuple[str, dict[str, Any]]


def step(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    """A call of the method `name` of Steps."""
    return st.fixed_dictionaries(arguments).map(lambda values: (name, values))


ids = st.sampled_from(IDS)
classes = st.sampled_from(CLASSES)
owners = st.sampled_from(OWNERS)
mostly = st.sampled_from([True, True, True, False])
rarely = st.sampled_from([False, False, False, True])
nth = st.integers(0, 5)
weights = st.sampled_from([1.0, 2.0, 0.3])
costs = st.sampled_from([64.0, 1000.0, 1400.0])
terms = st.sampled_from([TYPICAL, Terms(1000.0, 0.0, 0), Terms(64.0, 2.0, 999), Terms(0, 0.1, 7)])
bounds = st.sampled_from(["none", "none", "user_jobs", "user_bytes", "model_jobs", "model_bytes"])
passing = st.sampled_from([1, 500, 1_000, 1_001, 2_000, 5_999, 6_000, -1, -20_000])
hows = st.sampled_from(["rightly", "rightly", "rightly", "an old term", "too late"])
callers = st.sampled_from(["right", "right", "right", "another", "before", "whoever"])
dead = st.sampled_from([[], ["g1"], ["g2"]])
backends = st.lists(st.sampled_from(["b1", "b2"]), max_size=3)
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
    step("pop", owner=owners, how=hows, backends=backends),
    step("pop", owner=owners, how=hows, backends=backends, cls=classes),
    step("pop", owner=owners, how=st.just("rightly"), backends=st.just(["b1", "b1"])),
    step("pop_and_give_back", cls=classes, owner=owners, insist=st.booleans()),
    step("pop_that_is_lost", owner=owners),
)  # fmt: skip
running = st.one_of(
    step("start"),
    step("requeue", heir=mostly, count_try=st.just(True), tries_max=st.just(3)),
    step("renew", backend=st.sampled_from(["", "b1", "b2"])),
    step("charge", cost=costs),
    step(
        "settle", heir=mostly, twice=mostly, cost=st.none() | costs,
        outcome=st.sampled_from([Outcome.FINISHED, Outcome.ORPHANED, Outcome.CANCELLED]),
        learn=st.sampled_from([None, 0, 10, 300]),
    ),
    step("requeue", heir=mostly, count_try=st.booleans(), tries_max=st.integers(1, 3)),
    step("restore", started=st.booleans(), raised=st.booleans()),
)  # fmt: skip
watching = st.one_of(
    step("ack", n=nth),
    step("cancel", n=nth, due=st.booleans(), frames=st.sampled_from([b"end", b""]),
         reason=st.sampled_from([Outcome.CANCELLED, Outcome.DEADLINE])),
    step("reap", owner=owners, how=hows, cls=classes, dead=dead),
)  # fmt: skip
leading = st.one_of(
    step("time_passes", ms=passing, renewed=st.booleans()),
    step("clock_set_back", owner=owners, fresh=st.booleans()),
    step("reap", owner=owners, how=st.just("rightly"), cls=classes, dead=dead),
    step("leases_run_out", owner=owners, cls=classes, dead=dead),
    step("lead", op=st.sampled_from(["take", "renew", "renew", "give"]), owner=owners,
         honest=mostly, hold_ms=st.sampled_from([0, 0, 2_000])),
)  # fmt: skip
losing = st.one_of(
    step("time_passes", ms=passing, renewed=st.booleans()),
    step("snapshot", asked=st.lists(ids, max_size=3)),
    step("lose_record", n=nth, waiting=mostly, popped=st.booleans()),
    step("keep_history"),
    step("lose_history", everything=rarely, told=st.integers(0, 4), started=st.booleans(),
         asked=st.integers(0, 3)),
)  # fmt: skip


class QueueMachine(Steps, RuleBasedStateMachine):
    """Set `stores` in a subclass."""

    def take(self, step: Step, **more: Any) -> None:
        getattr(self, step[0])(**step[1], **more)

    @initialize(jobs=many, cls=classes, terms=terms, weight=weights, pops=st.integers(0, 3))
    def begin(
        self, jobs: list[tuple[str, str]], cls: str, terms: Terms, weight: float, pops: int
    ) -> None:
        """An empty server; then some jobs, and some of these running."""
        self.raws = [store.run(store.roll_back([]))[1] for store in self.stores]
        self.enqueue_many(jobs, cls, terms, weight, False)
        self.pop(["b1"] * pops, OWNERS[0], "rightly")

    @rule(step=coming)
    def comes(self, step: Step) -> None:
        self.take(step)

    @rule(step=going)
    def goes(self, step: Step) -> None:
        self.take(step)

    @precondition(lambda self: self.runs)
    @rule(step=running, n=nth, who=callers)
    def runs_on(self, step: Step, n: int, who: str) -> None:
        self.take(step, n=n, who=who)

    @precondition(lambda self: self.runs)
    @rule(step=running, n=nth)
    def runs_well(self, step: Step, n: int) -> None:
        self.take(step, n=n, who="right")

    @rule(step=watching)
    def is_watched(self, step: Step) -> None:
        self.take(step)

    @rule(step=leading)
    def is_led(self, step: Step) -> None:
        self.take(step)

    @rule(step=going)
    def goes_on(self, step: Step) -> None:
        self.take(step)

    @rule(step=losing)
    def loses(self, step: Step) -> None:
        self.take(step)

    @invariant()
    def always(self) -> None:
        self.holds()
