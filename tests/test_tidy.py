"""The code's own rules, run over the tree: sizes, keys, clocks, sleeps, owners, words.

A check takes the root of a tree and returns its complaints, each `path:line: what`. Every check is
shown to find a planted fault in a small tree of its own (the second half of this file).

Where a rule does not hold: tests may spell keys, and they and bench read clocks and environment
(a test of a clock needs one, a measurement is one). sim is exempt from nothing. Files that came
from elsewhere (VENDORED) are read for words only. The rules for scripts are in test_tidy_lua.py.
"""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("common", "gateway", "dispatcher", "sim", "fairlane")
CODE = (*PRODUCT, "bench", "tests")
VENDORED = ("tests/cases/", "tests/support/vllm/")
Check = Callable[[Path], list[str]]
LINES = {"python": 300, "test": 400, "lua": 80, "function": 50}

# Each exception has its reason: `path` for a file, `path:name` for a function or class.
SIZE_EXCEPTIONS: dict[str, str] = {
    "common/queue.py": "one method for each verb; most lines name the slots of its script",
    "common/lua/enqueue.lua": "half of it names its slots",
    "common/lua/pop.lua": "a third of it names its slots",
    "common/lua/settle.lua": "half of it names its slots",
    "common/lua/snapshot.lua": "a quarter of it names its slots and what it returns",
}
TASK_OWNERS = {
    "common/broker.py:Broker": "run() awaits the task before it connects again or ends",
    "common/broker.py:Subscriber": "run() awaits both tasks before it subscribes again or ends",
    "common/store.py:Store": "each method awaits its call to the end, also where it is cancelled",
    "common/publish.py:Outbox": "one pump at a time; close() cancels and awaits it",
    "common/logged.py:Logged": "one pump at a time; flush() awaits it, discard() cancels it",
    "dispatcher/loop.py:ModelLoop": "_pop awaits its pop",
    "dispatcher/relays.py:Relays": "close() cancels and awaits every relay",
    "dispatcher/pool.py:Pool": "run() holds the group in which each poller is a task",
    "dispatcher/relay.py:Relay": "run() awaits the run's task whatever happens",
    "dispatcher/server.py:Dispatcher": "run() holds the group in which each loop is a task",
    "gateway/client.py:Client": "unwatch() cancels and awaits it",
    "sim/server.py:_AsgiSink": "one writer at a time; aclose() cancels and awaits it",
}
"""Classes that keep each task they create, and await it in their own `close` or `run`."""

CLOCK_FILE, SETTINGS_FILE, RANDOM_FILE = "common/clock.py", "common/config.py", "common/ids.py"
KEYS_FILE, TASK_FILE, SLEEP_FILE = "common/keys.py", "common/service.py", "tests/support/wait.py"
CLOCKS = {f"time.{c}{ns}" for c in ("time", "monotonic", "perf_counter") for ns in ("", "_ns")}
CLOCKS |= {f"datetime.{c}" for c in ("datetime.now", "datetime.utcnow", "datetime.today")}
CLOCKS |= {"datetime.date.today"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
KEY = re.compile(r"(?<![A-Za-z0-9_])fl:")
# The brackets keep this file free of the words it looks for.
WORKPLACE = re.compile(r"/w[o]rk/|/f[a]rm/|/o[p]t/wheels|\.l[i]brary")
UNFINISHED = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X)\b")
SKIPPED = re.compile(r"(^|/)(\.(?!ci/)[^/]+|__pycache__|build|dist|[^/]+\.egg-info)/")


# --- reading the tree


