"""The queue of one model: one method for each Lua verb, and the types of what they return.

Ownership: after `enqueue` the queue owns the job, until its deadline; after `pop` the dispatcher
that popped it owns it, until its lease ends; its heir is then the leader, by way of `reap`. After
`settle` nobody does: the record only waits for the gateway's `ack`.

Every method raises BrokerDown (nothing ran), BrokerUncertain (it may have run) or BrokerRefused.
`now_ms` is 0 in production (the Redis server's clock); tests pass virtual time.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from common import keys
from common.broker import Broker
from common.cost import OUTPUT_ALPHA, OUTPUT_START, Terms
from common.errors import BrokerError
from common.jobs import (
    Due,
    Enqueued,
    Heads,
    Lane,
    Lease,
    Led,
    Limits,
    NewJob,
    Popped,
    Running,
    Snapshot,
    Waiting,
)
from common.keys import ModelKeys, Policy
from common.outcomes import Outcome
from common.wire import Cancel, End, encode_batch, encode_controls, encode_frame

RECORD_KEEP_MS = 600_000
TOMBSTONE_MS = 60_000
OWNED_KEEP_MS = 86_400_000
ORPHAN_AGAIN_MS = 1_000
GATEWAY_KEEP_MS = 600_000
POP_HEADS_MAX = 512
POP_SCAN_MAX = 64
POP_BYTES_MAX = 8 << 20
SNAPSHOT_MAX = 1_000
REAP_MAX = 100
EWMA_MAX = 10_000
COUNTERS_MAX = 100_000
META_DIGITS_MAX = 10
LOG_KEEP_MS = 7 * 86_400_000
"""The log of a durable job that never ends, whatever becomes of it, goes after this."""
FORGET_MAX = 100

Span = tuple[int, int]
"""The numbers of the first and the last of frames that go into a durable job's log."""


