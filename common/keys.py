"""Every Redis key and channel of Fairlane, its type, and how long it lives.

All keys of one model share the hash tag `{m}`, so that one script may use them together in a
Redis Cluster. Names of models, users and replicas are encoded first: see `encode`.
"""

import hashlib
import re
from functools import lru_cache
from typing import Literal

import msgspec

CLASSES = ("interactive", "standard", "batch")
"""Priority classes, highest first."""

Policy = Literal["weighted", "strict"]
"""How classes relate: see GROUPS."""

GROUPS: dict[Policy, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "weighted": (("live", ("interactive", "standard")), ("batch", ("batch",))),
    "strict": tuple((c, (c,)) for c in CLASSES),
}
"""(group, its classes), each highest first. The classes of a group share one order and one counter
for each user; a lower group goes when the higher have nothing waiting, or is owed its floor."""

GATEWAYS = "fl:gateways"
"""zset, permanent: gateway replica -> time of its last heartbeat in ms of the Redis clock."""
MODELS = "fl:models"
"""hash, permanent: dispatcher -> wire.Announcement, what it serves."""
BACKENDS = "fl:backends"
"""hash, permanent: what was changed by HTTP. `add <url>` -> wire.Placed of a backend added,
`drain <url>` -> wire.Placed without one; `kept` once anything was: common/placed.py."""
KNOWN = "fl:known"
"""hash, permanent: model -> ms of the Redis clock when a dispatcher last had a backend or waiting
jobs of it, or a program submitted one, so that some dispatcher looks after its jobs though no
source names it any more; forgotten a day later, once nothing waits or runs; at most 256."""
JOBS = "fl:jobs:"
"""hash, `fl:jobs:<job>`: `about` common/durable.py's description of a durable job, `in` once the
queue has it; expires some time after the answer."""
JOBS_OF = "fl:jobs-of:"
"""zset, `fl:jobs-of:<user>`: durable job -> when it was made, in ms of the Redis clock; the newest
10,000, expires a month after the last."""
WEBHOOKS = "fl:webhooks"
"""zset: durable job -> when its webhook is due, in ms of the Redis clock; gone once delivered or
given up."""
WEBHOOK = "fl:webhook:"
"""string, `fl:webhook:<job>`: the gateway replica that sends its webhook just now; expires."""
BATCH = "fl:batch:"
"""hash, `fl:batch:<batch>`: common/batch_state.py's About and State, who runs it, and until when.
With `:done` a string, the bitmap of its lines whose results are in parts; with `:parts` the list of
these. Each expires a while after the batch's end."""
BATCHES = "fl:batches"
"""zset, permanent: `<batch>:<owner>` of batches that are not over -> when made, in ms of the Redis
clock; bounded by `[batch] active_max`."""
BATCHES_OF = "fl:batches-of:"
"""zset, `fl:batches-of:<owner>`: batch -> when made; the newest 10,000, expires with the one that
stays longest."""
BATCHES_OVER = "fl:batches-over"
"""zset, permanent: `<batch>:<encoded model>` of those that ended -> when, in ms of the Redis clock,
until what they left is removed."""
BATCH_TURNS = "fl:batch-turns"
"""zset, permanent: arq's queue of turns. arq's other keys begin with `arq:` and expire."""

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


def path(user: str, sub: str = "") -> str:
    """A user as verbs and lanes know it; a sub-user's has a colon, which no encoded name has."""
    return f"{encode(user)}:{encode(sub)}" if sub else encode(user)


def parent(user: str) -> str:
    """The encoded name of the key whose sub-user this path is; empty for a user of its own."""
    return user.partition(":")[0] if ":" in user else ""


def reply(replica: str) -> str:
    """Channel: frames for the jobs of one gateway replica."""
    return f"fl:reply:{replica}"


def control(dispatcher: str) -> str:
    """Channel: cancel, acknowledge and resend for the jobs one dispatcher runs."""
    return f"fl:control:{dispatcher}"


def ended_of(model: str, sink: str) -> str:
    """As `ModelKeys.ended`, of an encoded model."""
    return f"fl:{{{model}}}:ended:{sink}"


class ClassKeys(msgspec.Struct, frozen=True):
    """The keys of one priority class of a model; its group decides the counter."""

    name: str
    group: str
    backlog: str
    """zset: users with waiting jobs -> virtual counter; a key with sub-users ends in a colon.
    With `:<key>` the same for the sub-users of one key."""
    counter: str
    """hash: idle users' counters; dropped once at or below V with nothing in flight.
    With `:<key>` the same for the sub-users of one key."""
    others: tuple[str, ...]
    """Backlogs of the other classes of the group."""


def _tallies(policy: Policy) -> tuple[str, ...]:
    (_, *below), every = GROUPS[policy], [c for _, classes in GROUPS[policy] for c in classes]
    return *(f"jobs:{c}" for c in every), *(f"owed:{g}" for g, classes in below for _ in classes)


