"""The executable specification of the verbs that watch over all: what is due, what there is."""

from collections.abc import Sequence
from typing import Literal

from common.jobs import Due, Lane, Running, Snapshot, Waiting
from sim.model_turns import Turns


class Watch(Turns):
    """What is due, and the read model."""

    def reap(
        self, owner: str, term: int, dead: Sequence[str], group: str, key: str = "", *,
        lease_ms: int = 6_000, now_ms: int,
    ) -> list[Due] | None:  # fmt: skip
        """What is due, and no counter kept that V has passed. A lease too far ahead is cut."""
        h = self.leads(owner, term, now_ms)
        if not h:
            return None
        late = sorted((j.deadline, j.id) for j in self.waiting() if j.deadline <= now_ms)
        due = [self._due("deadline", job) for _, job in late]
        kept = [j for j in self.jobs.values() if j.state in ("running", "orphaned")]
        for job in kept:
            job.lease = min(job.lease, now_ms + lease_ms)
        if h.reap_after <= now_ms:
            over = sorted((j.lease, j.id) for j in kept if j.lease <= now_ms)
            due += [self._due("lease", j) for _, j in over]
            due += [self._due("gateway", j) for r in dead for j in sorted(self.owned.get(r, ()))]
        swept = f"{group}:{key}" if key else group
        for name, c in list(self.counters[swept].items()):
            if c <= self.vtime[swept] and not self.stands(swept, name) and not self.inflight(name):
                del self.counters[swept][name]
                if name.endswith(":"):
                    for kept_of in (self.counters, self.vtime, self.lifts, self.back):
                        kept_of.pop(f"{group}:{name[:-1]}", None)
        return due

    def _due(self, why: Literal["deadline", "lease", "gateway"], job_id: str) -> Due:
        j = self.known(job_id)
        if not j:
            return Due(why, job_id, "", "", "", "", 0, False, "", "")
        return Due(
            why, job_id, j.state, j.user, j.cls, j.owner or "", j.attempt or 0, bool(j.started),
            j.channel, j.replica,
        )  # fmt: skip

    def snapshot(
        self,
        asked: Sequence[tuple[str, str, str]] = (),
        lanes: Sequence[tuple[str, str]] = (),
        *,
        runs: bool = True,
    ) -> Snapshot:
        """Positions assume equal charges: users take turns, in the order of their counters."""
        every = [c for _, members in self.groups for c in members]
        counts = {c: sum(j.cls == c for j in self.waiting()) for c in every}
        kept = [j for j in self.jobs.values() if j.state in ("running", "orphaned")]
        running = [
            Running(j.id, j.owner or "", j.attempt or 0, j.backend or "", bool(j.started), j.user,
                    j.cls, j.arrival)
            for j in sorted(kept, key=lambda j: (j.lease, j.id)) if runs
        ]  # fmt: skip
        h = self.leader
        places = [self.place(*a, counts) for a in asked]
        own = [self._lane(cls, user, counts) for cls, user in lanes]
        return Snapshot(h.owner if h else "", h.term if h else 0, counts, running, places, own)

    def _lane(self, cls: str, user: str, counts: dict[str, int]) -> Lane:
        jobs = self.lane(cls, user)
        first = [Waiting(j.id, j.arrival, self.place(cls, user, j.id, counts)) for j in jobs]
        return Lane(len(jobs), first)
