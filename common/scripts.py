"""Load the Lua verbs and bind their typed slots.

A file's header is its contract: `-- KEYS name type` and `-- ARGV name type` lines name each slot,
a type that ends in `*` takes the rest. The loader puts one generated line in front of the file,
which makes locals of the slots (so an error's line number is the file's plus one), and which is
the only place that reads the server's clock: a script with a slot `now_ms` gets the time given,
or, for 0, the time of the Redis server; `now_us` is the same in microseconds. A number that is none
ends the script there, before anything is written; `nums` are several with spaces between them.
`-- USES name` puts the functions of `lib/name.lua` into that line too, which may use the slots:
what several verbs do in the same way stands there once. Those that a verb does not call are left
out, for Lua makes each anew at every call of the script.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

Value = str | bytes | int | float
"""One argument. Floats are passed as the shortest digits that give the same float again."""

VERBS = (
    "lead", "enqueue", "pop", "start", "renew", "charge", "settle", "ack", "requeue", "assert",
    "cancel", "heartbeat", "reap", "snapshot", "append", "forget", "describe",
    "batch_create", "batch_take", "batch_commit", "batch_cancel",
)  # fmt: skip

_SLOT = re.compile(r"^-- (KEYS|ARGV) +(\w+) +(\w+)(\*?)", re.M)
_USES = re.compile(r"^-- USES (\w+)$", re.M)
_COMMENT = re.compile(r"""('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|--[^\n]*""")
"""Or a string, which stays: it may have two hyphens too."""
_FUNCTION = re.compile(r"^local function (\w+)\b.*?^end$", re.M | re.S)
_UNPACKED_MAX = 1_000
"""Lua unpacks no more than 8,000 values at once; further ones are taken one by one."""


class Slot(msgspec.Struct, frozen=True):
    """One named argument of a script."""

    name: str
    type: str
    rest: bool


class Script(msgspec.Struct, frozen=True):
    """A verb, ready for EVALSHA."""

    name: str
    text: str
    sha: str
    keys: tuple[Slot, ...]
    args: tuple[Slot, ...]
    names: frozenset[str]

    def bind(self, slots: Mapping[str, Value | Sequence[Value]]) -> tuple[list[Value], list[Value]]:
        """(keys, arguments) in the script's order; TypeError where names differ from its slots."""
        if slots.keys() != self.names:
            raise TypeError(f"{self.name}: slots differ: {sorted(self.names ^ slots.keys())}")
        return _in_order(self.keys, slots), _in_order(self.args, slots)


def _in_order(
    slots: tuple[Slot, ...], values: Mapping[str, Value | Sequence[Value]]
) -> list[Value]:
    if slots and slots[-1].rest:
        out = [values[s.name] for s in slots[:-1]]
        out.extend(values[slots[-1].name])  # type: ignore[arg-type]
        return out  # type: ignore[return-value]
    return [values[s.name] for s in slots]  # type: ignore[misc]


def parse(name: str, source: str, libraries: Mapping[str, str] | None = None) -> Script:
    """A script from its file; ValueError where a header names a slot twice or `*` is not last.

    `libraries`: texts to use instead of those in the package, by name.
    """
    slots = {"KEYS": list[Slot](), "ARGV": list[Slot]()}
    for kind, slot, type_, rest in _SLOT.findall(source):
        known = slots[kind]
        if (known and known[-1].rest) or any(s.name == slot for k in slots.values() for s in k):
            raise ValueError(f"{name}.lua: slot {slot} after a rest slot, or named twice")
        known.append(Slot(slot, type_, bool(rest)))
    text = _prologue(slots) + _libraries(source, libraries or {}) + "\n" + source
    text = text.replace("redis.call(", "C(")
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    names = frozenset(s.name for kind in slots.values() for s in kind)
    return Script(name, text, sha, tuple(slots["KEYS"]), tuple(slots["ARGV"]), names)


def _prologue(slots: dict[str, list[Slot]]) -> str:
    parts = ["local C,K,A=redis.call,KEYS,ARGV "]
    numbers = []
    for source, kind in (("K", "KEYS"), ("A", "ARGV")):
        names, values = [], []
        for i, slot in enumerate(slots[kind], start=1):
            value = f"{source}[{i}]"
            if slot.rest:
                parts.append(
                    f"local {slot.name}={{}} if #{source}<{_UNPACKED_MAX} then "
                    f"{slot.name}={{unpack({source},{i})}} else for i={i},#{source} do "
                    f"{slot.name}[i-{i - 1}]={source}[i] end end "
                )
                continue
            names.append(slot.name)
            values.append(value)
            if slot.type == "num":
                numbers.append(slot.name)
            elif slot.type == "nums":
                parts.append(f"if not string.find({value},'^[%d.e+ -]+$') then ")
                parts.append(f"error('{slot.name}') end ")
        if names:
            parts.append(f"local {','.join(names)}={','.join(values)} ")
    if numbers:  # Lua names the one that is none; `tonumber` would read each twice
        parts.append(f"{','.join(numbers)}={','.join(f'{n}+0' for n in numbers)} ")
    if any(s.name == "now_ms" for s in slots["ARGV"]):
        parts.append(
            "local now_us=now_ms*1000 if now_ms==0 then local t=redis.call('TIME') "
            "now_us=t[1]*1000000+t[2] now_ms=math.floor(now_us/1000) end "
        )
    return "".join(parts)


def _libraries(source: str, given: Mapping[str, str]) -> str:
    """The functions of its libraries that a script calls, itself or by way of one another, in one
    line, so that an error's line number stays right."""
    text = "\n".join(
        given.get(n) or (_folder() / "lib" / f"{n}.lua").read_text(encoding="utf-8")
        for n in _USES.findall(source)
    )
    functions = [(m[1], _COMMENT.sub(r"\1", m[0])) for m in _FUNCTION.finditer(text)]
    for _ in range(len(functions)):
        called = source + "".join(f"\n{body}" for _, body in functions)
        functions = [f for f in functions if len(re.findall(rf"\b{f[0]}\(", called)) > 1]
    lines = (line.strip() for _, body in functions for line in body.splitlines())
    return "".join(line + " " for line in lines if line)


def _folder() -> Traversable:
    return resources.files("common.lua")


def load() -> dict[str, Script]:
    """All verbs, read from the package's files once in a process."""
    return dict(_loaded())


@cache
def _loaded() -> dict[str, Script]:
    folder = _folder()
    return {v: parse(v, (folder / f"{v}.lua").read_text(encoding="utf-8")) for v in VERBS}
