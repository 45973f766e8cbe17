"""Names of backends that stand for several addresses, looked up again and again.

A lookup that fails, or finds nothing, changes nothing. An address is gone once ABSENT_MAX lookups
in a row came without it: servers of names rotate long answers, and cut them.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from common.names import Resolve

log = logging.getLogger("fairlane.sources")

ABSENT_MAX = 3
ADDRESSES_MAX = 64
"""Most addresses of one name."""
NAMES_MAX = 64
"""Most names that are looked up; further ones have no address."""
LOOKUP_S = 5.0
WARN_S = 60.0

Name = tuple[str, int]


class Addresses:
    """What is known of one name. Pure."""

    def __init__(self) -> None:
        self._absent: dict[str, int] = {}
        """Address -> lookups in a row that came without it."""

    @property
    def known(self) -> tuple[str, ...]:
        """The addresses that count."""
        return tuple(self._absent)

    def told(self, found: Collection[str]) -> bool:
        """A lookup's answer; returns whether other addresses count now."""
        before = self.known
        if found:
            absent = {a: 0 if a in found else n + 1 for a, n in self._absent.items()}
            absent |= {a: 0 for a in sorted(found) if a not in absent}
            kept = [(a, n) for a, n in absent.items() if n < ABSENT_MAX]
            self._absent = dict(kept[:ADDRESSES_MAX])
        return self.known != before


class Names:
    """All names of a dispatcher's backends. `run` keeps their addresses fresh."""

    def __init__(self, resolve: Resolve, every_s: float, changed: Callable[[], None]) -> None:
        self._resolve = resolve
        self._every_s = every_s
        self._changed = changed
        self._names: dict[Name, Addresses] = {}
        self._warned: dict[Name, float] = {}
        self._new = asyncio.Event()

    def want(self, names: Collection[Name]) -> None:
        """Look up these, and none else; new ones at once."""
        for gone in self._names.keys() - set(names):
            del self._names[gone]
            self._warned.pop(gone, None)
        for name in names:
            if name not in self._names and len(self._names) < NAMES_MAX:
                self._names[name] = Addresses()
                self._new.set()

    def known(self) -> dict[Name, tuple[str, ...]]:
        """Each name's addresses."""
        return {name: addresses.known for name, addresses in self._names.items()}

    async def run(self) -> None:
        """Look up until cancelled."""
        while True:
            self._new.clear()
            async with asyncio.TaskGroup() as group:
                for name in self._names:
                    group.create_task(self._look_up(name))
            try:
                async with asyncio.timeout(self._every_s):
                    await self._new.wait()
            except TimeoutError:
                continue

    async def _look_up(self, name: Name) -> None:
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await self._resolve(*name)
        except (OSError, UnicodeError) as e:  # a TimeoutError is an OSError
            self._warn(name, e)
            return
        addresses = self._names.get(name)
        if not found:
            self._warn(name, OSError("no address"))
        elif addresses is not None and addresses.told(found):
            self._warned.pop(name, None)
            log.info("%s is %s", name[0], ", ".join(addresses.known))
            self._changed()

    def _warn(self, name: Name, why: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned.get(name, -WARN_S) >= WARN_S:
            self._warned[name] = now
            text = str(why) or type(why).__name__
            log.warning("cannot look up %s, so its backends stay: %s", name[0], text)
