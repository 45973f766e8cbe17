"""What the executable specification of the queue keeps, and what it derives from that."""

from collections.abc import Iterable

import msgspec

from common import keys
from common.cost import Terms
from common.wire import Usage


class Job(msgspec.Struct, kw_only=True):
    """A job as Redis knows it. Without a record only its place in the lane is left."""

    id: str
    user: str
    cls: str
    state: str
    """waiting, running, done, orphaned; or cancelled: refused before it came."""
    record: bool = True
    body: bytes | None = None
    arrival: int = 0
    deadline: int = 0
    floor: int = 0
    size: int = 0
    terms: Terms = Terms(0.0, 0.0, 0)
    weight: float = 1.0
    replica: str = ""
    channel: str = ""
    meta: bytes | None = None
    tries: int = 0
    owner: str | None = None
    attempt: int | None = None
    backend: str | None = None
    sent: int | None = None
    started: bool | None = None
    charged: float | None = None
    cancelled: str | None = None
    lease: int = 0
    outcome: str | None = None
    usage: Usage | None = None
    seq: int | None = None

    def held_by(self, owner: str, attempt: int) -> bool:
        """Whether (owner, attempt) is the pair of its newest run."""
        return self.owner == owner and self.attempt == attempt


class Leader(msgspec.Struct):
    """Who may pop. All times in ms."""

    owner: str
    term: int
    deadline: int
    reap_after: int
    hold: int


class State:
    """Jobs and counters, and what follows from them."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.counters: dict[str, dict[str, float]] = {c: {} for c in keys.CLASSES}
        self.vtime: dict[str, int] = dict.fromkeys(keys.CLASSES, 0)
        self.lifts: dict[str, int] = dict.fromkeys(keys.CLASSES, 0)
        self.means: dict[str, float] = {}
        self.arrival = 0
        self.leader: Leader | None = None
        self.owned: dict[str, set[str]] = {}
        self.published: list[tuple[str, bytes]] = []

    # --- what is derived

    def known(self, job: str) -> Job | None:
        """The job, unless Redis has no record of it."""
        found = self.jobs.get(job)
        return found if found and found.record else None

    def held(self, job: str) -> Job | None:
        """The job, unless a run of it can only be told `unknown`: no record, or a tombstone."""
        found = self.known(job)
        return found if found and found.state != "cancelled" else None

    def lane(self, cls: str, user: str) -> list[Job]:
        """The waiting jobs of one user in one class, first come first."""
        mine = (j for j in self.waiting() if j.cls == cls and j.user == user)
        return sorted(mine, key=lambda j: (j.arrival, j.id))

    def waiting(self) -> Iterable[Job]:
        """All waiting jobs."""
        return (j for j in self.jobs.values() if j.state == "waiting")

    def backlog(self, cls: str) -> list[str]:
        """Users with waiting jobs in the order of their counters; Redis breaks ties by name."""
        users = {j.user for j in self.waiting() if j.cls == cls}
        return sorted(users, key=lambda u: (self.counters[cls][u], u.encode()))

    def inflight(self, user: str) -> int:
        """How many jobs of the user run."""
        return sum(j.state == "running" and j.user == user for j in self.jobs.values())

    def leads(self, owner: str, term: int, now_ms: int) -> Leader | None:
        """The leader, if it is this one and its lease holds."""
        h = self.leader
        mine = h and h.owner == owner and h.term == term and h.deadline > now_ms
        return h if mine else None

    def _ring(self, event: str, job: str, backend: str | None) -> None:
        self.published.append(("bell", f"{event} {job} {backend or '-'}".encode()))

    def _gone(self, job: Job) -> None:
        del self.jobs[job.id]
        self.owned.get(job.replica, set()).discard(job.id)
