"""Durable jobs: put on the queue by whoever, run like any other, and their answers kept.

A job's description is in `fl:jobs:<id>`, its state in the record of the queue, its answer in its
log. The description is written first, and expires: where the queue refuses the job it is taken away
again, unless another submitter of the same id had more luck.

Ownership: after `submit` the queue owns the job, as in common/queue.py; after its end nobody does,
its record and its log stay for `ttl_s`.
"""

import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec

from common import joblog, keys
from common.broker import Broker
from common.errors import WireError
from common.job_settings import KEPT_MAX, TTL_S_MAX
from common.jobs import Limits, NewJob
from common.keys import ModelKeys
from common.outcomes import Outcome
from common.queue import Queue, describe
from common.wire import End, Head, Usage

TTL_S = 86_400
"""How long an answer is kept after the job's end, where nothing else is said."""
SPARE_S = 86_400
"""A description outlives the answer it belongs to by this."""
RESULT_MAX = 64 << 20
"""The largest answer that is read as a whole."""

_NOTHING = Head("", 0, 0, 0, [], False)
"""Where no engine answered."""

LISTED = ("job", "response")
"""Kinds of jobs that a user is shown; others belong to something else that is."""

Submitted = Literal["queued", "known", "conflict", "full_user", "full_model"]
State = Literal["queued", "running", "completed", "failed", "cancelled", "expired", "unknown"]
_STATES: dict[str, State] = {
    Outcome.FINISHED: "completed",
    Outcome.CANCELLED: "cancelled",
    Outcome.DEADLINE: "expired",
}


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a durable job beside its place in the queue."""

    id: str
    model: str
    user: str
    """As people write it."""
    sub: str = ""
    cls: str
    path: str
    stream: bool
    created_ms: int
    """By the Redis clock."""
    wait_ms: int
    ttl_s: int = TTL_S
    metadata: dict[str, str] = {}
    webhook: str = ""
    digest: str = ""
    """Of what was asked for, so that an idempotency key cannot mean two things."""
    kind: str = "job"
    """By which API it was asked for: `job`, `response`; else it is not listed."""
    extra: bytes = b""
    """What that API needs to show it again: JSON."""

    @property
    def owner(self) -> str:
        """Whose it is: a path as the verbs know it."""
        return keys.path(self.user, self.sub)


class Status(msgspec.Struct, frozen=True):
    """How a durable job stands."""

    about: About
    state: State
    outcome: Outcome | None = None
    message: str = ""
    """Of a failure, for people."""
    usage: Usage | None = None
    started_ms: int | None = None
    """When its newest run began, by the Redis clock."""
    ended_ms: int | None = None
    tries: int = 0
    dispatcher: str = ""
    """Who runs it."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state not in ("queued", "running")

    @property
    def answered(self) -> bool:
        """Whether it ended with an answer of an engine's, which may be a refusal."""
        return self.outcome in (Outcome.FINISHED, Outcome.REFUSED)


class Result(msgspec.Struct, frozen=True):
    """A whole answer, of the attempt that ended."""

    status: int
    headers: list[tuple[str, str]]
    stream: bool
    body: bytes
    outcome: Outcome
    message: str
    usage: Usage | None


class ResultTooLargeError(Exception):
    """An answer is larger than RESULT_MAX: read its events."""


def sink_safe(sink: str) -> bool:
    """Whether a name may be a sink's: it becomes part of a key."""
    return 0 < len(sink) <= 64 and sink.isascii() and sink.replace("-", "").isalnum()


def keyed_id(user: str, key: str) -> str:
    """The id of the job that a user submits under an idempotency key."""
    return hashlib.sha256(f"{len(user)}:{user}{key}".encode(errors="replace")).hexdigest()[:32]


def digest_of(path: str, body: bytes) -> str:
    """Of what is asked for."""
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()[:32]