class Queue:
    """The verbs of one model, bound to its keys."""

    def __init__(self, broker: Broker, model: str, policy: Policy = "weighted") -> None:
        """All gateways and dispatchers of a model go by the same `policy`."""
        self.broker = broker
        self.model = model
        self.keys = ModelKeys(model, policy)

    async def lead(
        self,
        op: Literal["take", "renew", "give"],
        owner: str,
        *,
        term: int = 0,
        lease_ms: int = 2_000,
        grace_ms: int = 6_000,
        hold_ms: int = 0,
        now_ms: int = 0,
    ) -> Led:
        """Take, renew or give up leadership. A renewal over 1 s after the last counts as a gap."""
        reply = await self.broker.call(
            "lead", board=self.keys.board, now_ms=now_ms, op=op, owner=owner, term=term,
            lease_ms=lease_ms, grace_ms=grace_ms, gap_ms=1_000, hold_ms=hold_ms,
        )  # fmt: skip
        word = reply[0].decode()
        if word == "leader":
            return Led(word, term=int(reply[1]), owner=owner)
        if word == "held":
            return Led(word, owner=reply[1].decode(), left_ms=int(reply[2]))
        return Led(word)

    async def enqueue(self, job: NewJob, limits: Limits, *, now_ms: int = 0) -> Enqueued:
        """Put a job in its user's lane. Harmless to repeat: a known id changes nothing."""
        k, user = self.keys, keys.path(job.user, job.sub)
        reply = await self.broker.call(
            "enqueue", record=k.record(job.id), body=k.body(job.id), lane=k.lane(job.cls, user),
            board=k.board, waiting=k.waiting, deadlines=k.deadlines,
            owned=k.owned(job.replica), log=k.log(job.id), order=k.order(job.cls, user),
            now_ms=now_ms, job=job.id,
            user=user, group=k.classes[job.cls].group, arrival=job.arrival, floor=job.floor,
            wait_ms=job.wait_ms, user_jobs=limits.user_jobs, user_bytes=limits.user_bytes,
            key_jobs=limits.key_jobs, key_bytes=limits.key_bytes,
            model_jobs=limits.model_jobs, model_bytes=limits.model_bytes,
            terms=_numbers(job.weight, job.terms), replica=job.replica, size=len(job.body),
            data=_stored(job.meta, job.body), owned_ms=OWNED_KEEP_MS, keep_ms=job.keep_ms,
            sink=job.sink, bell=k.bell, **{"class": job.cls},
        )  # fmt: skip
        word = reply[0].decode()
        if word == "queued":
            return Enqueued(word, arrival=int(reply[1]))
        if word == "known":
            return Enqueued(word, state=reply[1].decode())
        if word == "full":
            return Enqueued("full_user" if reply[1] == b"user" else "full_model")
        return Enqueued(word)

    async def pop(
        self,
        classes: Sequence[str],
        backends: Sequence[str],
        owner: str,
        term: int,
        *,
        anyone: int | None = None,
        user_max: int = 0,
        floor: float = 0.0,
        lookahead: int = 0,
        liked: Sequence[str] = (),
        start: float = OUTPUT_START,
        lease_ms: int = 6_000,
        now_ms: int = 0,
    ) -> Popped:
        """Lease the next jobs of one group, one for each backend place named, in that order.

        `classes` are those of the group that may go. `anyone`: so many of the places, the first
        ones, may go to any user, the rest to those with nothing in flight (of whose key nothing is,
        where it has sub-users); None: all. `user_max`: a user with so many jobs in flight is passed
        over; 0: none is. Of each class up to POP_SCAN_MAX users are looked at. `floor`: the share
        of its charges that the groups below earn while they wait. `liked` jobs may go before
        `lookahead` earlier ones of their lane, each of which is passed so often at most. `start`:
        units of cost expected of a user never seen.

        The caller owns what it gets. Never cancelled midway and never repeated: after an error the
        leader looks for running jobs of its own that it does not know.
        """
        k, group = self.keys, self.keys.classes[classes[0]].group
        reply = await self.broker.call(
            "pop", running=k.running, inflight=k.inflight, ewma=k.ewma, board=k.board,
            waiting=k.waiting, deadlines=k.deadlines, now_ms=now_ms, owner=owner, term=term,
            lease_ms=lease_ms, group=group, key_prefix=k.prefix, start=start, floor=floor,
            anyone=len(backends) if anyone is None else anyone, user_max=user_max,
            batch=POP_HEADS_MAX, scan=POP_SCAN_MAX, bytes_max=POP_BYTES_MAX, lookahead=lookahead,
            liked=f" {' '.join(liked)} " if liked and lookahead else "", n=len(k.classes),
            top=k.top, names=[*backends, *k.classes, *(
                "1" if c in classes else "0" if side.group == group else "-"
                for c, side in k.classes.items()
            ), *k.tallies],
        )  # fmt: skip
        return _popped(k, reply, backends)

    async def start(
        self,
        job: str,
        owner: str,
        attempt: int,
        channel: str,
        frames: bytes,
        *,
        log: Span | None = None,
        ring: bool = True,
    ) -> Literal["started", "cancelled", "lost", "unknown"]:
        """Publish a run's first frames, if the run is still the right one; those of a durable job,
        which are `log`, go into its log. May be repeated.

        `ring`: tell the leader, where that is another dispatcher.
        """
        reply = await self.broker.call(
            "start", record=self.keys.record(job), log=self.keys.log(job), job=job, owner=owner,
            attempt=attempt, channel=channel, entry=_entry(attempt, log), frames=frames,
            log_ms=LOG_KEEP_MS, bell=self.keys.bell if ring else "",
        )  # fmt: skip
        return reply.decode()  # type: ignore[no-any-return]

    async def append(
        self, job: str, owner: str, attempt: int, frames: bytes, log: Span
    ) -> Literal["appended", "gap", "cancelled", "lost", "unknown"]:
        """Put further frames of a durable job into its log, if the run is still the right one. May
        be repeated. After `gap` those before them are to be put there first: Redis lost them."""
        k = self.keys
        reply = await self.broker.call(
            "append", record=k.record(job), log=k.log(job), job=job, owner=owner, attempt=attempt,
            channel=k.live, first=log[0], entry=_entry(attempt, log), frames=frames,
            log_ms=LOG_KEEP_MS,
        )  # fmt: skip
        return reply.decode()  # type: ignore[no-any-return]

    async def forget(self, jobs: Sequence[str]) -> int:
        """Drop ended durable jobs whose answers are collected; how many there were. At most
        FORGET_MAX at once. May be repeated."""
        k, n = self.keys, 0
        for i in range(0, len(jobs), FORGET_MAX):
            part = jobs[i : i + FORGET_MAX]
            n += int(
                await self.broker.call(
                    "forget", keys=[key for j in part for key in (k.record(j), k.log(j))]
                )
            )
        return n

    async def renew(
        self,
        jobs: Sequence[tuple[str, int, str]],
        owner: str,
        *,
        lease_ms: int = 6_000,
        now_ms: int = 0,
    ) -> list[Literal["ok", "cancelled", "lost", "unknown"]]:
        """Extend the leases of (job, attempt, new backend or ""). One word for each."""
        reply = await self.broker.call(
            "renew", running=self.keys.running, records=[self.keys.record(j) for j, _, _ in jobs],
            now_ms=now_ms, owner=owner, lease_ms=lease_ms,
            triples=[v for j, attempt, backend in jobs for v in (j, str(attempt), backend)],
        )  # fmt: skip
        return [w.decode() for w in reply]

    async def charge(
        self, jobs: Sequence[tuple[Lease, float]], owner: str
    ) -> list[Literal["raised", "enough", "lost"]]:
        """Raise the charge of running jobs: each with its cost so far, before weighting."""
        k = self.keys
        places = [[k.record(run.job), *k.order(run.cls, run.user)] for run, _ in jobs]
        items = zip(jobs, places, strict=True)
        reply = await self.broker.call(
            "charge", jobs=[key for place in places for key in place], owner=owner,
            items=[v for (r, cost), place in items for v in (str(r.attempt), cost, len(place))],
        )  # fmt: skip
        return [w.decode() for w in reply]

    async def settle(
        self,
        run: Lease | Due,
        owner: str,
        outcome: Outcome,
        frames: bytes,
        *,
        heir: bool = False,
        cost: float | None = None,
        learn: float | None = None,
        log: Span | None = None,
        ring: bool = True,
        now_ms: int = 0,
    ) -> Literal["settled", "lost", "unknown", "gap"]:
        """End a run once and publish its end; a durable job's, which is `log` unless its heir says
        it, goes into its log. Nobody owns the job afterwards. After `gap` (of one that
        is finished) the frames before are to be put into the log first.

        `cost` None: what was booked stands. `learn`: units of cost for the user's mean. `ring`:
        tell the leader, where that is another dispatcher.
        """
        k = self.keys
        reply = await self.broker.call(
            "settle", record=k.record(run.job), body=k.body(run.job), running=k.running,
            inflight=k.inflight, ewma=k.ewma, board=k.board,
            group=k.classes[run.cls].group, owned=k.owned(run.replica), log=k.log(run.job),
            order=k.order(run.cls, run.user), now_ms=now_ms, job=run.job, owner=owner,
            attempt=run.attempt, heir=int(heir), outcome=str(outcome),
            cost="" if cost is None else float(cost), learn="" if learn is None else learn,
            alpha=OUTPUT_ALPHA,
            keep_ms=RECORD_KEEP_MS, again_ms=ORPHAN_AGAIN_MS, channel=run.channel,
            first=log[0] if log else 0, entry=_entry(run.attempt, log), ended_prefix=k.ended_prefix,
            frames=frames, bell=k.bell if ring else "",
        )  # fmt: skip
        return reply.decode()  # type: ignore[no-any-return]

    async def ack(self, jobs: Sequence[str], replica: str) -> int:
        """Forget ended jobs whose end the gateway has. May be repeated."""
        k = self.keys
        reply = await self.broker.call(
            "ack", running=k.running, owned=k.owned(replica),
            records=[k.record(j) for j in jobs], jobs=jobs,
        )  # fmt: skip
        return int(reply)

    async def requeue(
        self,
        run: Lease | Due,
        owner: str,
        *,
        heir: bool = False,
        count_try: bool,
        yields: bool = False,
        tries_max: int = 3,
        now_ms: int = 0,
    ) -> Literal["requeued", "started", "cancelled", "tries", "lost", "unknown"]:
        """Give an unstarted run back to the queue, at its old place and with its charge undone.
        `yields`: it makes room for another, which is counted.

        After `started`, `cancelled` and `tries` the caller still owns it and settles it.
        """
        k = self.keys
        reply = await self.broker.call(
            "requeue", record=k.record(run.job), lane=k.lane(run.cls, run.user), board=k.board,
            group=k.classes[run.cls].group,
            running=k.running, inflight=k.inflight, waiting=k.waiting, deadlines=k.deadlines,
            order=k.order(run.cls, run.user), now_ms=now_ms,
            job=run.job, owner=owner, attempt=run.attempt, heir=int(heir), tries_max=tries_max,
            yields=int(yields), bell=k.bell, **{"try": int(count_try)},
        )  # fmt: skip
        return reply.decode()  # type: ignore[no-any-return]

    async def restore(
        self,
        run: Lease,
        owner: str,
        backend: str,
        charged: float,
        *,
        started: bool,
        keep_ms: int = 0,
        sink: str = "",
        lease_ms: int = 6_000,
        now_ms: int = 0,
    ) -> Literal["running", "restored", "cancelled", "lost"]:
        """The verb `assert`: tell Redis again of a run it may have lost. The caller owns it on
        `running` and `restored`, and must stop it on the others. `keep_ms` and `sink` as in NewJob.
        """
        k = self.keys
        fields = {
            "backend": backend, "arrival": str(run.arrival),
            "terms": _numbers(run.weight, run.terms), "replica": run.replica,
            "deadline": str(run.deadline_ms), "tries": str(run.tries),
            "size": str(len(run.body)), "floor": "0",
        }  # fmt: skip
        if started:
            fields["started"] = "1"
        if run.yields:
            fields["yields"] = str(run.yields)
        if run.durable:
            fields |= {"keep": str(keep_ms), "sink": sink}
        reply = await self.broker.call(
            "assert", board=k.board, record=k.record(run.job), body=k.body(run.job),
            lane=k.lane(run.cls, run.user), running=k.running, inflight=k.inflight,
            waiting=k.waiting, deadlines=k.deadlines, owned=k.owned(run.replica),
            order=k.order(run.cls, run.user), now_ms=now_ms, job=run.job, owner=owner,
            attempt=run.attempt, lease_ms=lease_ms, user=run.user, charged=charged,
            data=b"" if started and not run.durable else _stored(run.meta, run.body),
            owned_ms=0 if run.durable else OWNED_KEEP_MS, bell=k.bell,
            fields=[v for name, value in fields.items() for v in (name, value)],
            **{"class": run.cls},
        )  # fmt: skip
        return reply.decode()  # type: ignore[no-any-return]

    async def cancel(
        self,
        job: str,
        cls: str,
        user: str,
        replica: str,
        reason: Outcome,
        *,
        due: bool = False,
        frames: bytes = b"",
        now_ms: int = 0,
    ) -> tuple[Literal["cancelled", "flagged", "ended", "unknown", "early"], str]:
        """Take a waiting job out, or flag a running one: then the second part is its dispatcher,
        which still owns it. `user` is its path. A durable job (without a `replica`) that waits
        ends so: its log says it, even where `frames` are none."""
        k = self.keys
        if not (replica or frames):
            frames = encode_batch("", [encode_frame(End(job, 0, 0, reason, "", None))])
        reply = await self.broker.call(
            "cancel", board=k.board, record=k.record(job), body=k.body(job), lane=k.lane(cls, user),
            waiting=k.waiting, deadlines=k.deadlines, running=k.running, owned=k.owned(replica),
            log=k.log(job), order=k.order(cls, user), now_ms=now_ms, job=job,
            reason=str(reason), due=int(due), keep_ms=TOMBSTONE_MS, channel=_channel(k, replica),
            frames=frames, ended_prefix=k.ended_prefix, bell=k.bell,
        )  # fmt: skip
        return reply[0].decode(), reply[1].decode() if len(reply) > 1 else ""

    async def stop(
        self, job: str, cls: str, user: str, replica: str, reason: Outcome, *, due: bool = False
    ) -> Literal["cancelled", "flagged", "ended", "unknown", "early"]:
        """As `cancel`, and the dispatcher of a running job is told at once; where that is lost, the
        flag in the record reaches it at its next renewal."""
        word, dispatcher = await self.cancel(job, cls, user, replica, reason, due=due)
        if word == "flagged" and dispatcher:
            stop = encode_controls([Cancel(job, 0)])
            with contextlib.suppress(BrokerError):
                await self.broker.publish(keys.control(dispatcher), stop)
        return word

    async def reap(
        self,
        owner: str,
        term: int,
        dead: Sequence[str],
        group: str,
        key: str = "",
        cursor: str = "0",
        *,
        lease_ms: int = 6_000,
        now_ms: int = 0,
    ) -> tuple[list[Due], str] | None:
        """What is due, and where the sweep of counters goes on; None: term is stale.

        `dead`: gateway replicas without a heartbeat. Nothing changes hands here. Swept are the
        counters of `group`, or there those of the sub-users of an (encoded) `key`.
        """
        k = self.keys
        down = f"{group}:{key}" if key else group
        reply = await self.broker.call(
            "reap", running=k.running, deadlines=k.deadlines,
            inflight=k.inflight, ewma=k.ewma, board=k.board, counter=k.counter_prefix + down,
            sub=f":{key}:" if key else "", owned=[k.owned(r) for r in dead], now_ms=now_ms,
            owner=owner, term=term, lease_ms=lease_ms, batch=REAP_MAX, cursor=cursor,
            ewma_max=EWMA_MAX, counters_max=COUNTERS_MAX, group=group, job_prefix=k.record_prefix,
            counter_prefix=k.counter_prefix,
        )  # fmt: skip
        if reply[0] != b"due":
            return None
        return [_due(k, r) for r in reply[2:]], reply[1].decode()

    async def snapshot(
        self,
        asked: Sequence[tuple[str, str, str]] = (),
        lanes: Sequence[tuple[str, str]] = (),
        *,
        runs: bool = True,
    ) -> Snapshot:
        """The read model. `asked`: (class, path of the user, job) whose places are wanted;
        `lanes`: (class, path of the user) whose first SNAPSHOT_MAX jobs are. `runs`: with the
        running jobs, up to SNAPSHOT_MAX."""
        k = self.keys
        reply = await self.broker.call(
            "snapshot", board=k.board, waiting=k.waiting, running=k.running,
            batch=SNAPSHOT_MAX, most=SNAPSHOT_MAX if runs else 0,
            job_prefix=k.record_prefix, lane_prefix=k.lane_prefix,
            backlog_prefix=k.backlog_prefix, policy=k.groups_text,
            asked=[v for one in (*asked, *((c, u, "") for c, u in lanes)) for v in one],
        )  # fmt: skip
        running = [
            Running(_text(j), _text(o), int(a), _text(b), s == b"1", _text(u), _text(c), int(at))
            for j, o, a, b, s, u, c, at in reply[3]
        ]
        waiting = dict(zip(k.classes, reply[2], strict=True))
        found = reply[4]
        return Snapshot(
            reply[0].decode(), int(reply[1]), waiting, running, list(found[: len(asked)]),
            [_lane(r) for r in found[len(asked) :]],
        )  # fmt: skip


