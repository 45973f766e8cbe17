"""The steps of the state machine: each verb, the same on the model and on each server.

After each, replies, messages and the whole state agree. Ranges are small so that users, ids,
counters and times collide; times are those of a real clock in size, so that a number which loses
digits on its way is seen.
"""

import copy
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from common.cost import Terms
from common.jobs import Due, Lease, Limits, NewJob
from common.keys import CLASSES, GROUPS, Policy, path
from common.outcomes import Outcome
from common.queue import Queue
from sim.model import Model
from tests.stateful.keyspace import Raw, Space, check, expected, read
from tests.stateful.leading import OWNERS, Leading
from tests.stateful.logs import IDS, KEEP_MS, SINK, Logs
from tests.stateful.stores import REPLICAS, Store

BEGIN_MS = 1_790_000_000_000
USERS = [("u10", ""), ("ü:", ""), ("k", "a"), ("k", "ü:")]
"""(user, sub-user): a sub-user shares what its key is given."""
TYPICAL = Terms(1000.0, 2.0, 0.0, 100)
WIDE = Limits(9, 999, 9, 999, 99, 999)
ENDED = ("done", "orphaned")
NO_RUN = Due("lease", IDS[0], "", "", CLASSES[0], "", 1, False, "fl:reply:g1", REPLICAS[0])
"""What a dispatcher may think it runs before anything ran."""