def files(root: Path) -> list[str]:
    """Paths of the files that git tracks or would track; without git, all but what tools leave."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode == 0:
            return sorted(p for p in listed.stdout.split("\0") if p and (root / p).is_file())
    paths = (p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    return sorted(p for p in paths if not SKIPPED.search(p))


def sources(root: Path, suffix: str, packages: tuple[str, ...] = CODE) -> Iterator[tuple[str, str]]:
    """Path and text of each source file of `packages`, without the vendored ones."""
    for path in files(root):
        inside = path.split("/")[0] in packages and not path.startswith(VENDORED)
        if inside and path.endswith(suffix):
            yield path, (root / path).read_text()


def trees(root: Path, packages: tuple[str, ...] = CODE) -> Iterator[tuple[str, ast.Module]]:
    for path, text in sources(root, ".py", packages):
        yield path, ast.parse(text, path)


def names(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Each use of an imported name, with its full dotted name whatever it was imported as."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                top = a.name.split(".")[0]
                known[a.asname or top] = a.name if a.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in known:
            assert isinstance(node, ast.expr)
            yield node, ".".join([known[inner.id], *parts])


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    full = {id(node): name for node, name in names(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, full.get(id(node.func), "")


# --- the checks


def sizes(root: Path) -> list[str]:
    """Files and functions stay short enough to be read at once."""
    found = []
    for path, text in [*sources(root, ".py"), *sources(root, ".lua")]:
        kind = "lua" if path.endswith(".lua") else "test" if path.startswith("tests/") else "python"
        lines = text.count("\n")
        if lines > LINES[kind] and path not in SIZE_EXCEPTIONS:
            found.append(f"{path}:{lines}: {lines} lines, at most {LINES[kind]}")
    for path, tree in trees(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > LINES["function"] and f"{path}:{node.name}" not in SIZE_EXCEPTIONS:
                    found.append(
                        f"{path}:{node.lineno}: {node.name} has {lines} lines, "
                        f"at most {LINES['function']}"
                    )
    return found


def empty_inits(root: Path) -> list[str]:
    """The import path is the address: packages re-export nothing."""
    inits = ((p, t) for p, t in sources(root, ".py") if p.endswith("__init__.py"))
    return [f"{path}:1: __init__.py is not empty" for path, text in inits if text.strip()]


def keys(root: Path) -> list[str]:
    """A Redis key is spelled in one file."""
    found = []
    for path, tree in trees(root, (*PRODUCT, "bench")):
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in docs or path == KEYS_FILE:
                continue
            text = node.value.decode("latin1") if isinstance(node.value, bytes) else node.value
            if isinstance(text, str) and KEY.search(text):
                found.append(f"{path}:{node.lineno}: a key outside {KEYS_FILE}: {text!r}")
    return found


def clock_and_environment(root: Path) -> list[str]:
    """Time and settings are arguments; each is read in one file."""
    found = []
    for path, tree in trees(root, PRODUCT):
        for node, name in names(tree):
            if name in CLOCKS and path != CLOCK_FILE:
                found.append(f"{path}:{node.lineno}: {name} outside {CLOCK_FILE}")
            if name in ENVIRONMENT and path != SETTINGS_FILE:
                found.append(f"{path}:{node.lineno}: {name} outside {SETTINGS_FILE}")
    return found


def randomness(root: Path) -> list[str]:
    """Random numbers come from a seeded instance, so that a run can be repeated."""
    found = []
    for path, tree in trees(root):
        if path == RANDOM_FILE:
            continue
        for node, name in names(tree):
            if name.startswith("random.") and name.split(".")[1] != "Random":
                found.append(f"{path}:{node.lineno}: {name}: use random.Random(seed)")
        for call, name in calls(tree):
            if name == "random.Random" and not call.args:
                found.append(f"{path}:{call.lineno}: random.Random() without a seed")
    return found


def sleeps(root: Path) -> list[str]:
    """A test waits for a condition or in virtual time; sleep(0) only gives way."""
    found = []
    for path, tree in trees(root, ("tests",)):
        for call, name in calls(tree):
            zero = [ast.unparse(a) for a in call.args] == ["0"]
            if name in {"asyncio.sleep", "time.sleep"} and not zero and path != SLEEP_FILE:
                found.append(f"{path}:{call.lineno}: {name}: use {SLEEP_FILE}")
    return found


def tasks(root: Path) -> list[str]:
    """Each task has an owner: a TaskGroup, common/service.py, or a class in TASK_OWNERS."""
    found = []
    for path, tree in trees(root, PRODUCT):
        groups = set(_task_groups(tree))
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        for call, full in calls(tree):
            receiver, _, name = ast.unparse(call.func).rpartition(".")
            if not {name, full.rpartition(".")[2]} & {"create_task", "ensure_future"}:
                continue
            around = {c.name for c in classes if c.lineno <= call.lineno <= (c.end_lineno or 0)}
            owned = any(f"{path}:{c}" in TASK_OWNERS for c in around)
            if not owned and receiver not in groups and path != TASK_FILE:
                found.append(f"{path}:{call.lineno}: a task without an owner")
    return found


def _task_groups(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and node.optional_vars:
            if "TaskGroup(" in ast.unparse(node.context_expr):
                yield ast.unparse(node.optional_vars)
        elif isinstance(node, ast.arg) and node.annotation:
            if ast.unparse(node.annotation).endswith("TaskGroup"):
                yield node.arg
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TaskGroup"):
            yield ast.unparse(node.target)


def words(root: Path) -> list[str]:
    """The project speaks of itself alone, and finishes what it begins."""
    found = []
    for path in files(root):
        data = (root / path).read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if hit := WORKPLACE.search(line) or UNFINISHED.search(line):
                found.append(f"{path}:{number}: {hit[0]!r}")
    return found


CHECKS = [sizes, empty_inits, keys, clock_and_environment, randomness, sleeps, tasks, words]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_is_tidy(check: Check) -> None:
    complaints = check(ROOT)
    assert not complaints, f"{check.__doc__}\n" + "\n".join(complaints)


def test_every_exception_is_of_a_file_that_is_there() -> None:
    entries = [*SIZE_EXCEPTIONS.items(), *TASK_OWNERS.items()]
    assert [e for e, reason in entries if not reason or not (ROOT / e.split(":")[0]).exists()] == []


# --- the checks are shown to work: on a tidy tree none complains, on each planted fault one does

TIDY = {
    "common/__init__.py": "",
    "common/keys.py": 'A = "fl:a"\n',
    "common/clock.py": "import time\nnow = time.monotonic\n",
    "common/config.py": "import os\nhome = os.environ\n",
    "common/ids.py": "import random\nnonce = random.SystemRandom()\n",
    "common/service.py": "import asyncio\ntask = asyncio.create_task(x())\n",
    "common/text.py": '"""Of `fl:a`, a doc."""\nA = "waffl:e"\n',
    "gateway/app.py": "async with asyncio.TaskGroup() as group:\n    group.create_task(x())\n",
    "dispatcher/loop.py": "def f(owner: asyncio.TaskGroup):\n    owner.create_task(x())\n",
    "sim/load.py": "import random\nr = random.Random(7)\nr.random()\n",
    "bench/x.py": "import time, os\ntime.time()\nos.getenv('A')\n",
    "tests/support/wait.py": "import asyncio\nasyncio.sleep(1)\n",
    "tests/test_x.py": "import asyncio, time\nK = 'fl:x'\ntime.time()\nasyncio.sleep(0)\n" * 90,
    "tests/cases/_tools/play.py": "import time\ntime.sleep(9)\n" * 300,
    "docs/page.md": "All done.\n",
    ".venv/lib/x.py": "# X" + "XX\n",
}
FAULTS: list[tuple[Check, str, str, int]] = [
    (sizes, "common/long.py", "a = 1\n" * 301, 301),
    (sizes, "tests/test_long.py", "a = 1\n" * 401, 401),
    (sizes, "common/lua/long.lua", "local a = 1\n" * 81, 81),
    (sizes, "sim/f.py", "\nasync def f():\n" + "    a = 1\n" * 50, 2),
    (empty_inits, "gateway/__init__.py", "from gateway.app import x\n", 1),
    (keys, "gateway/a.py", "\na = 'fl:{m}:bell'\n", 2),
    (keys, "bench/a.py", "a = f'x {b} fl:{c}'\n", 1),
    (keys, "sim/a.py", "a = b'fl:a'\n", 1),
    (clock_and_environment, "gateway/a.py", "import time\n\ntime.time()\n", 3),
    (clock_and_environment, "sim/a.py", "from time import monotonic as m\nm()\n", 2),
    (clock_and_environment, "common/a.py", "import time as t\nf = t.time_ns\n", 2),
    (clock_and_environment, "fairlane/a.py", "import datetime\ndatetime.datetime.now()\n", 2),
    (clock_and_environment, "common/b.py", "from datetime import datetime\ndatetime.now()\n", 2),
    (clock_and_environment, "fairlane/b.py", "import os\nos.environ['A']\n", 2),
    (clock_and_environment, "common/c.py", "from os import getenv\ngetenv('A')\n", 2),
    (randomness, "sim/a.py", "import random\nrandom.random()\n", 2),
    (randomness, "tests/test_a.py", "from random import choice\nchoice([1])\n", 2),
    (randomness, "gateway/a.py", "import random\n\nr = random.Random()\n", 3),
    (sleeps, "tests/test_a.py", "import asyncio\nawait_ = asyncio.sleep(0.1)\n", 2),
    (sleeps, "tests/flow/test_a.py", "from time import sleep\nsleep(1)\n", 2),
    (tasks, "gateway/a.py", "import asyncio\nasyncio.create_task(x())\n", 2),
    (
        tasks,
        "dispatcher/a.py",
        "class A:\n    def f(self):\n        self.loop.create_task(x())\n",
        3,
    ),
    (tasks, "sim/a.py", "from asyncio import ensure_future as e\ne(x())\n", 2),
    (words, "docs/a.md", "see\n/wor" + "k/main\n", 2),
    (words, ".ci/run", "pip --find-links /opt" + "/wheels\n", 1),
    (words, "common/a.py", "# TO" + "DO: later\n", 1),
    (words, "common/lua/a.lua", "-- FIX" + "ME\n", 1),
]


def plant(root: Path, *trees: dict[str, str]) -> None:
    for tree in trees:
        for path, text in tree.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_check_complains_of_a_tidy_tree(check: Check, tmp_path: Path) -> None:
    plant(tmp_path, TIDY)
    assert check(tmp_path) == []


@pytest.mark.parametrize(("check", "path", "text", "line"), FAULTS)
def test_a_planted_fault_is_found(
    check: Check, path: str, text: str, line: int, tmp_path: Path
) -> None:
    plant(tmp_path, TIDY, {path: text})
    assert [c.split(": ")[0] for c in check(tmp_path)] == [f"{path}:{line}"]


def test_an_exception_with_a_reason_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = "import asyncio\nclass A:\n    t = asyncio.create_task(x())\n"
    plant(tmp_path, {"common/long.py": "a = 1\n" * 301, "gateway/a.py": task})
    assert sizes(tmp_path)
    assert tasks(tmp_path)
    monkeypatch.setitem(SIZE_EXCEPTIONS, "common/long.py", "a table")
    monkeypatch.setitem(TASK_OWNERS, "gateway/a.py:A", "close() awaits it")
    assert sizes(tmp_path) == tasks(tmp_path) == []


def test_of_a_checkout_only_what_git_would_track_is_read(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    plant(tmp_path, {".gitignore": "out/\n", "out/a.md": "TO" + "DO\n", "b.md": "TO" + "DO\n"})
    assert [c.split(": ")[0] for c in words(tmp_path)] == ["b.md:1"]
