"""Random steps, the same on the model and on each server; after each, replies and states agree.

Ranges are small so that users, ids, counters and times collide. Times are those of a real clock in
size, so that a number which loses digits on its way is seen.
"""

import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.cost import Terms
from common.jobs import Due, Lease, Limits, NewJob
from common.keys import encode
from common.outcomes import Outcome
from common.queue import Queue
from common.wire import Usage
from sim.model import Model
from tests.stateful.keyspace import Raw, check, expected, read
from tests.stateful.stores import REPLICAS, Store

BEGIN_MS = 1_790_000_000_000
IDS = [f"{i:032x}" for i in range(7)]
USERS = ["u10", "u2", "ü:"]
CLASSES = ["interactive", "standard"]
OWNERS = ["d1", "d2"]
WIDE = Limits(9, 999, 99, 999)
ENDED = ("done", "orphaned")
LIMITS = [WIDE, WIDE, WIDE, Limits(1, 999, 99, 999), Limits(9, 6, 99, 999), Limits(9, 999, 3, 999),
          Limits(9, 999, 99, 9)]  # fmt: skip

ids = st.sampled_from(IDS)
users = st.sampled_from(USERS)
classes = st.sampled_from(CLASSES)
owners = st.sampled_from(OWNERS)
mostly = st.sampled_from([True, True, True, False])
nth = st.integers(0, 5)
bodies = st.sampled_from([b"abc", b"abcdef", b""])
terms = st.sampled_from(
    [Terms(1000.0, 0.0, 0), Terms(1000.0, 2.0, 100), Terms(64.0, 2.0, 1000), Terms(0.0, 0.1, 7)]
)
weights = st.sampled_from([1.0, 2.0, 0.3])
replicas = st.sampled_from(REPLICAS)
limits = st.sampled_from(LIMITS)
waits = st.sampled_from([1, 500, 9_000])
many = st.lists(st.tuples(ids, users), min_size=2, max_size=5)
places = st.lists(st.sampled_from(["b1", "b2"]), max_size=3)
costs = st.sampled_from([None, 0.0, 64.0, 1000.0, 1400.0])


