"""What the executable specification of the queue keeps, and what it derives from that."""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from common import keys
from common.cost import Terms


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
    terms: Terms = Terms(0.0, 0.0, 0.0, 0)
    weight: float = 1.0
    replica: str = ""
    channel: str = ""
    meta: bytes | None = None
    tries: int = 0
    yields: int = 0
    passed: int = 0
    owner: str | None = None
    attempt: int | None = None
    backend: str | None = None
    started: bool | None = None
    charged: float | None = None
    cancelled: str | None = None
    lease: int = 0
    outcome: str | None = None
    keep: int = 0
    """Not 0: a durable job."""
    sink: str = ""
    ended: int = 0

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
    """Jobs and counters, and what follows from them.

    An order is that of a group's users, called by the group's name, or of the sub-users of one key
    in it: `<group>:<key>`. Among the users the key stands as `<key>:`.
    """

    def __init__(self, policy: keys.Policy = "weighted") -> None:
        self.groups = keys.GROUPS[policy]
        self.group = {c: group for group, members in self.groups for c in members}
        self.jobs: dict[str, Job] = {}
        self.counters: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.vtime: defaultdict[str, int] = defaultdict(int)
        self.lifts: defaultdict[str, int] = defaultdict(int)
        self.back: dict[str, float] = {}
        self.owed: dict[str, float] = {}
        self.means: dict[str, float] = {}
        self.arrival = 0
        self.leader: Leader | None = None
        self.owned: dict[str, set[str]] = {}
        self.published: list[tuple[str, bytes]] = []
        self.logs: dict[str, list[tuple[tuple[int, int], bytes]]] = {}
        """Of durable jobs: ((attempt, number of the last frame + 1), frames)."""
        self.ended: defaultdict[str, list[str]] = defaultdict(list)

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

    def levels(self, cls: str, user: str) -> list[tuple[str, str]]:
        """(order, name there): of a sub-user first its key's, then its own."""
        group, key = self.group[cls], keys.parent(user)
        return [(group, f"{key}:"), (f"{group}:{key}", user)] if key else [(group, user)]

    def members(self, order: str) -> tuple[str, ...]:
        """The classes of an order's group."""
        return dict(self.groups)[order.partition(":")[0]]

    def jobs_of(self, cls: str, name: str) -> int:
        """Waiting jobs of a class, of a user or of all sub-users of a key."""
        return sum(j.cls == cls and name in (j.user, _top(j.user)) for j in self.waiting())

    def stand(self, order: str, cls: str) -> list[str]:
        """Who waits in a class, in the order of counters; Redis breaks ties by name."""
        waiting = [j for j in self.waiting() if j.cls == cls]
        names = {n for j in waiting for o, n in self.levels(cls, j.user) if o == order}
        return sorted(names, key=lambda n: (self.counters[order][n], n.encode()))

    def backlog(self, cls: str) -> list[str]:
        """Users with waiting jobs of a class, keys for their sub-users."""
        return self.stand(self.group[cls], cls)

    def stands(self, order: str, name: str) -> bool:
        """Whether jobs wait in any class of the order's group."""
        return any(self.jobs_of(c, name) for c in self.members(order))

    def book(self, cls: str, user: str, amount: float) -> None:
        """Add to a user's counter, and to its key's."""
        for order, name in self.levels(cls, user):
            self.counters[order][name] = self.counters[order].get(name, 0) + amount

    def give_back(self, order: str, amount: float) -> None:
        """V may fall by it."""
        self.back[order] = self.back.get(order, 0) + amount

    def inflight(self, name: str) -> int:
        """How many jobs of the user, or of all sub-users of a key, run."""
        runs = (j for j in self.jobs.values() if j.state == "running")
        return sum(name in (j.user, _top(j.user)) for j in runs)

    def leads(self, owner: str, term: int, now_ms: int) -> Leader | None:
        """The leader, if it is this one and its lease holds."""
        h = self.leader
        mine = h and h.owner == owner and h.term == term and h.deadline > now_ms
        return h if mine else None

    def _ring(self, event: str, job: str, backend: str | None) -> None:
        self.published.append(("bell", f"{event} {job} {backend or '-'}".encode()))

    def fits(self, job: str, attempt: int, log: tuple[int, int]) -> str:
        """Whether frames are in a job's log already, come next, or leave a gap."""
        last = self.logs[job][-1][0] if self.logs.get(job) else (0, 0)
        if last[0] != attempt:
            return "next" if log[0] == 0 and last[0] < attempt else "gap"
        if last[1] > log[1]:
            return "there"
        return "next" if last[1] == log[0] else "gap"

    def tell(self, job: str, entry: tuple[int, int] | None, channel: str, frames: bytes) -> None:
        """To whoever follows: the frames, or that there are more in the log."""
        if entry:
            self.logs.setdefault(job, []).append((entry, frames))
            frames = job.encode()
        self.published.append((channel, frames))

    def _done(self, job: Job, outcome: str, now_ms: int) -> None:
        """The end of a durable job is kept, and told to its sink."""
        job.state, job.body, job.outcome = "done", None, outcome
        if job.keep:
            job.ended = now_ms
        if job.keep and job.sink:
            self.ended[job.sink].append(job.id)

    def _gone(self, job: Job) -> None:
        del self.jobs[job.id]
        self.owned.get(job.replica, set()).discard(job.id)


def _top(user: str) -> str:
    key = keys.parent(user)
    return f"{key}:" if key else user