async def heartbeat(
    broker: Broker, replica: str, *, dead_ms: int = 6_000, now_ms: int = 0
) -> Literal["alive", "missing"]:
    """Say that a gateway replica lives; `missing`: it was taken for dead, or is new."""
    reply = await broker.call(
        "heartbeat", gateways=keys.GATEWAYS, now_ms=now_ms, replica=replica, dead_ms=dead_ms,
        keep_ms=GATEWAY_KEEP_MS,
    )  # fmt: skip
    return reply.decode()  # type: ignore[no-any-return]


async def describe(
    broker: Broker, job: str, step: Literal["new", "in", "out", "told", "hooks"],
    data: bytes = b"", lives_ms: int = 0,
) -> int:  # fmt: skip
    """Keep the description of a durable job: `new`, unless there is one; `in`, its job is in the
    queue; `out`, it goes where the queue took the job from none of its submitters. `told` and
    `hooks` count a webhook that was taken, or was not, which then is kept (`data`). 0: there was
    nothing to change."""
    reply = await broker.call(
        "describe", about=keys.JOBS + job, step=step, data=data, lives_ms=lives_ms
    )
    return int(reply)


def _numbers(weight: float, terms: Terms) -> str:
    """As a record has them."""
    return f"{weight!r} {terms.fixed!r} {terms.per_unit!r} {terms.per_square!r} {terms.most}"