class ModelKeys:
    """The keys of one model. `permanent` tells those that may stay when nothing waits or runs."""

    def __init__(self, model: str, policy: Policy = "weighted") -> None:
        self.model = model
        self.policy = policy
        self.groups_text = ";".join(f"{g}={','.join(cs)}" for g, cs in GROUPS[policy])
        """The policy as scripts read it."""
        self.prefix = f"fl:{{{encode(model)}}}:"
        p = self.prefix
        self.lane_prefix = f"{p}lane:"
        self.record_prefix = f"{p}job:"
        self.body_prefix = f"{p}body:"
        self.board = f"{p}board"
        """hash, permanent: what there is one of.
        Who leads: `owner`, `term`, `deadline`, `reap_after`, `hold`.
        What waits: `jobs:<class>`, `bytes`.
        `arrival`: the last arrival number (µs of the Redis clock, strictly rising).
        The order: `v:<group>` V, the whole part of the counter at the last pop, which
        falls only by what was given back since it last changed; `<group>` lifts and `back:<group>`
        what was given back since then. `<group>:<key>:` the same among the sub-users of one key,
        for as long as the key has a counter. `owed:<group>` what the group may go for before its
        turn."""
        self.waiting = f"{p}waiting"
        """hash: `<user>` bytes that wait, `<key>:` those of all its sub-users, `<class>:<key>:`
        their jobs. A user's jobs are those of its lane."""
        self.deadlines = f"{p}deadlines"
        """zset: waiting job -> deadline in ms of the Redis clock."""
        self.running = f"{p}running"
        """zset: job -> lease deadline in ms (an orphan: the next repeat of its frame)."""
        self.inflight = f"{p}inflight"
        """hash: user -> running jobs; `<key>:` those of all its sub-users."""
        self.ewma = f"{p}ewma"
        """hash, permanent: user -> mean units of cost; bounded by `reap`."""
        self.bell = f"{p}bell"
        """channel: `<event> <job> <backend or ->` for cancel, start, settle, requeue, assert;
        `enqueue <job> <class>`; `give <dispatcher> -` from a leader that gives up the lead."""
        self.live = f"{p}live"
        """channel: a durable job whose log has grown, for all that follow one of the model's."""
        self.backlog_prefix = f"{p}backlog:"
        self.counter_prefix = f"{p}counter:"
        self.classes = {
            c: ClassKeys(
                c, group, self.backlog_prefix + c, self.counter_prefix + group,
                tuple(self.backlog_prefix + o for o in members if o != c),
            )
            for group, members in GROUPS[policy]
            for c in members
        }  # fmt: skip
        self.top = len(GROUPS[policy][0][1])
        """How many classes the highest group has, which is never owed anything."""
        self.tallies = _tallies(policy)
        """Fields of the board: of each class its jobs; of any below `top` what its group is due."""

    @property
    def ended_prefix(self) -> str:
        """Of `ended`."""
        return f"{self.prefix}ended:"

    def order(self, cls: str, user: str) -> list[str]:
        """Where a user of a class stands, as scripts take it: backlogs and counter of its
        level; of a sub-user its key's level, then its own."""
        side, key = self.classes[cls], parent(user)
        top = [side.backlog, *side.others, side.counter]
        return top + [f"{k}:{key}" for k in top] if key else top

    def lane(self, cls: str, user: str) -> str:
        """zset: job -> arrival number, the waiting jobs of one user in one class."""
        return f"{self.lane_prefix}{cls}:{user}"

    def record(self, job: str) -> str:
        """hash: the job's record; expires 10 minutes after its end unless acknowledged before."""
        return self.record_prefix + job

    def body(self, job: str) -> str:
        """string: `<bytes of meta>:`, wire.JobMeta, the request body; deleted when the job ends."""
        return self.body_prefix + job

    def log(self, job: str) -> str:
        """stream: the frames of a durable job, `<attempt>-<seq of the last + 1>` -> `f` wire.Batch;
        expires with its record, at most LOG_KEEP_MS after its last start."""
        return f"{self.prefix}log:{job}"

    def ended(self, sink: str) -> str:
        """list: durable jobs that have ended, of those that name this sink; whoever collects them
        takes them off. At most 100,000, the newest; expires 30 days after the last came."""
        return self.ended_prefix + sink

    def owned(self, replica: str) -> str:
        """set: open jobs of a gateway replica; expires a day after its last enqueue."""
        return f"{self.prefix}owned:{replica}"

    def permanent(self, key: str) -> bool:
        """Whether a key may stay in Redis when no job is waiting or running.

        Idle users' counters count among them: `reap` drops each once V has passed it.
        """
        fixed = (
            GATEWAYS, MODELS, BACKENDS, KNOWN, BATCHES, BATCHES_OVER, BATCH_TURNS, self.board,
            self.ewma,
        )  # fmt: skip
        return key in fixed or key.startswith(self.counter_prefix)
