"""What the verbs take and return: jobs as the queue, the gateways and the dispatchers see them."""

from typing import Literal

import msgspec

from common.cost import Terms


class Limits(msgspec.Struct, frozen=True):
    """How much may wait; a job that would exceed one is refused."""

    user_jobs: int
    """Of one user, or sub-user, in the job's class."""
    user_bytes: int
    key_jobs: int
    """Of all sub-users of one key together, in the job's class; looked at for these alone."""
    key_bytes: int
    model_jobs: int
    model_bytes: int


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the gateway enqueues it."""

    id: str
    user: str
    """As people write it; encoded before it becomes part of a key."""
    sub: str = ""
    """Who of those that divide the user's share, as people write it."""
    cls: str
    wait_ms: int
    """It may wait this long from now."""
    terms: Terms
    weight: float
    """Divides the cost: the user's, times that of an interactive job where classes are weighted."""
    replica: str
    meta: bytes
    """wire.JobMeta, encoded."""
    body: bytes
    arrival: int = 0
    """The number it had before Redis lost it, so that it keeps its place; else 0."""
    floor: int = 0
    """The highest attempt the gateway has seen of it."""
    keep_ms: int = 0
    """A durable job: its answer goes into its log, which is kept so long after its end. 0: the
    answer goes to the gateway that waits for it."""
    sink: str = ""
    """The list of ended jobs that tells of a durable one: letters, digits and `-`; or none."""


class Enqueued(msgspec.Struct, frozen=True):
    """`queued`: the queue owns it. `known`: it already did. Else nothing was stored."""

    word: Literal["queued", "known", "cancelled", "full_user", "full_model"]
    arrival: int = 0
    state: str = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A popped job: the right to run it, and all that running it needs."""

    job: str
    user: str
    """Its path: `keys.path`."""
    cls: str
    attempt: int
    backend: str
    charged: float
    terms: Terms
    weight: float
    meta: bytes
    channel: str
    replica: str
    tries: int
    arrival: int
    deadline_ms: int
    inflight: int
    """Jobs of the user, or of all sub-users of its key, that ran when this one was popped."""
    body: bytes
    yields: int = 0
    """How often the job was taken out of an engine for others."""

    @property
    def durable(self) -> bool:
        """Whether its answer goes into a log, not to a gateway."""
        return not self.replica


class Heads(msgspec.Struct, frozen=True):
    """The first jobs of a lane, as `pop` left them."""

    cls: str
    user: str
    """Its path."""
    jobs: list[tuple[str, bytes]]
    """(job, meta) in their order; a meta that is too long is empty."""


class Popped(msgspec.Struct, frozen=True):
    """What `pop` gave, and what it left."""

    word: Literal["popped", "held", "stale"]
    leases: list[Lease]
    left: dict[str, int] = {}
    """Jobs of each class that still wait."""
    due: tuple[str, ...] = ()
    """Groups below one that waits which are owed their floor share: one job may go before."""
    held_ms: int = 0
    """Nothing may be popped for so long."""
    heads: list[Heads] = []
    """With `lookahead`, of each lane that jobs were taken from."""


class Led(msgspec.Struct, frozen=True):
    """`leader`: `term` is ours, `hold_until_ms` as in `pop`. `held`: by `owner` for `left_ms`."""

    word: Literal["leader", "held", "lost", "given"]
    term: int = 0
    owner: str = ""
    left_ms: int = 0


class Due(msgspec.Struct, frozen=True):
    """One thing `reap` names."""

    why: Literal["deadline", "lease", "gateway"]
    job: str
    state: str
    user: str
    cls: str
    owner: str
    attempt: int
    started: bool
    channel: str
    replica: str

    @property
    def durable(self) -> bool:
        """Whether its answer goes into a log, not to a gateway."""
        return not self.replica


class Running(msgspec.Struct, frozen=True):
    """One running job as `snapshot` sees it."""

    job: str
    owner: str
    attempt: int
    backend: str
    started: bool
    user: str
    cls: str
    arrival: int = 0


class Waiting(msgspec.Struct, frozen=True):
    """One waiting job as `snapshot` sees it."""

    job: str
    arrival: int
    """Microseconds of the Redis clock, at its `enqueue` or just after."""
    place: int
    """How many turns until its own, counting it."""


class Lane(msgspec.Struct, frozen=True):
    """The waiting jobs of one user in one class."""

    jobs: int
    """How many there are."""
    first: list[Waiting]
    """The first of them, in their order."""


class Snapshot(msgspec.Struct, frozen=True):
    """The read model of one queue."""

    leader: str
    term: int
    waiting: dict[str, int]
    running: list[Running]
    places: list[int]
    """For each job asked about: how many turns until its own, counting it; 0 if not waiting."""
    lanes: list[Lane] = []
    """Those asked about."""
