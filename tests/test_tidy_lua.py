"""The rules for the scripts in common/lua: a typed header, whole keys, no hidden input, a caller.

As in test_tidy.py a check takes the root of a tree and returns `path:line: what`, and is shown to
find planted faults. The header's grammar:

    -- <verb>: what it does          (the verb is the file's name)
    -- KEYS <name> <type>  words     (str hash zset set list stream channel)
    -- ARGV <name> <type>  words     (num nums str bytes; the last KEYS or ARGV may be `type*`: the
                                      rest; nums: numbers with spaces between them)
    -- RETURNS words

with `--` lines of words in between, among them `-- USES <library>`, and each slot used in the body
or in such a library.
A library in `lib/` begins in the same way and has no slots, and is of whole functions; some script
uses it. `now_us` counts as a use of `now_ms`: the loader makes it from that slot.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_tidy import KEY, ROOT, Check, plant, sources

FOLDER = "common/lua/"
LIBRARIES = FOLDER + "lib/"
QUEUE_FILE, BATCHES_FILE = "common/queue.py", "common/batches.py"
PREFIX_SCRIPTS = {
    "common/lua/pop.lua": "which jobs come next is known only inside the script",
    "common/lua/lib/ahead.lua": "the same: a part of `pop`",
    "common/lua/lib/tell.lua": "which sink is told is in the record",
    "common/lua/reap.lua": "which jobs are due is known only inside the script",
    "common/lua/snapshot.lua": "which jobs run is known only inside the script",
}
"""Scripts that may build a key, and from nothing but a slot whose name ends in `_prefix`."""

TYPES = {
    "KEYS": {"str", "hash", "zset", "set", "list", "stream", "channel"},
    "ARGV": {"num", "nums", "str", "bytes"},
}
SLOT = re.compile(r"-- (KEYS|ARGV) +(\w+) +(\w+)(\*?)(?= |$)")
USES = re.compile(r"-- USES (\w+)$")
SLOT_LIKE = re.compile(r"-- *(KEYS|ARGV|RETURNS)\b")
FORBIDDEN = re.compile(
    r"\bKEYS\b|\bARGV\b|['\"]TIME['\"]|\b[SZ]?SCAN\b|\bcmsgpack\b|\bstruct\s*\.|\bmath\.random"
)
STRING_OR_COMMENT = re.compile(r"('(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")|--[^\n]*")
CALL = re.compile(r"\bredis\.p?call\(")
ASSIGN = re.compile(r"^\s*(?:local +)?(\w+(?: *, *\w+)*) *=(?!=)(.*)", re.M)
WHOLE_FUNCTION = re.compile(r"^local function \w+\(.*\n(?:(?:[ \t].*)?\n)*end$", re.M)
LONG = re.compile(r"\[=*\[")
MANY_KEYS = {"DEL", "UNLINK", "EXISTS", "MGET", "TOUCH"}


def scripts(root: Path) -> Iterator[tuple[str, list[str], str]]:
    """Path, header lines, and the body without comments, padded so that its lines keep numbers."""
    for path, text in sources(root, ".lua", ("common",)):
        lines = text.splitlines()
        size = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
        body = STRING_OR_COMMENT.sub(lambda m: m[1] or "", "\n".join(lines[size:]))
        yield path, lines[:size], "\n" * size + body


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def header(root: Path) -> list[str]:
    """The header is the contract: the loader reads it, and so do people."""
    found = []
    texts = {path: body for path, _, body in scripts(root)}
    for path, lines, body in scripts(root):
        verb = Path(path).stem
        if not lines or not re.match(rf"-- {re.escape(verb)}: \S", lines[0]):
            found.append(f"{path}:1: the first line is not `-- {verb}: what it does`")
        used = [LIBRARIES + name[1] + ".lua" for line in lines if (name := USES.match(line))]
        body += "\n".join(texts.get(library, "") for library in used)
        seen: dict[str, str] = {}
        rest: set[str] = set()
        returned = False
        for number, line in enumerate(lines, 1):
            kind = like[1] if (like := SLOT_LIKE.match(line)) else ""
            if kind == "RETURNS":
                returned = True
            elif kind and returned:
                found.append(f"{path}:{number}: a slot after RETURNS")
            elif kind:
                found += [f"{path}:{number}: {w}" for w in _slot_faults(line, seen, rest, body)]
        if not returned and not path.startswith(LIBRARIES):
            found.append(f"{path}:{max(len(lines), 1)}: no RETURNS line")
        for match in re.finditer(r"^-- (KEYS|ARGV) ", (root / path).read_text(), re.M):
            if (number := line_of(match.string, match.start())) > len(lines):
                found.append(f"{path}:{number}: a slot line outside the header")
    return found


def _slot_faults(line: str, seen: dict[str, str], rest: set[str], body: str) -> Iterator[str]:
    """What is wrong with one slot line, given the slots before it (name -> kind)."""
    slot = SLOT.match(line)
    if not slot:
        yield "not `-- KEYS|ARGV name type words`"
        return
    kind, name, type_, star = slot.groups()
    if type_ not in TYPES[kind]:
        yield f"{type_} is no type of {kind}: {' '.join(sorted(TYPES[kind]))}"
    if kind == "KEYS" and "ARGV" in seen.values():
        yield "KEYS after ARGV"
    if kind in rest:
        yield f"a slot after the rest of {kind}"
    if name in seen:
        yield f"slot {name} twice"
    used = rf"(?<![.\w]){name}\b" if name != "now_ms" else r"\bnow_(ms|us)\b"
    if not re.search(used, re.sub(STRING_OR_COMMENT, "", body)):
        yield f"slot {name} is not used"
    seen[name] = kind
    if star:
        rest.add(kind)


def body_words(root: Path) -> list[str]:
    """Scripts reach nothing but their slots, have no hidden input, and run on fakeredis too."""
    return [
        f"{path}:{line_of(body, match.start())}: {match[0]} in a script"
        for path, _, body in scripts(root)
        for match in FORBIDDEN.finditer(body)
    ]


def whole_keys(root: Path) -> list[str]:
    """Scripts get whole keys; only those in PREFIX_SCRIPTS build one, from a prefix slot."""
    found = []
    for path, lines, body in scripts(root):
        slots = {m[2] for line in lines if (m := SLOT.match(line))}
        if path.startswith(LIBRARIES):  # it has those of the scripts that use it
            slots = set(re.findall(r"\w+_prefix\b", body))
        prefixes = {s for s in slots if s.endswith("_prefix") and path in PREFIX_SCRIPTS}
        found += [
            f"{path}:{line_of(body, m.start())}: a key in a script: {m[0]}"
            for m in STRING_OR_COMMENT.finditer(body)
            if KEY.search(m[0][1:])
        ]
        built = {n: e for n, e in _assignments(body) if ".." in e}
        for call in CALL.finditer(body):
            command, *arguments = _split(body[call.end() :])
            many = command.strip("'\"") in MANY_KEYS
            for key in arguments if many else arguments[:1]:
                made = built.get(key, key)
                if ".." in made and made.split("..")[0].strip() not in prefixes:
                    found.append(f"{path}:{line_of(body, call.start())}: a key built by {made}")
    return found


def _assignments(body: str) -> Iterator[tuple[str, str]]:
    for match in ASSIGN.finditer(body):
        targets = [n.strip() for n in match[1].split(",")]
        yield from zip(targets, _split(match[2] + ")"), strict=False)


def _split(text: str) -> list[str]:
    """The arguments up to the bracket that closes them, split at commas outside any bracket."""
    parts, depth = [""], 0
    for token in re.findall(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|.", text, re.S):
        depth += (token in "([{") - (token in ")]}")
        if depth < 0:
            break
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return [p.strip() for p in parts]


def callers(root: Path) -> list[str]:
    """One verb, one file, one method of common/queue.py, or of common/batches.py where it is none
    of a model's, that calls it; no library without use."""
    places = (root / QUEUE_FILE, root / BATCHES_FILE)
    text = "\n".join(p.read_text() for p in places if p.exists())
    heads = "\n".join(line for _, lines, _ in scripts(root) for line in lines)
    found = []
    for path, _, _ in scripts(root):
        name = re.escape(Path(path).stem)
        if path.startswith(LIBRARIES):
            if not re.search(rf"^-- USES {name}$", heads, re.M):
                found.append(f"{path}:1: no script uses it")
        elif not re.search(rf"\bscripts\.{name}\b|[\"']{name}[\"']", text):
            found.append(f"{path}:1: no caller in {QUEUE_FILE}")
    return found