class Steps(Leading, Logs):
    """`stores` are the servers; the last's state is also checked by itself."""

    stores: Sequence[Store] = ()
    policy: Policy = "weighted"

    def __init__(self) -> None:
        super().__init__()
        self.model = self.fresh()
        self.logged: dict[tuple[str, int], int] = {}
        """Of each run of a durable job the frames that were sent."""
        self.now = BEGIN_MS
        self.homes: dict[str, tuple[tuple[str, str], str, str]] = {}
        """Job -> user, class, replica: these stay, whatever Redis forgets."""
        self.runs: list[tuple[Lease | Due, str]] = []
        """The newest runs and things due, each with its owner."""
        self.arrivals: dict[str, int] = {}
        self.terms = dict.fromkeys(OWNERS, 0)
        self.saved: tuple[Model, list[Raw]] | None = None
        self.raws: list[Raw] = []
        self.space: Space = {}
        self.vtime: dict[str, int] = {}
        self.was_back: dict[str, float] = {}

    def fresh(self) -> Model:
        """A model of nothing."""
        return Model(self.policy, self.stores[0].queue.keys.live)

    def do(self, want: object, call: Callable[[Queue], Coroutine[Any, Any, object]]) -> Any:
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
            got, raw, messages = store.run(call(store.queue))
            assert got == want
            assert [(c.decode(), d) for c, d in messages] == published
            self.space = read(raw)
            assert self.space == space
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

    def run_of(self, n: int, who: str) -> tuple[Any, str, bool]:
        """The n-th newest run, who calls, and whether that is as the heir.

        `who` is right, or another dispatcher, or one that has had the job before; or whoever: the
        run may be over.
        """
        current = [
            (run, owner)
            for run, owner in self.runs
            if (job := self.model.held(run.job)) and job.state == "running"
            and job.held_by(owner, run.attempt)
        ]  # fmt: skip
        current.sort(key=lambda pair: self.model.jobs[pair[0].job].cancelled is not None)
        if not self.runs:
            return NO_RUN, OWNERS[0], False
        pool = current if current and who != "whoever" else self.runs
        run, owner = pool[-1 - n % len(pool)]
        if who == "another":
            owner = OWNERS[owner == OWNERS[0]]
        elif who == "before":
            run = msgspec.structs.replace(run, attempt=run.attempt - 1)
        return run, owner, isinstance(run, Due)

    def remember(self, run: Lease | Due, owner: str) -> None:
        self.runs = [*self.runs[-7:], (run, owner)]

    def holds(self) -> None:
        """What is always so, by the last server's own state."""
        check(self.space, self.stores[0].queue.keys)
        for group, v in self.vtime.items():
            back = self.was_back.get(group, 0) + 1
            assert self.model.vtime[group] >= v - back, "V fell by more than was given back"
        self.was_back = dict(self.model.back)
        self.vtime = {group: self.model.vtime[group] for group, _ in self.model.groups}

    # --- jobs come

    def enqueue(
        self, job: str, user: tuple[str, str], cls: str, replica: str, body: bytes, terms: Terms,
        weight: float, bound: str, enough: bool, wait_ms: int, again: bool, repeat: bool = True,
    ) -> None:  # fmt: skip
        """`again`: with the place it had, and with the attempts its gateway has seen.

        Without `repeat` an id that Redis does not know is taken instead of one that it does.
        """
        if not repeat and job in self.model.jobs:
            job = next((j for j in IDS if j not in self.model.jobs), job)
        if self.is_ghost(job):
            return
        user, cls, replica = self.homes.setdefault(job, (user, cls, replica))
        seen = [r.attempt for r, _ in self.runs if r.job == job] if again else [0]
        new = NewJob(
            id=job, user=user[0], sub=user[1], cls=cls, wait_ms=wait_ms, terms=terms, weight=weight,
            replica=replica, meta=b"meta", body=body, floor=max(seen, default=self.now + 1_000),
            arrival=self.arrivals.get(job, 0) if again else 0,
            keep_ms=0 if replica else KEEP_MS, sink="" if replica else SINK,
        )  # fmt: skip
        reply = self.timed("enqueue", new, self.limits(new, bound, enough))
        if reply.word == "queued":
            self.arrivals[job] = reply.arrival

    def limits(self, job: NewJob, bound: str, enough: bool) -> Limits:
        """Limits of which one is just enough for this job, or one too small."""
        every = list(self.model.waiting())
        mine = [j for j in every if j.user == path(job.user, job.sub)]
        peers = [j for j in every if j.user.startswith(path(job.user) + ":")]
        need = {
            "key_jobs": sum(j.cls == job.cls for j in peers) + 1,
            "key_bytes": sum(j.size for j in peers) + len(job.body),
            "user_jobs": sum(j.cls == job.cls for j in mine) + 1,
            "user_bytes": sum(j.size for j in mine) + len(job.body),
            "model_jobs": len(every) + 1,
            "model_bytes": sum(j.size for j in every) + len(job.body),
        }
        tight = {bound: need[bound] - (not enough)} if bound in need else {}
        return msgspec.structs.replace(WIDE, **tight)

    def enqueue_many(
        self,
        jobs: list[tuple[str, tuple[str, str]]],
        cls: str,
        terms: Terms,
        weight: float,
        again: bool,
    ) -> None:
        for job, user in jobs:
            if job not in self.model.jobs:
                self.enqueue(
                    job, user, cls, REPLICAS[0], b"abc", terms, weight, "none", True, 9_000, again
                )

    def cancel(
        self, n: int, state: str, due: bool, frames: bytes, reason: Outcome, then: str
    ) -> None:
        """The n-th job in this state, else any there has been; then its dispatcher may go on."""
        those = [j.id for j in self.model.jobs.values() if j.state == state] or list(self.homes)
        if not those:
            return
        job = those[n % len(those)]
        user, cls, replica = self.homes[job]
        if not replica and not frames:
            frames = b"cancelled"
        if due or not self.is_ghost(job):
            word, _ = self.timed(
                "cancel", job, cls, path(*user), replica, reason, due=due, frames=frames
            )
            if word == "flagged" and then == "start":
                self.start(0, "right")
            elif word == "flagged" and then == "requeue":
                self.requeue(0, "right", True, count_try=False)

    def cancel_before_it_comes(self, job: str) -> None:
        if job not in self.homes:
            user, cls, replica = self.homes.setdefault(job, (USERS[0], CLASSES[0], REPLICAS[0]))
            self.timed("cancel", job, cls, path(*user), replica, Outcome.CANCELLED)
            self.enqueue(job, user, cls, replica, b"abc", TYPICAL, 1.0, "none", True, 9_000, False)

    # --- jobs run

    def pop(
        self, backends: list[str], owner: str, how: str, cls: str | None = None,
        whole: bool = True, anyone: int | None = None, user_max: int = 0, floor: float = 0.0,
        lookahead: int = 0, liked: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Of the group of `cls`, or as the dispatcher does: of the first that has a job waiting.

        `whole`: of all its classes, else of `cls` alone.
        """
        cls = cls or next((c for c in CLASSES if self.model.backlog(c)), CLASSES[0])
        group = self.model.group[cls]
        classes = dict(GROUPS[self.policy])[group] if whole else (cls,)
        owner, term = self.leading(owner, how)
        counters = dict(self.model.counters[group])
        waits = [name for c in classes for name in self.model.backlog(c)]
        whole_records = all(j.record for j in self.model.jobs.values())
        popped = self.timed("pop", classes, backends, owner, term, anyone=anyone, user_max=user_max,
                            floor=floor, lookahead=lookahead, liked=liked)  # fmt: skip
        for lease in popped.leases:
            self.remember(lease, owner)
        if popped.leases and anyone is None and not user_max and whole_records:
            _, name = self.model.levels(popped.leases[0].cls, popped.leases[0].user)[0]
            assert counters[name] == min(counters[n] for n in waits), "not the least counter"

    def pop_and_give_back(self, cls: str, owner: str, insist: bool) -> None:
        """Requeue restores the counter and the place exactly; the run is over, whoever insists."""
        owner, term = self.leading(owner)
        before = copy.deepcopy(self.model.counters)
        for lease in self.timed("pop", (cls,), ["b1"], owner, term).leases:
            self.remember(lease, owner)
            rest = [j.id for j in self.model.lane(cls, lease.user)]
            if self.timed("requeue", lease, owner, count_try=False) == "requeued":
                for order, name in self.model.levels(cls, lease.user):
                    assert abs(self.model.counters[order][name] - before[order][name]) <= 1e-9
                    assert name in self.model.stand(order, cls)
                assert [j.id for j in self.model.lane(cls, lease.user)] == [lease.job, *rest]
            if insist:
                more = {"keep_ms": KEEP_MS, "sink": SINK} if lease.durable else {}
                self.timed("restore", lease, owner, "b1", lease.charged, started=False, **more)

    def renew(self, n: int, who: str, backend: str) -> None:
        run, owner, _ = self.run_of(n, who)
        other, _, _ = self.run_of(n + 1, who)
        jobs = [(run.job, run.attempt, backend), (other.job, other.attempt, "")]
        self.timed("renew", jobs, owner)

    def start(self, n: int, who: str, ring: bool = True) -> None:
        run, owner, _ = self.run_of(n, who)
        log = (0, 1) if run.durable else None
        if log:
            self.logged.setdefault((run.job, run.attempt), 2)
        channel = run.channel if run.durable else "fl:reply:g1"
        self.untimed("start", run.job, owner, run.attempt, channel, b"first", log=log, ring=ring)

    def charge(self, n: int, who: str, cost: float) -> None:
        run, owner, _ = self.run_of(n, who)
        if isinstance(run, Lease):
            self.untimed("charge", [(run, cost)], owner)

    def settle(
        self, n: int, who: str, heir: bool, cost: float | None, twice: bool, outcome: Outcome,
        learn: float | None, ring: bool,
    ) -> None:  # fmt: skip
        run, owner, is_heir = self.run_of(n, who)
        log = self.span(run, 1)
        if run.durable and outcome is Outcome.ORPHANED:
            outcome = Outcome.TRIES  # it goes back to the queue instead
        for _ in range(1 + twice):
            if run.cls:
                self.timed("settle", run, owner, outcome, b"end", heir=heir == is_heir,
                           cost=cost, learn=learn, log=log, ring=ring)  # fmt: skip

    def requeue(self, n: int, who: str, heir: bool, **more: object) -> None:
        run, owner, is_heir = self.run_of(n, who)
        if run.cls:
            self.timed("requeue", run, owner, heir=heir == is_heir, **more)

    def restore(self, n: int, who: str, started: bool, raised: bool) -> None:
        run, owner, _ = self.run_of(n, who)
        if isinstance(run, Lease) and not self.is_ghost(run.job):
            charged = run.charged + 100 * raised
            more = {"keep_ms": KEEP_MS, "sink": SINK} if run.durable else {}
            self.timed("restore", run, owner, "b2", charged, started=started, **more)

    def ack(self, n: int) -> None:
        """One that has ended, if there is one, and any other of the same gateway."""
        jobs = list(self.homes)
        if jobs:
            jobs.sort(key=lambda j: j in self.model.jobs and self.model.jobs[j].state in ENDED)
            replica = self.homes[jobs[-1]][2]
            mine = [j for j in jobs if self.homes[j][2] == replica]
            self.untimed("ack", list(dict.fromkeys([mine[-1], mine[n % len(mine)]])), replica)

    def snapshot(self) -> None:
        """With the place of every job there has been, and the lanes of all."""
        homes = [(cls, path(*user), job) for job, (user, cls, _) in self.homes.items()]
        lanes = sorted({(cls, user) for cls, user, _ in homes})
        self.do(self.model.snapshot(homes, lanes), lambda q: q.snapshot(homes, lanes))
        self.do(self.model.snapshot(runs=False), lambda q: q.snapshot(runs=False))

    # --- Redis loses

    def lose_record(self, n: int, waiting: bool, popped: bool) -> None:
        """A waiting job's record, or what had an expiry: the end of a job, a tombstone."""
        states = ("waiting",) if waiting else ("done", "cancelled")
        jobs = [j for j in self.model.jobs.values() if j.record and j.state in states]
        if not jobs:
            return
        job = jobs[n % len(jobs)]
        if waiting:
            job.record = False
        else:
            del self.model.jobs[job.id]
        key = self.stores[0].queue.keys.record(job.id)
        self.raws = [store.run(store.delete(key))[1] for store in self.stores]
        self.space = read(self.raws[-1])
        if popped and job.cls:
            self.pop(["b1", "b1"], OWNERS[0], "rightly", job.cls)

    def keep_history(self) -> None:
        self.saved = copy.deepcopy(self.model), self.raws

    def lose_history(self, everything: bool, told: int, started: bool, asked: int) -> None:
        """Go back to the state that was kept, or to nothing.

        Then dispatchers say what they run, and gateways enqueue again what is not known.
        """
        self.model, raws = self.saved or (self.fresh(), [[] for _ in self.stores])
        if everything:
            self.model, raws = self.fresh(), [[] for _ in self.stores]
        self.saved = None
        pairs = zip(self.stores, raws, strict=True)
        self.raws = [store.run(store.roll_back(raw))[1] for store, raw in pairs]
        self.space = read(self.raws[-1])
        self.vtime = {}
        self.now += 100
        for n in range(min(told, len(self.runs))):
            self.restore(n, "whoever", started, False)
        for job in list(self.homes)[:asked]:
            if job not in self.model.jobs:
                self.enqueue(job, *self.homes[job], b"abc", TYPICAL, 1.0, "none", True, 9_000, True)

    def pop_that_is_lost(self, owner: str) -> None:
        """A failover forgets a pop; the dispatcher says that it runs the job."""
        self.keep_history()
        self.pop(["b1"], owner, "rightly")
        self.lose_history(False, 1, False, 0)