class Durable:
    """Durable jobs of all models. `queue_of` gives a model's queue."""

    def __init__(self, broker: Broker, queue_of: Callable[[str], Queue]) -> None:
        self._broker = broker
        self._queue_of = queue_of

    async def submit(self, new: NewJob, about: About, limits: Limits) -> tuple[Submitted, About]:
        """Put a job on the queue, once for each id: where there is one of this id already, it is
        that one. May be repeated. Raises BrokerError, after which it may be there or not.

        `full_user` and `full_model`: the queue takes no more, and nothing stays. `conflict`: the id
        stands for another request.
        """
        fresh = await self._describe(about, "new")
        if not fresh:
            known, inside = await self._described(new.id)
            if known is not None:
                if known.digest != about.digest:
                    return "conflict", known
                if inside:
                    return "known", known
                about = known
        answer = await self._queue_of(about.model).enqueue(new, limits)
        if answer.word in ("full_user", "full_model", "cancelled"):
            await self._describe(about, "out")
            return ("full_user" if answer.word == "cancelled" else answer.word), about
        await self._listed(about)
        # Another submitter, whom the queue refused, may have taken it away meanwhile.
        await self._describe(about, "in")
        return ("queued" if fresh else "known"), about

    async def find(self, id: str) -> About | None:
        """A job's description; None where there is none. Whose it is, is the caller's to check."""
        return (await self._described(id))[0]

    async def status(self, about: About) -> Status:
        """How a job stands. Raises BrokerError."""
        k = self._queue_of(about.model).keys
        state, outcome, attempt, tries, owner, ended = await self._broker.command(
            "HMGET", k.record(about.id), "state", "outcome", "attempt", "tries", "owner", "ended"
        )
        started = int(attempt) if attempt else None
        if state == b"waiting":
            return Status(about, "queued", tries=int(tries or 0))
        if state == b"running":
            who = (owner or b"").decode()
            return Status(
                about, "running", started_ms=started, tries=int(tries or 0), dispatcher=who
            )
        if state != b"done":
            return Status(about, "cancelled" if state == b"cancelled" else "unknown")
        end = await self._end(k, about.id)
        known = Outcome(outcome.decode())
        return Status(
            about, _STATES.get(known, "failed"), known,
            message=end.message if end else "", usage=end.usage if end else None,
            started_ms=started, ended_ms=int(ended) if ended else None, tries=int(tries or 0),
        )  # fmt: skip

    async def result(self, about: About, *, body: bool = True) -> Result | None:
        """The whole answer of a job that has ended, None while there is none; not `body`: without
        it. Raises BrokerError, and ResultTooLargeError."""
        k = self._queue_of(about.model).keys
        count = joblog.READ_MAX if body else 1
        found = await joblog.whole(self._broker, k, about.id, RESULT_MAX if body else 0, count)
        if found is None:
            return None
        if body and found.body is None:
            raise ResultTooLargeError
        head, end = found.head or _NOTHING, found.end
        return Result(
            head.status, head.headers, head.stream, found.body or b"", end.outcome, end.message,
            end.usage,
        )  # fmt: skip

    async def cancel(self, about: About) -> Literal["cancelled", "flagged", "ended", "unknown"]:
        """Take a job out of the queue, or have its run stopped: `flagged`, it ends soon. Raises
        BrokerError; may be repeated."""
        queue = self._queue_of(about.model)
        word = await queue.stop(about.id, about.cls, about.owner, "", Outcome.CANCELLED)
        return "unknown" if word == "early" else word

    async def kept(self, owner: str) -> int:
        """How many jobs a user (its path) has, counting some that have expired. Raises
        BrokerError."""
        return int(await self._broker.command("ZCARD", keys.JOBS_OF + owner))

    async def drop(self, about: About) -> None:
        """Forget a job that has ended, its answer too. Raises BrokerError; may be repeated."""
        await self._queue_of(about.model).forget([about.id])
        await self._broker.command("ZREM", keys.JOBS_OF + about.owner, about.id)
        await self._broker.command("DEL", keys.JOBS + about.id)

    async def own(
        self,
        owner: str,
        *,
        after: str = "",
        limit: int = 100,
        order: Literal["asc", "desc"] = "desc",
    ) -> tuple[list[About], bool]:
        """At most `limit` of a user's jobs (by its path), behind the one whose id is `after`, by
        the time of their making; whether more follow. Raises BrokerError."""
        key = keys.JOBS_OF + owner
        rank, pages = ("ZREVRANK", "ZREVRANGE") if order == "desc" else ("ZRANK", "ZRANGE")
        at = 0
        if after:
            found = await self._broker.command(rank, key, after)
            if found is None:
                return [], False
            at = int(found) + 1
        names = await self._broker.command(pages, key, at, at + limit)
        jobs: list[About] = []
        for name in names[:limit]:
            about = await self.find(name.decode())
            if about is None:
                await self._broker.command("ZREM", key, name)
            else:
                jobs.append(about)
        return jobs, len(names) > limit

    async def _describe(self, about: About, step: Literal["new", "in", "out"]) -> int:
        lives_ms = about.wait_ms + (about.ttl_s + SPARE_S) * 1000
        packed = msgspec.msgpack.encode(about)
        return await describe(self._broker, about.id, step, packed, lives_ms)

    async def _described(self, id: str) -> tuple[About | None, bool]:
        packed, inside = await self._broker.command("HMGET", keys.JOBS + id, "about", "in")
        if packed is None:
            return None, False
        try:
            return msgspec.msgpack.decode(packed, type=About), inside is not None
        except msgspec.MsgspecError as e:
            raise WireError(f"the description of job {id}: {e}") from None

    async def _listed(self, about: About) -> None:
        if about.kind not in LISTED:
            return
        key = keys.JOBS_OF + about.owner
        await self._broker.command("ZADD", key, about.created_ms, about.id)
        await self._broker.command("ZREMRANGEBYRANK", key, 0, -KEPT_MAX - 1)
        await self._broker.command("PEXPIRE", key, TTL_S_MAX * 1000)

    async def _end(self, k: ModelKeys, job: str) -> End | None:
        entry = await joblog.last(self._broker, k, job)
        ends = [f for f in entry.frames if isinstance(f, End)] if entry else []
        return ends[-1] if ends else None