def _stored(meta: bytes, body: bytes) -> bytes:
    """What stands under a job's body key; of a meta that is never text."""
    return b"%d:%b%b" % (len(meta), meta, body)


def _entry(attempt: int, log: Span | None) -> str:
    """Where frames stand in a job's log."""
    return f"{attempt}-{log[1] + 1}" if log else ""


def _channel(k: ModelKeys, replica: str) -> str:
    """Who hears of a job's frames."""
    return keys.reply(replica) if replica else k.live


def _popped(k: ModelKeys, reply: bytes | list[Any], backends: Sequence[str]) -> Popped:
    parts: list[Any] = reply.split(b"\n", 2) if isinstance(reply, bytes) else reply
    word, *rest = parts[0].decode().split()
    if word != "popped":
        return Popped(word, [], held_ms=int(parts[1]) if word == "held" else 0)
    heads = [_heads(r) for r in parts.pop()] if isinstance(parts[-1], list) else []
    leases = [_lease(k, *r) for r in zip(parts[1::2], parts[2::2], backends, strict=False)]
    left = {c: int(jobs) for c, jobs in zip(k.classes, rest, strict=False)}
    owed = (field.removeprefix("owed:") for field in rest[len(left) :])
    return Popped(word, leases, left, tuple(owed), heads=heads)


