"""Fairlane's roles as real processes, alone or as a fleet on one Redis.

Every process has a log file of its own for each start, is found ready by HTTP, can be ended or
paused in each way an operator or a kernel would, and is gone when its owner is closed or
collected, and when the test process ends.
"""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import psutil
import redis

from common import keys
from common.keys import ModelKeys
from sim.settings import EngineSettings
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until_sync

FAIRLANE = Path(sys.executable).with_name("fairlane")
"""The console script of the environment that the tests run in."""
START_S = 40.0
"""A start may take so long on a machine that is busy with other things."""
END_S = 15.0
KEY = "sk-test-"
"""A user's key is this and the user's name."""

_BOUND = re.compile(r" on http://127\.0\.0\.1:(\d+)")
_ID = re.compile(r"((?:gateway|dispatcher)-[A-Za-z0-9.-]*-[0-9a-f]{8})")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def environment() -> dict[str, str]:
    """This process's environment without settings of Fairlane in it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FAIRLANE_")}


class Role:
    """One process of Fairlane; after its end `start` may follow again, with the same arguments."""

    def __init__(self, name: str, args: Sequence[str], folder: Path) -> None:
        self.name = name
        self.args = list(args)
        self._folder = folder
        self._starts = 0
        self._running: list[subprocess.Popen[bytes]] = []
        self._clean_up = weakref.finalize(self, _kill_all, self._running, os.getpid())

    def start(self) -> None:
        """Start it; waits for nothing."""
        assert not self._running, f"{self.name} is running"
        self._starts += 1
        with self._log_path.open("wb") as out:
            process = subprocess.Popen(
                [str(FAIRLANE), *self.args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,  # Ctrl-C in the terminal is the tests' alone
            )
        self._running.append(process)

    @property
    def _log_path(self) -> Path:
        return self._folder / f"{self.name}.{self._starts}.log"

    def log(self) -> str:
        """What it has printed since its last start."""
        return self._log_path.read_text(errors="replace") if self._starts else ""

    @property
    def pid(self) -> int:
        """Raises IndexError where it does not run."""
        return self._running[0].pid

    def alive(self) -> bool:
        """Whether it runs (or is paused)."""
        return bool(self._running) and self._running[0].poll() is None

    @property
    def url(self) -> str:
        """The address it said that it listens on."""
        return f"http://127.0.0.1:{self._logged(_BOUND)}"

    @property
    def id(self) -> str:
        """The name under which Redis knows this start of it."""
        return self._logged(_ID)

    def _logged(self, pattern: re.Pattern[str]) -> str:
        found = pattern.search(self.log())
        assert found, f"no {pattern.pattern} in the log of {self.name}:\n{self.log()[-2000:]}"
        return found[1]

    def wait_ready(self, path: str, timeout: float = START_S) -> None:
        """Until it answers 200 at `path`."""
        self._wait(lambda: _BOUND.search(self.log()), timeout, "to listen")
        self._wait(lambda: self.status(path) == 200, timeout, f"200 at {path}")

    def status(self, path: str, timeout: float = 5.0) -> int:
        """The status it answers to a GET; 0: it does not answer."""
        try:
            with _opener.open(self.url + path, timeout=timeout) as response:
                return int(response.status)
        except urllib.error.HTTPError as e:
            return e.code
        except OSError:
            return 0

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, or of those whose labels have this text in them."""
        with _opener.open(self.url + "/metrics", timeout=5.0) as response:
            lines = response.read().decode().splitlines()
        sample = re.compile(rf"{re.escape(name)}(_total)?[{{ ]")
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if sample.match(line) and label in line
        )

    def rss(self) -> int:
        """Bytes of memory it holds."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def kill(self) -> None:
        """SIGKILL; its sockets are closed when this returns."""
        self._end(signal.SIGKILL, END_S)

    def stop(self, timeout: float = END_S) -> int:
        """SIGTERM; the exit code. Raises AssertionError where it takes longer."""
        return self._end(signal.SIGTERM, timeout)

    def ended(self, timeout: float = END_S) -> int:
        """Wait for an end of its own; the exit code. Raises AssertionError as `stop`."""
        return self._end(None, timeout)

    def send(self, number: signal.Signals) -> None:
        """Send a signal and go on."""
        self._running[0].send_signal(number)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing moves."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def close(self) -> None:
        """Kill it, whatever state it is in."""
        _kill_all(self._running, os.getpid())

    def _wait(self, holds: Callable[[], object], timeout: float, what: str) -> None:
        def checked() -> bool:
            if not self.alive():
                raise AssertionError(f"{self.name} ended at its start:\n{self.log()[-3000:]}")
            return bool(holds())

        wait_until_sync(checked, timeout=timeout, what=f"{self.name}: {what}")

    def _end(self, how: signal.Signals | None, timeout: float) -> int:
        process = self._running[0]
        if how is not None:
            process.send_signal(how)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} still runs {timeout:g} s after {how}:\n{self.log()[-3000:]}"
            ) from None
        self._running.clear()
        return code


class Running(msgspec.Struct, frozen=True):
    """A running job as its record tells."""

    job: str
    owner: str
    started: bool
    sent_ms: int
    replica: str


class Fleet:
    """Gateways, dispatchers and simulated engines on one Redis, which all serve all models.

    The engines have one seed, so that each gives the same answer to the same request. `heal`
    starts again whatever a test has ended.
    """

    def __init__(
        self,
        folder: Path,
        server: RedisServer,
        *,
        models: Sequence[str] = ("m1", "m2"),
        users: Sequence[str] = ("alice", "bob", "carol", "dave"),
        engine: EngineSettings | None = None,
        engines: int = 2,
        gateways: int = 3,
        dispatchers: int = 2,
        more: str = "",
    ) -> None:
        """`more`: lines of fairlane.toml."""
        self.server = server
        self.models = tuple(models)
        self._users = tuple(users)
        self._folder = folder
        self._more = more
        engine = engine or EngineSettings(max_num_seqs=8, step_ms=10.0)
        self.engine = msgspec.structs.replace(engine, model=self.models)
        """What the engines are: answers can be computed from it."""
        common = ["--config", str(folder / "fairlane.toml"), "--redis", server.url]
        self.engines = [Role(f"sim-{i}", self._sim(0), folder) for i in range(engines)]
        self.gateways = [
            Role(f"gateway-{i}", ["gateway", *common, "--port", "0"], folder)
            for i in range(gateways)
        ]
        self.dispatchers = [
            Role(f"dispatcher-{i}", ["dispatcher", *common, "--metrics-port", "0"], folder)
            for i in range(dispatchers)
        ]

    @property
    def roles(self) -> list[Role]:
        """All processes but Redis."""
        return [*self.engines, *self.dispatchers, *self.gateways]

    def start(self) -> None:
        """Start everything and wait until every part is ready."""
        for role in self.engines:
            role.start()
        for role in self.engines:
            role.wait_ready("/health")
            role.args = self._sim(int(role.url.rpartition(":")[2]))
        (self._folder / "fairlane.toml").write_text(self._config())
        self.heal()

    def heal(self) -> None:
        """Start again what has ended, let go on what is paused, and wait until all are ready."""
        for role in self.roles:
            if role.alive():
                role.resume()
            else:
                role.close()
                role.start()
        for role, path in [
            *((r, "/health") for r in self.engines),
            *((r, "/readyz") for r in (*self.dispatchers, *self.gateways)),
        ]:
            role.wait_ready(path)

    def _sim(self, port: int) -> list[str]:
        e = self.engine
        flags = {
            "--port": port, "--max-num-seqs": e.max_num_seqs, "--step-ms": e.step_ms,
            "--seed": e.seed, "--mean-output-tokens": e.mean_output_tokens,
        }  # fmt: skip
        models = [w for m in self.models for w in ("--model", m)]
        return ["sim", *models, *(str(w) for flag in flags.items() for w in flag)]

    def _config(self) -> str:
        lines = [
            f'[[keys]]\nsecret = "{KEY}{u}"\nuser = "{u}"\n'
            'classes = ["standard", "interactive", "batch"]'
            for u in self._users
        ]
        urls = ", ".join(
            f'{{ url = "{r.url}", max_num_seqs = {self.engine.max_num_seqs} }}'
            for r in self.engines
        )
        lines += [f"[models.{m}]\nbackends = [{urls}]" for m in self.models]
        return "\n".join([*lines, self._more, ""])

    def redis(self) -> "redis.Redis[bytes]":
        """A client of its own; commands give up after 5 s."""
        return redis.Redis.from_url(self.server.url, socket_timeout=5.0)

    def leader(self, model: str) -> Role | None:
        """The dispatcher that Redis has as the model's leader, whether its lease is over or not."""
        with self.redis() as client:
            owner = client.hget(ModelKeys(model).leader, "owner")
        return self.dispatcher((owner or b"").decode())

    def dispatcher(self, owner: str) -> Role | None:
        """The dispatcher whose present or last start had this id."""
        return next((r for r in self.dispatchers if owner and r.id == owner), None)

    def running(self, *models: str) -> list[Running]:
        """All running jobs, as Redis has them, in one look at each model."""
        found = []
        with self.redis() as client:
            for model in models or self.models:
                k = ModelKeys(model)
                jobs = [j.decode() for j in client.zrange(k.running, 0, -1)]
                with client.pipeline(transaction=True) as asked:
                    for job in jobs:
                        asked.hmget(k.record(job), "state", "owner", "started", "sent", "replica")
                    answers: list[Any] = asked.execute()
                for job, (state, owner, started, sent, replica) in zip(jobs, answers, strict=True):
                    if state == b"running":
                        found.append(
                            Running(job, owner.decode(), started == b"1", int(sent),
                                    replica.decode())
                        )  # fmt: skip
        return found

    def waiting(self) -> int:
        """Jobs waiting in all models."""
        with self.redis() as client:
            return sum(int(client.hget(ModelKeys(m).waiting, "jobs") or 0) for m in self.models)

    def now_ms(self) -> int:
        """The Redis server's clock."""
        with self.redis() as client:
            seconds, micros = client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def leftovers(self, *, expiring: bool = False) -> list[str]:
        """Keys that may not stay when no job is open; those that expire too, unless allowed."""
        permanent = frozenset().union(*(ModelKeys(m).permanent() for m in self.models))
        with self.redis() as client:
            return sorted(
                key.decode()
                for key in client.scan_iter(count=1000)
                if key.decode() not in permanent and not (expiring and client.pttl(key) > 0)
            )

    def logs(self) -> str:
        """The end of every log, for a failed test's message."""
        return "\n".join(f"--- {r.name}\n{r.log()[-1500:]}" for r in self.roles)

    def close(self) -> None:
        """Kill every process."""
        for role in self.roles:
            role.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _kill_all(running: list[subprocess.Popen[bytes]], owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds a copy, and the processes are not its own
        return
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
    running.clear()
