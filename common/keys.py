"""Every Redis key and channel of Fairlane, its type, and how long it lives.

All keys of one model share the hash tag `{m}`, so that one script may use them together in a
Redis Cluster. Names of models, users and replicas are encoded first: see `encode`.
"""

import hashlib
import re
from functools import lru_cache

import msgspec

CLASSES = ("interactive", "standard", "batch")
"""Priority classes, highest first."""

GATEWAYS = "fl:gateways"
"""zset, permanent: gateway replica -> time of its last heartbeat in ms of the Redis clock."""
MODELS = "fl:models"
"""hash, permanent: dispatcher -> wire.Announcement, what it serves."""

_SAFE = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9._-]*\Z")
_NAME_BYTES_MAX = 64
_HEX_BYTES_MAX = 32


@lru_cache(maxsize=4096)
def encode(name: str) -> str:
    """A name as part of a key: unchanged where harmless, else hex after `_`, else a digest.

    The three forms cannot meet: only the encoded ones begin with `_`, and only the digest goes on
    with `h`, which is no hex digit. At most 66 characters of `[A-Za-z0-9._-]`, so that a key of
    two names stays below 200 bytes.
    """
    raw = name.encode("utf-8", "surrogatepass")
    if len(raw) <= _NAME_BYTES_MAX and _SAFE.match(name):
        return name
    if len(raw) <= _HEX_BYTES_MAX:
        return "_" + raw.hex()
    return "_h" + hashlib.sha256(raw).hexdigest()


def reply(replica: str) -> str:
    """Channel: frames for the jobs of one gateway replica."""
    return f"fl:reply:{replica}"


def control(dispatcher: str) -> str:
    """Channel: cancel, acknowledge and resend for the jobs one dispatcher runs."""
    return f"fl:control:{dispatcher}"


class ClassKeys(msgspec.Struct, frozen=True):
    """The keys of one priority class of a model; its group decides counter and vtime."""

    name: str
    group: str
    backlog: str
    """zset: users with waiting jobs -> virtual counter."""
    counter: str
    """hash: idle users' counters; dropped once at or below V with nothing in flight."""
    vtime: str
    """string: V, the whole part of the counter at the last pop; never falls. Permanent."""


class ModelKeys:
    """The keys of one model. `permanent` lists those that may stay when nothing waits or runs."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.prefix = f"fl:{{{encode(model)}}}:"
        p = self.prefix
        self.lane_prefix = f"{p}lane:"
        self.record_prefix = f"{p}job:"
        self.body_prefix = f"{p}body:"
        self.arrival = f"{p}arrival"
        """string, permanent: the last arrival number (µs of the Redis clock, strictly rising)."""
        self.groups = f"{p}groups"
        """hash, permanent: group -> lifts since its V last rose."""
        self.waiting = f"{p}waiting"
        """hash: `jobs`, `bytes`, `jobs:<class>`, `jobs:<class>:<user>`, `bytes:<user>` waiting."""
        self.deadlines = f"{p}deadlines"
        """zset: waiting job -> deadline in ms of the Redis clock."""
        self.running = f"{p}running"
        """zset: job -> lease deadline in ms (an orphan: the next repeat of its frame)."""
        self.inflight = f"{p}inflight"
        """hash: user -> running jobs."""
        self.ewma = f"{p}ewma"
        """hash, permanent: user -> mean output tokens; bounded by `reap`."""
        self.leader = f"{p}leader"
        """hash, permanent: owner, term, deadline, reap_after, hold."""
        self.bell = f"{p}bell"
        """channel: `<event> <job> <backend or ->` for cancel, start, settle, requeue, assert;
        `enqueue <job> <class>`; `give <dispatcher> -` from a leader that gives up the lead."""
        self.classes = {
            c: ClassKeys(c, c, f"{p}backlog:{c}", f"{p}counter:{c}", f"{p}vtime:{c}")
            for c in CLASSES
        }

    def lane(self, cls: str, user: str) -> str:
        """zset: job -> arrival number, the waiting jobs of one user in one class."""
        return f"{self.lane_prefix}{cls}:{user}"

    def record(self, job: str) -> str:
        """hash: the job's record; expires 10 minutes after its end unless acknowledged before."""
        return self.record_prefix + job

    def body(self, job: str) -> str:
        """string: the request body; deleted when the job ends."""
        return self.body_prefix + job

    def owned(self, replica: str) -> str:
        """set: open jobs of a gateway replica; expires a day after its last enqueue."""
        return f"{self.prefix}owned:{replica}"

    def permanent(self) -> frozenset[str]:
        """Keys that may stay in Redis when no job is waiting or running.

        Idle users' counters count among them: `reap` drops each once V has passed it.
        """
        per_class = (k for c in self.classes.values() for k in (c.counter, c.vtime))
        return frozenset(
            {GATEWAYS, MODELS, self.arrival, self.groups, self.ewma, self.leader, *per_class}
        )