def libraries(root: Path) -> list[str]:
    """The loader takes whole functions out of a library, by their first and last lines, and puts
    each in one line: nothing stands beside them, and no text goes over lines."""
    found = []
    for path, _, body in scripts(root):
        if path.startswith(LIBRARIES):
            rest = WHOLE_FUNCTION.sub(lambda m: "\n" * m[0].count("\n"), body)
            found += [
                f"{path}:{line_of(rest, m.start())}: beside whole functions: {m[0]}"
                for m in re.finditer(r"^.*\S.*$", rest, re.M)
            ]
            found += [f"{path}:{line_of(body, m.start())}: {m[0]}" for m in LONG.finditer(body)]
    return found


CHECKS = [header, body_words, whole_keys, callers, libraries]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_scripts_are_tidy(check: Check) -> None:
    complaints = check(ROOT)
    assert not complaints, f"{check.__doc__}\n" + "\n".join(complaints)


HEAD = "-- pop: takes one.\n--\n-- KEYS a hash\n-- ARGV now_ms num\n-- ARGV x str* the rest\n"
POP = HEAD + "-- RETURNS x\n\nreturn redis.call('HSCAN', a, now_us .. ':' .. x[1]) -- KEYS[1]\n"
PREFIX = POP.replace("-- ARGV x", "-- ARGV a_prefix str\n-- ARGV x") + (
    "local k = a_prefix .. x\nredis.call('GET', k)\n"
)
LIBRARY = "-- l: words\n\n-- f: words\nlocal function f(x)\n  return x -- x\n\nend\n"
TIDY = {
    "common/queue.py": 'await run("pop", a=1)\nscripts.ack\n',
    "common/lua/pop.lua": PREFIX.replace("-- KEYS a", "-- USES l\n-- KEYS a"),
    "common/lua/ack.lua": POP.replace("pop:", "ack:"),
    "common/lua/lib/l.lua": LIBRARY,
}
BODY = "-- RETURNS x\nlocal b = a, x, now_ms\n"  # uses every slot of HEAD; its next line is 8
ACK = HEAD.replace("pop:", "ack:")
FAULTS: list[tuple[Check, str, int]] = [
    (header, HEAD + BODY, 1),
    (header, ACK.replace("-- ack: takes", "-- ack takes") + BODY, 1),
    (header, ACK + BODY.replace("-- RETURNS x", ""), 5),
    (header, ACK.replace("a hash", "a table") + BODY, 3),
    (header, ACK.replace("now_ms num", "now_ms hash") + BODY, 4),
    (header, ACK.replace("a hash", "a") + BODY, 3),
    (header, ACK.replace("x str*", "a str*") + "-- RETURNS\nreturn {a, now_us}\n", 5),
    (header, ACK + "-- ARGV y num\n" + BODY + "return y\n", 6),
    (header, ACK.replace("x str*", "x str") + "-- KEYS y set\n" + BODY + "return y\n", 6),
    (header, ACK + "-- RETURNS x\nreturn a, x\n", 4),
    (header, ACK + "-- RETURNS x\nreturn a, now_us, 'x', b.x -- x\n", 5),
    (header, ACK.replace("-- ARGV x", "-- RETURNS\n-- ARGV x") + BODY, 6),
    (header, ACK + BODY + "-- KEYS z set\n", 8),
    (body_words, ACK + BODY + "redis.call('GET', KEYS[1])\n", 8),
    (body_words, ACK + BODY + "local y = ARGV[1]\n", 8),
    (body_words, ACK + BODY + "redis.call('TIME')\n", 8),
    (body_words, ACK + BODY + 'redis.call("KEYS", a)\n', 8),
    (body_words, ACK + BODY + "redis.call('SCAN', 0)\n", 8),
    (body_words, ACK + BODY + "redis.call('ZSCAN', a, 0)\n", 8),
    (body_words, ACK + BODY + "cmsgpack.pack(a)\n", 8),
    (body_words, ACK + BODY + "struct.pack('I', a)\n", 8),
    (body_words, ACK + BODY + "math.random()\n", 8),
    (whole_keys, ACK + BODY + "redis.call('GET', 'fl:gateways')\n", 8),
    (whole_keys, ACK + BODY + "redis.call('GET', a .. x)\n", 8),
    (whole_keys, ACK + BODY + "redis.call('DEL', a, a .. x)\n", 8),
    (whole_keys, ACK + BODY + "local k, v = a .. x, 1\nredis.call('GET', k)\n", 9),
    (whole_keys, ACK + BODY + "redis.call('GET', a_prefix .. x)\n", 8),
    (callers, ACK + BODY, 1),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_check_complains_of_tidy_scripts(check: Check, tmp_path: Path) -> None:
    plant(tmp_path, TIDY)
    assert check(tmp_path) == []


@pytest.mark.parametrize(("check", "text", "line"), FAULTS)
def test_a_planted_fault_is_found(check: Check, text: str, line: int, tmp_path: Path) -> None:
    plant(tmp_path, TIDY, {"common/lua/ack.lua": text})
    if check is callers:
        plant(tmp_path, {"common/queue.py": 'await run("pop", a=1)\nack = scripts.acknowledge\n'})
    assert [c.split(": ")[0] for c in check(tmp_path)] == [f"common/lua/ack.lua:{line}"]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("local g = 1\n", 8),
        ("local function g() return 1 end\n", 8),
        ("local function g()\n  return 1\nend -- g\n", 8),
        ("local function g()\nreturn 1\nend\n", 8),
        ("local function g()\n  return [[\n  x]]\nend\n", 9),
    ],
)
def test_a_library_is_of_whole_functions(wrong: str, line: int, tmp_path: Path) -> None:
    plant(tmp_path, TIDY, {"common/lua/lib/l.lua": LIBRARY + wrong})
    assert libraries(tmp_path)[0].startswith(f"common/lua/lib/l.lua:{line}: ")


def test_even_pop_builds_keys_from_nothing_but_a_prefix(tmp_path: Path) -> None:
    wrong = "redis.call('GET', a .. x)\nredis.call('GET', b_prefix .. x)\n"
    plant(tmp_path, TIDY, {"common/lua/pop.lua": POP + wrong})
    at = [c.split(": ")[0] for c in whole_keys(tmp_path)]
    assert at == ["common/lua/pop.lua:9", "common/lua/pop.lua:10"]
