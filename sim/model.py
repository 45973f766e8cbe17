"""The queue of one model in plain Python: the executable specification of the verbs in common/lua.

`Model` has the methods of `common.queue.Queue`, with the same arguments and replies, but for time:
`now_ms` is always given. A job is one object in one state and a user has one counter for each
group; what Redis keeps a second time (order of users, jobs waiting, jobs in flight) is derived here
whenever it is asked for, so a verb cannot forget to keep it up. `published` collects messages.

Limits of one call (heads and users looked at, bytes, users of a snapshot, jobs that `reap` names)
are out of the model's reach and have tests of their own.
"""

import math
from collections.abc import Iterable, Sequence

from common import keys
from common.cost import OUTPUT_START
from common.jobs import (
    Due,
    Enqueued,
    Heads,
    Lease,
    Led,
    Limits,
    NewJob,
    Popped,
)
from common.outcomes import Outcome
from sim.model_runs import Runs
from sim.model_state import Job, Leader
from sim.model_watch import Watch

GAP_MS = 1_000


class Model(Watch, Runs):
    """All verbs but those of a run, which `Runs` has, and those that watch, which `Watch` has;
    `Turns` has the fair order."""

    def __init__(self, policy: keys.Policy = "weighted", live: str = "live") -> None:
        """`live`: the channel that tells of durable jobs."""
        super().__init__(policy)
        self.live = live

    # --- leadership

    def lead(
        self,
        op: str,
        owner: str,
        *,
        term: int = 0,
        lease_ms: int = 2_000,
        grace_ms: int = 6_000,
        hold_ms: int = 0,
        now_ms: int,
    ) -> Led:
        """Terms rise; nobody is declared dead for `grace_ms` after a takeover or a gap.

        No time in force is further ahead than its full length: the clock may have been set back.
        """
        h = self.leader
        deadline = min(h.deadline, now_ms + lease_ms) if h else 0
        if op != "take":
            if not h or (h.owner, h.term) != (owner, term):
                return Led("lost")
            late = now_ms - (deadline - lease_ms) > GAP_MS
            h.deadline = 0 if op == "give" else now_ms + lease_ms
            if op == "give":
                return Led("given")
            h.reap_after = now_ms + grace_ms if late else min(h.reap_after, now_ms + grace_ms)
            h.hold = min(h.hold, now_ms + grace_ms)
            return Led("leader", term=term, owner=owner)
        if h and h.owner != owner and deadline > now_ms:
            h.deadline = deadline
            return Led("held", owner=h.owner, left_ms=h.deadline - now_ms)
        new = max(h.term + 1 if h else 0, now_ms)
        hold = min(h.hold, now_ms + grace_ms) if h else (now_ms + hold_ms if hold_ms else 0)
        self.leader = Leader(owner, new, now_ms + lease_ms, now_ms + grace_ms, hold)
        return Led("leader", term=new, owner=owner)

    # --- a job's way in and out of its lane

    def enqueue(self, job: NewJob, limits: Limits, *, now_ms: int) -> Enqueued:
        """Idempotent by id; a user who becomes backlogged is lifted to V, behind those before."""
        user, old = keys.path(job.user, job.sub), self.known(job.id)
        if old:
            refused = old.state == "cancelled"
            return Enqueued("cancelled") if refused else Enqueued("known", state=old.state)
        mine = [j for j in self.waiting() if j.user == user]
        in_class = sum(j.cls == job.cls for j in mine)
        size = len(job.body)
        if in_class + 1 > limits.user_jobs or _bytes(mine) + size > limits.user_bytes:
            return Enqueued("full_user")
        if job.sub:
            peers = [j for j in self.waiting() if keys.parent(j.user) == keys.parent(user)]
            in_class = sum(j.cls == job.cls for j in peers)
            if in_class + 1 > limits.key_jobs or _bytes(peers) + size > limits.key_bytes:
                return Enqueued("full_user")
        every = list(self.waiting())
        if len(every) + 1 > limits.model_jobs or _bytes(every) + size > limits.model_bytes:
            return Enqueued("full_model")
        arrival = job.arrival or max(self.arrival + 1, now_ms * 1000)
        self.arrival = max(self.arrival, arrival)
        for order, name in self.levels(job.cls, user):
            if not self.stands(order, name):
                self.lift(order, name)
        self.jobs[job.id] = Job(
            id=job.id, user=user, cls=job.cls, state="waiting", body=job.body, arrival=arrival,
            deadline=now_ms + job.wait_ms, floor=job.floor, size=size, terms=job.terms,
            weight=job.weight, replica=job.replica, channel=self._channel(job.replica),
            meta=job.meta, keep=job.keep_ms, sink=job.sink,
        )  # fmt: skip
        if job.keep_ms:
            self.logs.pop(job.id, None)
        else:
            self.owned.setdefault(job.replica, set()).add(job.id)
        self._ring("enqueue", job.id, job.cls)
        return Enqueued("queued", arrival=arrival)

    def _channel(self, replica: str) -> str:
        return keys.reply(replica) if replica else self.live

    def pop(
        self, classes: Sequence[str], backends: Sequence[str], owner: str, term: int, *,
        anyone: int | None = None, user_max: int = 0, floor: float = 0.0, lookahead: int = 0,
        liked: Sequence[str] = (), start: float = OUTPUT_START, lease_ms: int = 6_000, now_ms: int,
    ) -> Popped:  # fmt: skip
        """The first job of the user with the least counter, once for each backend named;
        or one liked that follows soon."""
        h = self.leads(owner, term, now_ms)
        if not h:
            return Popped("stale", [])
        if h.hold > now_ms:
            return Popped("held", [], held_ms=h.hold - now_ms)
        leases: list[Lease] = []
        anyone = len(backends) if anyone is None else anyone
        while len(leases) < len(backends):
            turn = self.turn(classes, user_max, idle=len(leases) >= anyone)
            if turn is None:
                break
            job = self.ahead(turn[1], lookahead, liked)
            if not job.record or job.state != "waiting":
                del self.jobs[job.id]  # its record is lost: it must not hold up the others
                continue
            first = self.turn(self.members(self.group[job.cls]), user_max)
            limit = first[0] if first else turn[0]
            backend = backends[len(leases)]
            lease = self._run(job, backend, owner, start, floor, limit, lease_ms, now_ms)
            leases.append(lease)
        every = [c for _, members in self.groups for c in members]
        left = {c: sum(j.cls == c for j in self.waiting()) for c in every}
        above, due = 0, []
        for group, members in self.groups:
            waits = sum(left[c] for c in members)
            if above and waits and self.owed.get(group, 0) > 0:
                due.append(group)
            above += waits
        lanes = dict.fromkeys((lease.cls, lease.user) for lease in leases if lookahead)
        heads = [
            Heads(*lane, [(j.id, j.meta or b"") for j in self.lane(*lane)[: lookahead + 1]])
            for lane in lanes
        ]
        return Popped("popped", leases, left, tuple(due), heads=heads)

    def _run(
        self, job: Job, backend: str, owner: str, start: float, floor: float, first: float,
        lease_ms: int, now_ms: int,
    ) -> Lease:  # fmt: skip
        t, levels = job.terms, self.levels(job.cls, job.user)
        for order, name in levels:
            c = self.counters[order][name]
            self.follow(order, math.floor(c if ":" in order else min(c, first)))
        x = min(self.means.get(job.user, start), t.most)
        cost = t.fixed + t.per_unit * x + t.per_square * x * x
        job.charged = cost / job.weight
        self.book(job.cls, job.user, job.charged)
        before = self.inflight(levels[0][1])
        job.attempt = max((job.attempt or 0) + 1, job.floor, now_ms)
        job.state, job.owner, job.backend = "running", owner, backend
        job.started, job.lease = False, now_ms + lease_ms
        self.owe(self.group[job.cls], floor, cost)
        return Lease(
            job=job.id, user=job.user, cls=job.cls, attempt=job.attempt, backend=backend,
            charged=job.charged, terms=t, weight=job.weight, meta=job.meta or b"",
            channel=job.channel, replica=job.replica, tries=job.tries, arrival=job.arrival,
            deadline_ms=job.deadline, inflight=before, body=job.body or b"", yields=job.yields,
        )  # fmt: skip

    def requeue(
        self, run: Lease | Due, owner: str, *, heir: bool = False, count_try: bool,
        yields: bool = False, tries_max: int = 3, now_ms: int,
    ) -> str:  # fmt: skip
        """Back to the old place with the charge undone; not once cancelled or given up, and not
        once started unless it is durable."""
        job = self.held(run.job)
        if not job:
            return "unknown"
        if job.state != "running" or not job.held_by(owner, run.attempt):
            return "lost"
        if heir and job.lease > now_ms:
            return "lost"
        if job.started and not job.keep:
            return "started"
        if job.cancelled:
            return "cancelled"
        if job.tries + count_try >= tries_max:
            return "tries"
        for order, name in self.levels(job.cls, job.user):
            counters = self.counters[order]
            counters[name] = counters.get(name, self.vtime[order]) - (job.charged or 0)
            self.give_back(order, job.charged or 0)
        self._ring("requeue", job.id, job.backend)
        job.state, job.owner, job.tries = "waiting", "", job.tries + count_try
        job.yields += yields
        job.backend = job.started = job.charged = None
        return "requeued"

    def cancel(
        self, job_id: str, cls: str, user: str, replica: str, reason: Outcome, *,
        due: bool = False, frames: bytes = b"", now_ms: int,
    ) -> tuple[str, str]:  # fmt: skip
        """Free for a waiting job; a flag for a running one; a tombstone for one not yet here."""
        job = self.known(job_id)
        if due and not (job and job.state == "waiting" and job.deadline <= now_ms):
            return "early", ""
        if not job or job.state == "cancelled":
            self.jobs[job_id] = Job(id=job_id, user="", cls="", state="cancelled")
            return "unknown", ""
        if job.state == "running":
            job.cancelled = str(reason)
            self._ring("cancel", job_id, job.backend)
            return "flagged", job.owner or ""
        if job.state != "waiting":
            if not job.keep:
                self._gone(job)
            return "ended", ""
        if job.keep:
            self.tell(job_id, ((job.attempt or 0) + 1, 1), self._channel(replica), frames)
            self._done(job, str(reason), now_ms)
        else:
            self._gone(job)
            if frames:
                self.published.append((keys.reply(replica), frames))
        self._ring("cancel", job_id, None)
        return "cancelled", ""


def _bytes(jobs: Iterable[Job]) -> int:
    return sum(j.size for j in jobs)
