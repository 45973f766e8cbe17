"""All that Redis holds of a queue, in one form for model and server, and what must hold of it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import fakeredis
import msgspec

from common.keys import ModelKeys, parent
from sim.model import Model
from sim.model_state import Job

DUMP = """
local out = {}
for i, k in ipairs(redis.call('KEYS', '*')) do
  local t, c = redis.call('TYPE', k).ok, nil
  if t == 'hash' then c = redis.call('HGETALL', k)
  elseif t == 'zset' then c = redis.call('ZRANGE', k, 0, -1, 'WITHSCORES')
  elseif t == 'set' then c = redis.call('SMEMBERS', k)
  else c = {redis.call('GET', k)} end
  out[i] = {k, t, redis.call('PTTL', k) > 0 and 1 or 0, c}
end
return out
"""
"""Reads every key: name, type, whether it expires, content."""

Raw = list[list[Any]]
"""What DUMP returns."""
Content = Any
Space = dict[str, tuple[str, bool, Content]]
"""Key -> type, whether it expires, content; numbers as floats, fields that are 0 left out."""


def dump_embedded(server: fakeredis.FakeServer) -> Raw:
    """What DUMP would return; read from inside, for scripts are slow there."""
    raw: Raw = []
    for key, item in server.dbs[0]._dict.items():
        value, content = item.value, [item.value]
        kind = b"string" if isinstance(value, bytes) else value._model_type
        if kind == b"zset":
            pairs = [(member, b"%.17g" % value[member]) for member in value]
        elif kind == b"hash":
            pairs = list(value._values.items())
        if kind in (b"zset", b"hash"):
            content = [part for pair in pairs for part in pair]
        elif kind == b"set":
            content = list(value)
        raw.append([key, kind, item.expireat is not None, content])
    return raw


def read(raw: Raw) -> Space:
    """The dump of a server."""
    space: Space = {}
    for key, kind, expires, content in raw:
        held: Content
        if kind in (b"hash", b"zset"):
            pairs = zip(content[::2], content[1::2], strict=True)
            held = {field.decode(): _plain(value) for field, value in pairs}
        elif kind == b"set":
            held = frozenset(m.decode() for m in content)
        else:
            held = _plain(content[0])
        space[key.decode()] = kind.decode(), bool(expires), held
    return _without_zeros(space)


def restoring(raw: Raw) -> list[tuple[bytes | str | int, ...]]:
    """The commands that bring an empty server to the state of a dump."""
    commands: list[tuple[bytes | str | int, ...]] = [("FLUSHALL",)]
    for key, kind, expires, content in raw:
        if kind == b"zset":
            swapped = [v for pair in zip(content[1::2], content[::2], strict=True) for v in pair]
            commands.append(("ZADD", key, *swapped))
        else:
            word = {b"hash": "HSET", b"set": "SADD", b"string": "SET"}[kind]
            commands.append((word, key, *content))
        if expires:
            commands.append(("PEXPIRE", key, 600_000))
    return commands


def expected(model: Model, keys: ModelKeys) -> Space:
    """What the server of this model must hold."""
    space: Space = {}

    def put(key: str, kind: str, content: Mapping[str, object] | bytes | float | set[str]) -> None:
        """Redis keeps no empty hash, set or zset."""
        if isinstance(content, set):
            held: Content = frozenset(content)
        elif isinstance(content, Mapping):
            held = {k: _plain(v) for k, v in content.items()}
        else:
            held = _plain(content)
        if held or kind == "string":
            space[key] = kind, kind == "set", held

    waiting = list(model.waiting())
    kept = [j for j in model.jobs.values() if j.state in ("running", "orphaned")]
    for job in model.jobs.values():
        if job.record:
            put(keys.record(job.id), "hash", _record(job))
            if job.state in ("done", "cancelled"):
                space[keys.record(job.id)] = "hash", True, space[keys.record(job.id)][2]
        if job.body is not None:
            put(keys.body(job.id), "string", job.body)
    for cls, user in {(j.cls, j.user) for j in waiting}:
        lane = model.lane(cls, user)
        put(keys.lane(cls, user), "zset", {j.id: j.arrival for j in lane})
    put(keys.deadlines, "zset", {j.id: j.deadline for j in waiting})
    put(keys.running, "zset", {j.id: j.lease for j in kept})
    running = [j.user for j in kept if j.state == "running"]
    put(keys.inflight, "hash", Counter(name for user in running for name in _names(user)))
    put(keys.waiting, "hash", _waiting(waiting))
    put(keys.ewma, "hash", model.means)
    for key, (kind, content) in _orders(model, keys).items():
        put(key, kind, content)
    if model.arrival:
        put(keys.arrival, "string", model.arrival)
    if model.leader:
        put(keys.leader, "hash", msgspec.structs.asdict(model.leader))
    for replica, jobs in model.owned.items():
        put(keys.owned(replica), "set", jobs)
    return _without_zeros(space)


def _orders(model: Model, keys: ModelKeys) -> dict[str, tuple[str, Any]]:
    """Who stands where; V, lifts, what was given back, what is owed."""
    lifts = {o + ":" * (":" in o): n for o, n in model.lifts.items() if n}
    owed = {f"owed:{group}": amount for group, amount in model.owed.items()}
    back = {f"back:{o}" + ":" * (":" in o): amount for o, amount in model.back.items()}
    held: dict[str, tuple[str, Any]] = {keys.groups: ("hash", lifts | owed | back)}
    for order, counters in model.counters.items():
        idle = {n: c for n, c in counters.items() if not model.stands(order, n)}
        held[keys.counter_prefix + order] = "hash", idle
        down = order.partition(":")[2]
        for cls in model.members(order):
            where = keys.backlog_prefix + cls + (f":{down}" if down else "")
            held[where] = "zset", {n: counters[n] for n in model.stand(order, cls)}
    return held | {keys.vtime_prefix + o: ("string", v) for o, v in model.vtime.items() if v}


def _record(job: Job) -> dict[str, object]:
    if job.state == "cancelled":
        return {"state": "cancelled"}
    fields: dict[str, object] = {
        "state": job.state, "user": job.user, "class": job.cls, "arrival": job.arrival,
        "floor": job.floor, "size": job.size, "fixed": job.terms.fixed,
        "per_unit": job.terms.per_unit, "per_square": job.terms.per_square,
        "most": job.terms.most, "weight": job.weight,
        "replica": job.replica, "channel": job.channel, "deadline": job.deadline,
        "tries": job.tries, "yields": job.yields or None, "meta": job.meta, "owner": job.owner,
        "attempt": job.attempt,
        "backend": job.backend, "sent": job.sent, "started": job.started,
        "charged": job.charged, "cancelled": job.cancelled, "outcome": job.outcome,
        "seq": job.seq,
    }  # fmt: skip
    if job.outcome is not None:
        fields["usage"] = msgspec.msgpack.encode(job.usage) if job.usage else b""
    return {name: value for name, value in fields.items() if value is not None}


def _waiting(jobs: list[Job]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for job in jobs:
        counts.update(["jobs", f"jobs:{job.cls}"])
        counts.update(bytes=job.size)
        for name in _names(job.user):
            counts.update({f"jobs:{job.cls}:{name}": 1, f"bytes:{name}": job.size})
    return counts


def _names(user: str) -> list[str]:
    """As what a user counts: itself, and where it is a sub-user its key."""
    key = parent(user)
    return [f"{key}:", user] if key else [user]


def _plain(value: object) -> object:
    """Numbers as floats, whoever wrote them; all else as bytes."""
    if isinstance(value, int | float):
        return float(value)
    raw = value if isinstance(value, bytes) else str(value).encode()
    try:
        return float(raw)
    except ValueError:
        return raw


def _without_zeros(space: Space) -> Space:
    """A count of 0 and no count say the same, and so do a V of 0 and none."""
    for key in [k for k, (_, _, held) in space.items() if "}:vtime:" in k and held == 0.0]:
        del space[key]
    for key in [k for k in space if k.endswith("}:waiting")]:
        kind, expires, counts = space[key]
        space[key] = kind, expires, {f: n for f, n in counts.items() if n}
        if not space[key][2]:
            del space[key]
    return space


def check(space: Space, keys: ModelKeys) -> None:
    """What must hold of a server whatever has happened; asserts."""

    def held(key: str) -> Any:
        return space[key][2] if key in space else {}

    lanes = {k: v[2] for k, v in space.items() if k.startswith(keys.lane_prefix)}
    waiting = [job for lane in lanes.values() for job in lane]
    records = {
        k.removeprefix(keys.record_prefix): v[2]
        for k, v in space.items()
        if k.startswith(keys.record_prefix)
    }
    running = {j for j in held(keys.running) if records[j]["state"] == b"running"}
    assert len(waiting) == len(set(waiting)), "a job in two lanes"
    assert not set(waiting) & held(keys.running).keys(), "a job waiting and running"
    assert set(waiting) == held(keys.deadlines).keys(), "deadlines are those of waiting jobs"
    counts = held(keys.waiting)
    assert counts.get("jobs", 0) == len(waiting), "waiting counts all"
    for key, lane in lanes.items():
        where = key.removeprefix(keys.lane_prefix)
        assert counts.get(f"jobs:{where}", 0) == len(lane), "waiting counts a lane"
    per_user = Counter(n for j in running for n in _names(records[j]["user"].decode()))
    assert held(keys.inflight) == per_user, "inflight counts running jobs"
    bodies = {k for k in space if k.startswith(keys.body_prefix)}
    assert bodies <= {keys.body(j) for j in (*waiting, *running)}, "a body without a use"
    for cls, side in keys.classes.items():
        start = f"{keys.lane_prefix}{cls}:"
        users = {k.removeprefix(start) for k in lanes if k.startswith(start)}
        for key in {parent(u) for u in users} | {""}:
            down = f":{key}" if key else ""
            mine = {u for u in users if parent(u) == key}
            mine |= set() if key else {f"{parent(u)}:" for u in users if parent(u)}
            assert mine == held(side.backlog + down).keys(), "the backlog is who has a lane"
            assert not mine & held(side.counter + down).keys(), "a counter kept twice"
            for other in side.others:
                both = mine & held(other + down).keys()
                scores = [{u: held(k + down)[u] for u in both} for k in (other, side.backlog)]
                assert scores[0] == scores[1], "two counters in one group"
