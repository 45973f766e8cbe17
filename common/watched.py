"""A file that is read again and again: what it said last that was good stays.

No events of the file system are used: they do not come from network mounts and mapped folders.
What is found counts once it was the same at two looks in a row, for a file that is being written
may be whole by its syntax and half by its content.
"""

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from common.errors import ConfigError

log = logging.getLogger("fairlane.watched")

T = TypeVar("T")

LOOK_S = 1.0
WARN_S = 60.0
FILE_BYTES_MAX = 1 << 20


class Contents(Generic[T]):
    """What is known of one file's contents. Pure."""

    def __init__(self, parse: Callable[[bytes], T]) -> None:
        """`parse` raises ConfigError where the bytes are no good."""
        self._parse = parse
        self._last: bytes | None = None
        self._taken: bytes | None = None
        self._refused: bytes | None = None
        self.problem = ""
        """Why what is there now does not count; empty: it does."""

    def told(self, data: bytes, *, settled: bool = False) -> T | None:
        """A look found this; returns what it says, where that is news and good.

        `settled`: it is whole, though it was not seen before.
        """
        same, self._last = settled or data == self._last, data
        if data == self._taken:
            self.problem = ""
        elif same and (data != self._refused or settled):
            try:
                value = self._parse(data)
            except ConfigError as e:
                self._refused, self.problem = data, str(e)
            else:
                self._taken, self._refused, self.problem = data, None, ""
                return value
        return None

    def missing(self, why: str) -> None:
        """It could not be read."""
        self._last, self.problem = None, why


class Watched(Generic[T]):
    """One file, and who is told of what it says."""

    def __init__(
        self,
        path: Path,
        contents: Contents[T],
        changed: Callable[[T], None],
        state: Callable[[bool], None],
    ) -> None:
        """`state` is told after each look whether what is there is good."""
        self._path = path
        self._contents = contents
        self._changed = changed
        self._state = state
        self._warned: float | None = None
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Look at it until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self, *, settled: bool = False) -> None:
        """Look at it now."""
        async with self._lock:
            value = None
            try:
                data = await asyncio.to_thread(read, self._path)
            except OSError as e:
                self._contents.missing(f"cannot read {self._path}: {e.strerror}")
            else:
                value = self._contents.told(data, settled=settled)
            self._say()
            if value is not None:
                self._changed(value)

    def _say(self) -> None:
        problem, now = self._contents.problem, asyncio.get_running_loop().time()
        self._state(not problem)
        if not problem:
            self._warned = None
        elif self._warned is None or now - self._warned >= WARN_S:
            self._warned = now
            log.warning("%s; what was read before stays", problem)


def read(path: Path) -> bytes:
    """A file of at most FILE_BYTES_MAX bytes. Raises OSError, also where it is no regular file:
    a pipe would be waited for without end, by a thread that nothing can stop."""
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as f:
        if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
            raise OSError(0, "it is no regular file")
        data = f.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise OSError(0, f"it has more than {FILE_BYTES_MAX} bytes")
    return data
