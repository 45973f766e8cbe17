"""All that Redis holds of a queue, in one form for model and server, and what must hold of it."""

from collections import Counter
from collections.abc import Callable, Mapping
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
  elseif t == 'list' then c = redis.call('LRANGE', k, 0, -1)
  elseif t == 'stream' then
    c = {}
    for _, e in ipairs(redis.call('XRANGE', k, '-', '+')) do
      c[#c + 1], c[#c + 2] = e[1], e[2][2]
    end
  else c = {redis.call('GET', k)} end
  out[i] = {k, t, redis.call('PTTL', k) > 0 and 1 or 0, c}
end
return out
"""
"""Reads every key: name, type, whether it expires, content."""

_KINDS = {bytes: b"string", list: b"list"}

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
        kind = _KINDS.get(type(value)) or value._model_type
        if kind == b"zset":
            pairs = [(member, b"%.17g" % value[member]) for member in value]
        elif kind == b"hash":
            pairs = list(value._values.items())
        if kind in (b"zset", b"hash"):
            content = [part for pair in pairs for part in pair]
        elif kind in (b"set", b"list"):
            content = list(value)
        elif kind == b"stream":
            entries = ((b"%d-%d" % (i.ts, i.seq), value._values_dict[i][1]) for i in value._ids)
            content = [part for entry in entries for part in entry]
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
        elif kind in (b"list", b"stream"):
            held = tuple(content)
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
        elif kind == b"stream":
            pairs = zip(content[::2], content[1::2], strict=True)
            commands += (("XADD", key, entry, "f", frames) for entry, frames in pairs)
        else:
            word = {b"hash": "HSET", b"set": "SADD", b"string": "SET", b"list": "RPUSH"}[kind]
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
            meta = job.meta or b""
            put(keys.body(job.id), "string", b"%d:%b%b" % (len(meta), meta, job.body))
    for cls, user in {(j.cls, j.user) for j in waiting}:
        lane = model.lane(cls, user)
        put(keys.lane(cls, user), "zset", {j.id: j.arrival for j in lane})
    put(keys.deadlines, "zset", {j.id: j.deadline for j in waiting})
    put(keys.running, "zset", {j.id: j.lease for j in kept})
    running = [j.user for j in kept if j.state == "running"]
    put(keys.inflight, "hash", Counter(name for user in running for name in _names(user)))
    counts, mine = _waiting(waiting)
    put(keys.waiting, "hash", mine)
    board = _orders(model, keys, put)
    board |= counts
    if model.arrival:
        board["arrival"] = model.arrival
    if model.leader:
        board |= msgspec.structs.asdict(model.leader)
    put(keys.board, "hash", board)
    put(keys.ewma, "hash", model.means)
    for job, entries in model.logs.items():
        flat = [v for at, frames in entries for v in (b"%d-%d" % at, frames)]
        space[keys.log(job)] = "stream", True, tuple(flat)
    for sink, ended in model.ended.items():
        space[keys.ended(sink)] = "list", True, tuple(j.encode() for j in ended)
    for replica, jobs in model.owned.items():
        put(keys.owned(replica), "set", jobs)
    return _without_zeros(space)


def _orders(model: Model, keys: ModelKeys, put: Callable[[str, str, Any], None]) -> dict[str, Any]:
    """Puts who stands where. Returns V, lifts, what was given back, what is owed."""
    lifts = {o + ":" * (":" in o): n for o, n in model.lifts.items() if n}
    vs = {f"v:{o}" + ":" * (":" in o): v for o, v in model.vtime.items()}
    owed = {f"owed:{group}": amount for group, amount in model.owed.items()}
    back = {f"back:{o}" + ":" * (":" in o): amount for o, amount in model.back.items()}
    for order, counters in model.counters.items():
        idle = {n: c for n, c in counters.items() if not model.stands(order, n)}
        put(keys.counter_prefix + order, "hash", idle)
        down = order.partition(":")[2]
        for cls in model.members(order):
            where = keys.backlog_prefix + cls + (f":{down}" if down else "")
            put(where, "zset", {n: counters[n] for n in model.stand(order, cls)})
    return lifts | owed | back | vs


def _record(job: Job) -> dict[str, object]:
    if job.state == "cancelled":
        return {"state": "cancelled"}
    fields: dict[str, object] = {
        "keep": job.keep or None, "ended": job.ended or None,
        "sink": job.sink if job.keep else None,
        "state": job.state, "user": job.user, "class": job.cls, "arrival": job.arrival,
        "floor": job.floor, "size": job.size, "terms": _terms(job), "replica": job.replica,
        "deadline": job.deadline, "tries": job.tries, "yields": job.yields or None,
        "passed": job.passed or None,
        "owner": job.owner, "attempt": job.attempt,
        "backend": job.backend, "started": job.started or None, "charged": job.charged,
        "cancelled": job.cancelled, "outcome": job.outcome,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def _terms(job: Job) -> str:
    t = job.terms
    return " ".join(map(str, (job.weight, t.fixed, t.per_unit, t.per_square, t.most)))


def _waiting(jobs: list[Job]) -> tuple[Counter[str], Counter[str]]:
    """What waits in all, and of each user."""
    counts: Counter[str] = Counter()
    mine: Counter[str] = Counter()
    for job in jobs:
        counts.update({f"jobs:{job.cls}": 1, "bytes": job.size})
        mine[job.user] += job.size
        if key := parent(job.user):
            mine.update({f"{job.cls}:{key}:": 1, f"{key}:": job.size})
    return counts, mine


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
    """Of these fields 0 and none say the same: counts, V, tries, the floor of attempts."""
    for key, (kind, expires, held) in list(space.items()):
        if kind == "hash":
            zeros = {f for f, n in held.items() if n == 0 and _may_be_zero(key, f)}
            space[key] = kind, expires, {f: n for f, n in held.items() if f not in zeros}
            if not space[key][2]:
                del space[key]
    return space


def _may_be_zero(key: str, field: str) -> bool:
    counted = key.endswith("}:waiting") or field.startswith(("v:", "jobs:", "owed:"))
    return counted or field in ("tries", "floor", "bytes")


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
    counts = held(keys.board)
    for cls in keys.classes:
        start = f"{keys.lane_prefix}{cls}:"
        mine = [lane for key, lane in lanes.items() if key.startswith(start)]
        assert counts.get(f"jobs:{cls}", 0) == sum(map(len, mine)), "the board counts a class"
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