def _lease(k: ModelKeys, run: bytes, stored: bytes, backend: str) -> Lease:
    job, user, cls, attempt, charged, tries, yields, arrival, deadline, inflight, *rest = (
        run.decode().split(" ", 15)
    )
    weight, fixed, unit, square, most, replica = rest
    at, end = _meta(stored)
    return Lease(
        job=job, user=user, cls=cls, attempt=int(attempt), backend=backend, charged=float(charged),
        terms=Terms(float(fixed), float(unit), float(square), int(most)), weight=float(weight),
        meta=stored[at:end], channel=_channel(k, replica), replica=replica, tries=int(tries),
        arrival=int(arrival), deadline_ms=int(deadline), inflight=int(inflight), body=stored[end:],
        yields=int(yields),
    )  # fmt: skip


def _meta(stored: bytes) -> tuple[int, int]:
    """Where the meta begins and ends."""
    at = stored.find(b":", 0, META_DIGITS_MAX) + 1
    return (at, at + int(stored[: at - 1] or 0)) if at else (0, 0)


def _heads(r: list[bytes]) -> Heads:
    jobs = []
    for job, stored in zip(r[2::2], r[3::2], strict=True):
        at, end = _meta(stored)
        jobs.append((job.decode(), stored[at:end] if end <= len(stored) else b""))
    return Heads(r[0].decode(), r[1].decode(), jobs)


def _lane(r: list[bytes]) -> Lane:
    jobs, rest = int(r[0]), r[1:]
    return Lane(
        jobs,
        [
            Waiting(job.decode(), int(float(at)), int(place))
            for job, at, place in zip(rest[::3], rest[1::3], rest[2::3], strict=True)
        ],
    )


def _due(k: ModelKeys, r: list[bytes]) -> Due:
    why, job, state, user, cls, owner, attempt, started, replica = (v.decode() for v in r)
    return Due(
        why, job, state, user, cls, owner, int(attempt), started == "1",  # type: ignore[arg-type]
        _channel(k, replica) if state else "", replica,
    )  # fmt: skip


def _text(raw: bytes) -> str:
    return raw.decode()
