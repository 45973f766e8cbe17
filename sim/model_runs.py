"""The executable specification of the verbs that one run of a job goes through."""

from collections.abc import Sequence

from common.cost import OUTPUT_ALPHA
from common.jobs import Due, Lease
from common.outcomes import Outcome
from sim.model_state import Job, State

ORPHAN_AGAIN_MS = 1_000


class Runs(State):
    """From the first frame to the acknowledged end."""

    def start(
        self, job_id: str, owner: str, attempt: int, channel: str, frames: bytes, *,
        log: tuple[int, int] | None = None, ring: bool = True,
    ) -> str:  # fmt: skip
        """Nothing of an answer is sent but by the newest run of a job nobody cancelled."""
        job = self.held(job_id)
        if not job:
            return "unknown"
        if job.state != "running" or not job.held_by(owner, attempt):
            return "lost"
        if job.cancelled:
            return "cancelled"
        fit = self.fits(job_id, attempt, log) if log else "next"
        if fit != "next":
            return "started" if fit == "there" else "lost"
        self.tell(job_id, (attempt, log[1] + 1) if log else None, channel, frames)
        if ring and not job.started:
            self._ring("start", job_id, job.backend)
        job.started = True
        return "started"

    def append(
        self, job_id: str, owner: str, attempt: int, frames: bytes, log: tuple[int, int]
    ) -> str:
        """A durable job's log has no gap, and frames of its newest run alone at its end."""
        job = self.held(job_id)
        if not job:
            return "unknown"
        if job.state != "running" or not job.held_by(owner, attempt):
            return "lost"
        if job.cancelled:
            return "cancelled"
        fit = self.fits(job_id, attempt, log)
        if fit == "gap":
            return "gap"
        if fit == "next":
            self.tell(job_id, (attempt, log[1] + 1), job.channel, frames)
        return "appended"

    def forget(self, jobs: Sequence[str]) -> int:
        """What ended may go once it is collected."""
        ended = [j for i in jobs if (j := self.known(i)) and j.state == "done"]
        for job in ended:
            self._gone(job)
            self.logs.pop(job.id, None)
        return len(ended)

    def renew(
        self, jobs: Sequence[tuple[str, int, str]], owner: str, *, lease_ms: int = 6_000,
        now_ms: int,
    ) -> list[str]:  # fmt: skip
        """A lease goes on only for the pair that holds it."""
        return [self._renew(j, a, b, owner, now_ms + lease_ms, now_ms) for j, a, b in jobs]

    def _renew(
        self, job_id: str, attempt: int, backend: str, owner: str, deadline: int, now_ms: int
    ) -> str:
        job = self.held(job_id)
        if not job:
            return "unknown"
        if job.state != "running" or not job.held_by(owner, attempt):
            return "lost"
        job.lease = deadline
        if backend:
            job.backend = backend
        return "cancelled" if job.cancelled else "ok"

    def charge(self, jobs: Sequence[tuple[Lease, float]], owner: str) -> list[str]:
        """While a job runs its charge only rises."""
        return [self._charge(run, cost, owner) for run, cost in jobs]

    def _charge(self, run: Lease, cost: float, owner: str) -> str:
        job = self.held(run.job)
        if not job or job.state != "running" or not job.held_by(owner, run.attempt):
            return "lost"
        more = cost / job.weight - (job.charged or 0)
        if more <= 0:
            return "enough"
        self.book(job.cls, job.user, more)
        job.charged = cost / job.weight
        return "raised"

    def settle(
        self, run: Lease | Due, owner: str, outcome: Outcome, frames: bytes, *,
        heir: bool = False, cost: float | None = None, learn: float | None = None,
        log: tuple[int, int] | None = None, ring: bool = True, now_ms: int,
    ) -> str:  # fmt: skip
        """A run ends once; its pair may say so again, and so may the heir of an orphan when due."""
        job = self.held(run.job)
        if not job:
            return "unknown"
        pair = job.held_by(owner, run.attempt)
        due = heir and job.state in ("running", "orphaned") and job.lease <= now_ms
        if (job.state == "done" and pair) or (job.state == "orphaned" and due):
            if not job.keep:
                self.published.append((run.channel, frames))
            job.lease = now_ms + ORPHAN_AGAIN_MS
            return "settled"
        if job.state != "running" or not pair or (heir and not due):
            return "lost"
        fit = self.fits(job.id, run.attempt, log) if job.keep and not heir and log else "next"
        if fit == "there" or (fit == "gap" and outcome == Outcome.FINISHED):
            return "gap"
        backend = job.backend
        self._correct(job, cost, learn)
        job.body, job.outcome = None, str(outcome)
        if outcome == Outcome.ORPHANED:
            job.state, job.owner = "orphaned", ""
            job.attempt, job.lease = max(run.attempt + 1, now_ms), now_ms + ORPHAN_AGAIN_MS
        else:
            self._done(job, str(outcome), now_ms)
            self.owned.get(job.replica, set()).discard(job.id)
        entry = (run.attempt + 1, 1) if heir or not log else (run.attempt, log[1] + 1)
        self.tell(job.id, entry if job.keep else None, run.channel, frames)
        if ring:
            self._ring("settle", job.id, backend)
        return "settled"

    def _correct(self, job: Job, cost: float | None, learn: float | None) -> None:
        charged = job.charged or 0
        delta = 0 if cost is None else cost / job.weight - charged
        self.book(job.cls, job.user, delta)
        if delta < 0:
            for order, _ in self.levels(job.cls, job.user):
                self.give_back(order, -delta)
        job.charged = charged + delta
        if learn is not None:
            mean = self.means.get(job.user, learn)
            self.means[job.user] = mean + OUTPUT_ALPHA * (learn - mean)

    def ack(self, jobs: Sequence[str], replica: str) -> int:
        """An end is kept until its gateway has it."""
        ended = [j for i in jobs if (j := self.known(i)) and j.state in ("done", "orphaned")]
        for job in ended:
            self._gone(job)
        return len(ended)

    def restore(
        self, run: Lease, owner: str, backend: str, charged: float, *, started: bool,
        keep_ms: int = 0, sink: str = "", lease_ms: int = 6_000, now_ms: int,
    ) -> str:  # fmt: skip
        """The verb `assert`. A run that Redis lost counts again, unless a later one is known."""
        job = self.known(run.job)
        if job and (job.state == "cancelled" or job.cancelled):
            return "cancelled"
        running = job is not None and job.state == "running"
        if job and running and not job.held_by(owner, run.attempt):
            return "lost"
        if job and not running and (job.state != "waiting" or (job.attempt or 0) >= run.attempt):
            return "lost"
        if job is None:
            job = Job(id=run.job, user=run.user, cls=run.cls, state="running")
            self.jobs[run.job] = job
        job.arrival, job.deadline, job.tries, job.floor = run.arrival, run.deadline_ms, run.tries, 0
        job.yields = run.yields
        job.terms, job.weight, job.size, job.meta = run.terms, run.weight, len(run.body), run.meta
        job.replica, job.channel, job.backend = run.replica, run.channel, backend
        if run.durable:
            job.keep, job.sink = keep_ms, sink
        job.started = started or bool(running and job.started)
        job.lease = now_ms + lease_ms
        if running:
            return "running"
        self.book(run.cls, run.user, charged)
        job.state, job.owner, job.attempt, job.charged = "running", owner, run.attempt, charged
        if not started or run.durable:
            job.body = run.body
        if not run.durable:
            self.owned.setdefault(run.replica, set()).add(run.job)
        self._ring("assert", run.job, backend)
        return "restored"
