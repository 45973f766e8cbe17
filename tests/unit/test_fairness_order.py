"""The fair order in memory chooses what the executable specification of the verbs chooses."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import keys
from common.cost import Terms
from common.jobs import Lease, Limits, NewJob
from common.keys import GROUPS, Policy
from common.outcomes import Outcome
from sim.fairness.jobs import Entry
from sim.fairness.order import Order
from sim.model import Model

LIMITS = Limits(10_000, 1 << 30, 10_000, 1 << 30, 10_000, 1 << 30)
USERS = [("a", ""), ("b", ""), ("k", "x"), ("k", "y"), ("k", "z"), ("l", "x")]
TERMS = [
    Terms(1000.0, 0.0, 0.0, 0), Terms(64.0, 2.0, 0.0, 999), Terms(3.0, 4.0, 0.5, 70),
]  # fmt: skip
OWNER = "d"


class Pair:
    """The same calls to both, and a comparison of all that the calls tell."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.order, self.model, self.now = Order(policy), Model(policy), 1_000
        self.term = self.model.lead("take", OWNER, lease_ms=10**9, now_ms=self.now).term
        self.count = 0
        self.leases: list[Lease] = []
        self.waiting: list[tuple[str, str, str]] = []

    def enqueue(self, user: tuple[str, str], cls: str, terms: Terms, weight: float) -> None:
        self.count += 1
        job, path = f"j{self.count}", keys.path(*user)
        new = NewJob(
            id=job, user=user[0], sub=user[1], cls=cls, wait_ms=10**9, terms=terms, weight=weight,
            replica="g", meta=b"", body=b"",
        )  # fmt: skip
        assert self.model.enqueue(new, LIMITS, now_ms=self.now).word == "queued"
        self.order.enqueue(Entry(id=job, user=path, cls=cls, terms=terms, weight=weight))
        self.waiting.append((job, cls, path))

    def pop(self, group: int, pick: int, places: int, anyone: int | None, user_max: int,
            floor: float, lookahead: int = 0, liked: Sequence[str] = ()) -> None:  # fmt: skip
        of_group = GROUPS[self.policy][group % len(GROUPS[self.policy])][1]
        classes = of_group if pick else of_group[-1:]
        popped = self.model.pop(
            classes, ["b"] * places, OWNER, self.term, anyone=anyone, user_max=user_max,
            floor=floor, lookahead=lookahead, liked=liked, lease_ms=10**9, now_ms=self.now,
        )  # fmt: skip
        ours = self.order.pop(
            classes, places, anyone=anyone, user_max=user_max, floor=floor, lookahead=lookahead,
            liked=liked,
        )  # fmt: skip
        assert [e.id for e in ours] == [lease.job for lease in popped.leases]
        assert [e.charged for e in ours] == [pytest.approx(x.charged) for x in popped.leases]
        assert [e.inflight for e in ours] == [lease.inflight for lease in popped.leases]
        assert self.order.waiting == popped.left
        assert self.order.due() == popped.due
        for heads in popped.heads:
            told = self.order.first(heads.cls, heads.user, lookahead + 1)
            assert told == [job for job, _ in heads.jobs]
        self.leases += popped.leases
        gone = {lease.job for lease in popped.leases}
        self.waiting = [w for w in self.waiting if w[0] not in gone]

    def charge(self, lease: Lease, cost: float) -> None:
        self.model.charge([(lease, cost)], OWNER)
        self.order.charge(lease.job, cost)

    def settle(self, lease: Lease, cost: float, learn: int | None) -> None:
        self.leases.remove(lease)
        word = self.model.settle(
            lease, OWNER, Outcome.FINISHED, b"", cost=cost, learn=learn, now_ms=self.now
        )
        assert word == "settled"
        self.order.settle(lease.job, cost, learn)

    def requeue(self, lease: Lease) -> None:
        self.leases.remove(lease)
        assert self.model.requeue(lease, OWNER, count_try=False, now_ms=self.now) == "requeued"
        self.order.requeue(lease.job)
        self.waiting.append((lease.job, lease.cls, lease.user))

    def cancel(self, waiting: tuple[str, str, str]) -> None:
        self.waiting.remove(waiting)
        job, cls, path = waiting
        word = self.model.cancel(job, cls, path, "g", Outcome.CANCELLED, now_ms=self.now)
        assert word[0] == "cancelled"
        self.order.cancel(job)


def play(pair: Pair, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        pair.now += 1
        step = rng.random()
        if step < 0.4:
            pair.enqueue(
                rng.choice(USERS), rng.choice(keys.CLASSES), rng.choice(TERMS),
                rng.choice([1.0, 4.0, 0.3]),
            )  # fmt: skip
        elif step < 0.65:
            pair.pop(
                rng.randrange(3), rng.randrange(2), rng.randrange(4),
                rng.choice([None, None, 0, 1, 2]), rng.choice([0, 0, 1, 2]),
                rng.choice([0.0, 0.02, 0.5]), rng.choice([0, 1, 3]),
                [job for job, _, _ in pair.waiting if rng.random() < 0.3],
            )  # fmt: skip
        elif step < 0.72 and pair.leases:
            pair.charge(rng.choice(pair.leases), rng.choice([10.0, 900.0, 2_500.0]))
        elif step < 0.85 and pair.leases:
            pair.settle(rng.choice(pair.leases), rng.choice([0.0, 800.0, 3_000.0]),
                        rng.choice([None, 3, 500]))  # fmt: skip
        elif step < 0.92 and pair.leases:
            pair.requeue(rng.choice(pair.leases))
        elif pair.waiting:
            pair.cancel(rng.choice(pair.waiting))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), policy=st.sampled_from(["weighted", "strict"]))
def test_the_order_chooses_what_the_model_chooses(seed: int, policy: Policy) -> None:
    pair = Pair(policy)
    play(pair, random.Random(seed), 80)
    group = 0
    while any(pair.order.waiting.values()) and group < 200:
        pair.pop(group, 1, 3, None, 0, 0.02)
        group += 1
    assert not any(pair.order.waiting.values())


def test_without_the_lift_idle_time_is_banked() -> None:
    shares = []
    for lift in (True, False):
        order = Order(lift=lift)
        for n in range(40):
            order.enqueue(Entry(id=f"b{n}", user="b", cls="standard", terms=TERMS[0]))
        order.pop(("standard",), 20)
        for n in range(40):
            order.enqueue(Entry(id=f"a{n}", user="a", cls="standard", terms=TERMS[0]))
        shares.append(sum(e.user == "a" for e in order.pop(("standard",), 20)))
    assert shares == [11, 20]
