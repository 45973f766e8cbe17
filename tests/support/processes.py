"""Fairlane's roles as real processes.

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
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.support.wait import wait_until_sync

FAIRLANE = Path(sys.executable).with_name("fairlane")
"""The console script of the environment that the tests run in."""
START_S = 40.0
"""A start may take so long on a machine that is busy with other things."""
END_S = 15.0

_BOUND = re.compile(r" (?:on|is up:) http://127\.0\.0\.1:(\d+)")
_ID = re.compile(r"((?:gateway|dispatcher)-[A-Za-z0-9.-]*-[0-9a-f]{8})")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def environment() -> dict[str, str]:
    """This process's environment without settings of Fairlane in it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("FAIRLANE_")}


class Role:
    """One process of Fairlane; after its end `start` may follow again, with the same arguments."""

    def __init__(
        self, name: str, args: Sequence[str], folder: Path, *, program: Path = FAIRLANE
    ) -> None:
        self.name = name
        self.args = list(args)
        self._program = program
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
                [str(self._program), *self.args],
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
            float(line.rpartition(" ")[2]) for line in lines if sample.match(line) and label in line
        )

    def rss(self) -> int:
        """Bytes of memory it holds."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def cpu(self) -> float:
        """CPU seconds it has used."""
        return float(sum(psutil.Process(self.pid).cpu_times()[:2]))

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


def _kill_all(running: list[subprocess.Popen[bytes]], owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds a copy, and the processes are not its own
        return
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
    running.clear()