class QueueMachine(RuleBasedStateMachine):
    """`stores` are the servers; the first's state is also checked by itself after each step."""

    stores: Sequence[Store] = ()

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.now = BEGIN_MS
        self.homes: dict[str, tuple[str, str, str]] = {}
        self.runs: list[tuple[Lease | Due, str]] = []
        self.arrivals: dict[str, int] = {}
        self.terms = dict.fromkeys(OWNERS, 0)
        self.saved: tuple[Model, list[Raw]] | None = None
        self.raws: list[Raw] = []
        self.vtime = dict.fromkeys(CLASSES, 0)

    # --- one step

    def do(self, want: object, call: Callable[[Queue], Awaitable[object]]) -> Any:
        """Run `call` on each server: its reply is `want`, its messages and state the model's."""
        keys = self.stores[0].queue.keys
        published = [
            (keys.bell if channel == "bell" else channel, data)
            for channel, data in self.model.published
        ]
        self.model.published.clear()
        space = expected(self.model, keys)
        self.raws = []
        for store in self.stores:
            got, raw, messages = store.run(call(store.queue))  # type: ignore[arg-type]
            assert got == want
            assert [(c.decode(), d) for c, d in messages] == published
            assert read(raw) == space
            self.raws.append(raw)
        return want

    def timed(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """One verb at the present moment."""
        kwargs["now_ms"] = self.now
        return self.untimed(verb, *args, **kwargs)

    def untimed(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """One verb that knows no time."""
        want = getattr(self.model, verb)(*args, **kwargs)
        return self.do(want, lambda q: getattr(q, verb)(*args, **kwargs))

    def is_ghost(self, job: str) -> bool:
        """Whether the lane holds it and its record is lost."""
        return job in self.model.jobs and not self.model.jobs[job].record

    def run_of(self, n: int, honest: bool) -> tuple[Lease | Due, str, bool]:
        """The n-th newest run, who calls, and whether that is as the heir."""
        run, owner = self.runs[-1 - n % len(self.runs)]
        if not honest:
            owner = OWNERS[n % 2]
        return run, owner, isinstance(run, Due)

    def remember(self, run: Lease | Due, owner: str) -> None:
        self.runs = [*self.runs[-7:], (run, owner)]

    # --- rules

    @initialize(jobs=many, cls=classes, terms=terms, pops=st.integers(0, 3))
    def begin(self, jobs: list[tuple[str, str]], cls: str, terms: Terms, pops: int) -> None:
        self.raws = [store.run(store.roll_back([]))[1] for store in self.stores]
        self.enqueue_many(jobs, cls, terms)
        self.pop(cls, ["b1"] * pops, "d1", True)

    @rule(job=ids, user=users, cls=classes, replica=replicas, body=bodies, terms=terms,
          weight=weights, limits=limits, wait_ms=waits, again=st.booleans())  # fmt: skip
    def enqueue(
        self, job: str, user: str, cls: str, replica: str, body: bytes, terms: Terms,
        weight: float, limits: Limits, wait_ms: int, again: bool,
    ) -> None:  # fmt: skip
        if self.is_ghost(job):
            return
        user, cls, replica = self.homes.setdefault(job, (user, cls, replica))
        seen = [r.attempt for r, _ in self.runs if r.job == job] if again else []
        new = NewJob(
            id=job, user=user, cls=cls, wait_ms=wait_ms, terms=terms, weight=weight,
            replica=replica, meta=b"meta", body=body, floor=max(seen, default=0),
            arrival=self.arrivals.get(job, 0) if again else 0,
        )  # fmt: skip
        reply = self.timed("enqueue", new, limits)
        if reply.word == "queued":
            self.arrivals[job] = reply.arrival

    @rule(jobs=many, cls=classes, terms=terms)
    def enqueue_many(self, jobs: list[tuple[str, str]], cls: str, terms: Terms) -> None:
        for job, user in jobs:
            if job not in self.model.jobs:
                self.enqueue(job, user, cls, "g1", b"abc", terms, 1.0, WIDE, 9_000, False)

    @rule(op=st.sampled_from(["take", "renew", "renew", "give"]), owner=owners, honest=mostly,
          hold_ms=st.sampled_from([0, 0, 2_000]))  # fmt: skip
    def lead(self, op: str, owner: str, honest: bool, hold_ms: int) -> None:
        term = self.terms[owner] if honest else 7
        reply = self.timed("lead", op, owner, term=term, hold_ms=hold_ms)
        if reply.word == "leader":
            self.terms[owner] = reply.term

    def leading(self, owner: str, fresh: bool) -> tuple[str, int]:
        """Who asks, with which term: the leader where `fresh`, and there is one at all."""
        if not fresh:
            return owner, self.terms[owner]
        h = self.model.leader
        if h is None or h.deadline <= self.now:
            self.lead("take", owner, True, 0)
            h = self.model.leader
        return (h.owner, h.term) if h else (owner, 0)

    @rule(cls=classes, backends=places, owner=owners, fresh=mostly)
    def pop(self, cls: str, backends: list[str], owner: str, fresh: bool) -> None:
        owner, term = self.leading(owner, fresh)
        order = self.model.backlog(cls)
        lane = self.model.lane(cls, order[0]) if order else []
        whole = all(j.record for j in lane)
        popped = self.timed("pop", cls, backends, owner, term)
        for lease in popped.leases:
            self.remember(lease, owner)
        if popped.leases and whole:
            assert popped.leases[0].user == order[0]
            assert popped.leases[0].job == lane[0].id

    @rule(cls=classes, owner=owners)
    def pop_any(self, cls: str, owner: str) -> None:
        """As the dispatcher does: of the first class that has a job waiting."""
        waiting = [c for c in CLASSES if self.model.backlog(c)]
        self.pop(waiting[0] if waiting else cls, ["b1"], owner, True)

    @precondition(lambda self: any(self.model.waiting()))
    @rule(cls=classes, owner=owners)
    def pop_and_give_back(self, cls: str, owner: str) -> None:
        """Requeue restores the counter and the place exactly."""
        owner, term = self.leading(owner, True)
        order = self.model.backlog(cls)
        before = dict(self.model.counters[cls])
        for lease in self.timed("pop", cls, ["b1"], owner, term).leases:
            self.remember(lease, owner)
            user, rest = lease.user, [j.id for j in self.model.lane(cls, lease.user)]
            if self.timed("requeue", lease, owner, count_try=False) == "requeued":
                assert abs(self.model.counters[cls][user] - before[user]) <= 1e-9
                assert [j.id for j in self.model.lane(cls, user)] == [lease.job, *rest]
                assert user in order

    @precondition(lambda self: self.runs)
    @rule(n=nth, honest=mostly, backend=st.sampled_from(["", "b1", "b2"]))
    def renew(self, n: int, honest: bool, backend: str) -> None:
        run, owner, _ = self.run_of(n, honest)
        other, _, _ = self.run_of(n + 1, honest)
        jobs = [(run.job, run.attempt, backend), (other.job, other.attempt, "")]
        self.timed("renew", jobs, owner)

    @precondition(lambda self: self.runs)
    @rule(n=nth, honest=mostly)
    def start(self, n: int, honest: bool) -> None:
        run, owner, _ = self.run_of(n, honest)
        self.untimed("start", run.job, owner, run.attempt, "fl:reply:g1", b"first")

    @precondition(lambda self: self.runs)
    @rule(n=nth, honest=mostly, cost=costs.filter(bool))
    def charge(self, n: int, honest: bool, cost: float) -> None:
        run, owner, _ = self.run_of(n, honest)
        if run.cls:
            self.untimed("charge", run.cls, [(run.job, run.attempt, cost)], owner)

    @precondition(lambda self: self.runs)
    @rule(n=nth, honest=mostly, heir=mostly, cost=costs, twice=st.booleans(),
          outcome=st.sampled_from([Outcome.FINISHED, Outcome.ORPHANED, Outcome.CANCELLED]),
          learn=st.sampled_from([None, 0, 10, 300]))  # fmt: skip
    def settle(
        self, n: int, honest: bool, heir: bool, cost: float | None, twice: bool,
        outcome: Outcome, learn: int | None,
    ) -> None:  # fmt: skip
        run, owner, is_heir = self.run_of(n, honest)
        usage = Usage(5, 0, learn) if learn else None
        for _ in range(1 + twice):
            if run.cls:
                self.timed("settle", run, owner, outcome, b"end", heir=heir and is_heir,
                           cost=cost, learn=learn, usage=usage, seq=3)  # fmt: skip

    @precondition(lambda self: self.runs)
    @rule(n=nth, honest=mostly, heir=mostly, count_try=st.booleans(), tries_max=st.integers(1, 3))
    def requeue(
        self, n: int, honest: bool, heir: bool, count_try: bool, tries_max: int
    ) -> None:  # fmt: skip
        run, owner, is_heir = self.run_of(n, honest)
        if run.cls:
            self.timed("requeue", run, owner, heir=heir and is_heir, count_try=count_try,
                       tries_max=tries_max)  # fmt: skip

    @precondition(lambda self: self.runs)
    @rule(n=nth, honest=mostly, started=st.booleans(), raised=st.booleans())
    def restore(self, n: int, honest: bool, started: bool, raised: bool) -> None:
        run, owner, _ = self.run_of(n, honest)
        if isinstance(run, Lease) and not self.is_ghost(run.job):
            charged = run.charged + 100 * raised
            self.timed("restore", run, owner, "b2", charged, started=started)

    @precondition(lambda self: any(j.state in ENDED for j in self.model.jobs.values()))
    @rule(n=nth)
    def ack(self, n: int) -> None:
        ended = [j.id for j in self.model.jobs.values() if j.state in ENDED]
        job, other = ended[n % len(ended)], list(self.homes)[n % len(self.homes)]
        self.untimed("ack", list(dict.fromkeys([job, other])), self.homes[job][2])

    @precondition(lambda self: self.model.jobs)
    @rule(n=nth, due=mostly, frames=st.sampled_from([b"end", b""]),
          reason=st.sampled_from([Outcome.CANCELLED, Outcome.DEADLINE]))  # fmt: skip
    def cancel(self, n: int, due: bool, frames: bytes, reason: Outcome) -> None:
        due = not due
        live = [j.id for j in self.model.jobs.values() if j.state != "cancelled"] or list(
            self.homes
        )
        job = live[n % len(live)]
        user, cls, replica = self.homes[job]
        if due or not self.is_ghost(job):
            self.timed("cancel", job, cls, encode(user), replica, reason, due=due, frames=frames)

    @rule(job=ids)
    def cancel_before_it_comes(self, job: str) -> None:
        if job not in self.homes:
            user, cls, replica = self.homes.setdefault(job, (USERS[0], CLASSES[0], "g1"))
            self.timed("cancel", job, cls, encode(user), replica, Outcome.CANCELLED)

    @rule(owner=owners, fresh=mostly, cls=classes, dead=st.sampled_from([[], ["g1"], ["g2"]]))
    def reap(self, owner: str, fresh: bool, cls: str, dead: list[str]) -> None:
        owner, term = self.leading(owner, fresh)
        due = self.model.reap(owner, term, dead, cls, now_ms=self.now)

        async def call(queue: Queue) -> list[Due] | None:
            reply = await queue.reap(owner, term, dead, cls, now_ms=self.now)
            if reply is None:
                return None
            named = [d for d in reply[0] if d.why != "gateway"]
            rest = [d for d in reply[0] if d.why == "gateway"]
            return named + sorted(rest, key=lambda d: d.job)

        self.do(due, call)
        for one in due or []:
            self.remember(one, one.owner)

    @rule(asked=st.lists(ids, max_size=3))
    def snapshot(self, asked: list[str]) -> None:
        homes = [(self.homes[j][1], encode(self.homes[j][0]), j) for j in asked if j in self.homes]
        self.do(self.model.snapshot(homes), lambda q: q.snapshot(homes))

    @rule(ms=st.sampled_from([1, 500, 1_000, 1_001, 2_000, 5_999, 6_000, 13_000, -1, -20_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(cls=classes, owner=owners, dead=st.sampled_from([[], ["g1"], ["g2"]]))
    def leases_run_out(self, cls: str, owner: str, dead: list[str]) -> None:
        self.now += 6_000
        self.timed("lead", "take", owner, grace_ms=0)
        self.reap(owner, True, cls, dead)

    # --- what Redis may lose

    @rule(job=ids)
    def lose_record(self, job: str) -> None:
        """A waiting job's record, or what had an expiry: the end of a job, a tombstone."""
        known = self.model.known(job)
        if known and known.state in ("waiting", "done", "cancelled"):
            self.do_lose(job)

    def do_lose(self, job: str) -> None:
        if self.model.jobs[job].state == "waiting":
            self.model.jobs[job].record = False
        else:
            del self.model.jobs[job]
        key = self.stores[0].queue.keys.record(job)
        self.raws = [store.run(store.delete(key))[1] for store in self.stores]

    @rule()
    def keep_history(self) -> None:
        self.saved = copy.deepcopy(self.model), self.raws

    @rule(everything=st.booleans(), told=st.integers(0, 4), started=st.booleans())
    def lose_history(self, everything: bool, told: int, started: bool) -> None:
        """Go back to the state that was kept, or to nothing; dispatchers then say what they run."""
        self.model, raws = self.saved or (Model(), [[] for _ in self.stores])
        if everything or not self.saved:
            self.model, raws = Model(), [[] for _ in self.stores]
        self.saved = None
        pairs = zip(self.stores, raws, strict=True)
        self.raws = [store.run(store.roll_back(raw))[1] for store, raw in pairs]
        self.vtime = dict.fromkeys(CLASSES, 0)
        self.now += 100
        for n in range(min(told, len(self.runs))):
            self.restore(n, True, started, False)

    @invariant()
    def holds(self) -> None:
        if self.raws:
            check(read(self.raws[0]), self.stores[0].queue.keys)
        for cls in CLASSES:
            assert self.model.vtime[cls] >= self.vtime[cls], "V fell"
            self.vtime[cls] = self.model.vtime[cls]
