"""The steps of durable jobs and their logs; a part of `Steps`."""

from typing import Any

from common.cost import Terms
from common.jobs import Due, Lease
from common.outcomes import Outcome
from sim.model import Model

KEEP_MS = 60_000
SINK = "s1"
IDS = [f"{i:032x}" for i in range(7)]


class Logs:
    """See `Steps`, which has what is named here."""

    model: Model
    logged: dict[tuple[str, int], int]
    homes: dict[str, Any]
    runs: list[tuple[Lease | Due, str]]
    run_of: Any
    untimed: Any
    enqueue: Any
    cancel: Any
    pop: Any
    start: Any
    settle: Any
    requeue: Any
    leading: Any

    def span(self, run: Lease | Due, frames: int, again: int = 0) -> tuple[int, int] | None:
        """The numbers of a durable run's next frames; `again`: so many are sent once more."""
        if not run.durable:
            return None
        first = max(0, self.logged.get((run.job, run.attempt), 0) - again)
        self.logged[run.job, run.attempt] = first + frames
        return first, first + frames - 1

    def append(self, n: int, who: str, frames: int, again: int) -> None:
        run, owner, _ = self.run_of(n, who)
        if run.durable:
            log = self.span(run, frames, again)
            self.untimed("append", run.job, owner, run.attempt, b"more", log)

    def forget(self, n: int) -> None:
        """One that has ended, if there is one, and any other."""
        jobs = [j for j in self.homes if not self.homes[j][2]]
        if jobs:
            jobs.sort(key=lambda j: j in self.model.jobs and self.model.jobs[j].state == "done")
            self.untimed("forget", list(dict.fromkeys([jobs[-1], jobs[n % len(jobs)]])))

    def log_of_one(
        self, job: str, cls: str, terms: Terms, pieces: list[tuple[int, int]], then: str
    ) -> None:
        """A durable job from its lane into its log. Of each piece: how many frames, and how many of
        those before it are sent once more; below 0, so many are left out before it."""
        job = next((j for j in (job, *IDS) if j not in self.homes), "")
        if not job:
            return
        self.enqueue(job, ("u10", ""), cls, "", b"abc", terms, 1.0, "none", True, 9_000, False)
        owner, _ = self.leading("d1")
        self.pop(["b1"] * 7, owner, "rightly", cls)
        mine = [n for n, (run, _) in enumerate(reversed(self.runs)) if run.job == job]
        if not mine or self.model.jobs[job].state != "running":
            return
        run, owner = self.runs[-1 - mine[0]]
        log = (0, 1)
        self.logged[job, run.attempt] = 2
        for _ in range(2):
            self.untimed("start", job, owner, run.attempt, run.channel, b"first", log=log)
        for frames, again in pieces:
            span = self.span(run, frames, again)
            self.untimed("append", job, owner, run.attempt, b"more", span)
            if then == "another":
                self.untimed("append", job, "d2", run.attempt, b"more", self.span(run, 1))
        if then == "cancel":
            self.untimed_cancel(job, cls, frames=b"")
            self.untimed("append", job, owner, run.attempt, b"more", self.span(run, 1))
        if then == "forget":
            self.untimed("forget", [job])
        if then in ("end", "cancel after", "collect"):
            self.end_of(run, owner)
            self.end_of(run, owner)
        if then == "collect":
            self.untimed("forget", [job])
        if then == "cancel after":
            self.untimed_cancel(job, cls, frames=b"")

    def untimed_cancel(self, job: str, cls: str, frames: bytes) -> None:
        user = "u10"
        self.timed("cancel", job, cls, user, "", Outcome.CANCELLED, frames=frames or b"end")

    def end_of(self, run: Lease | Due, owner: str) -> None:
        """The end of a run, right after what is in its log; and a little too far on."""
        log = self.span(run, 1)
        assert log is not None
        for shift in (2, 0):
            span = (log[0] + shift, log[1] + shift)
            self.timed("settle", run, owner, Outcome.FINISHED, b"end", cost=5.0, log=span)

    timed: Any
