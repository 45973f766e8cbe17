"""Where a dispatcher's backends come from, put together: configuration, file, HTTP, and names."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import placed
from common.broker import Broker
from common.config import parse_backends
from common.errors import BrokerError
from common.metrics import DispatcherMetrics
from common.names import Resolve
from common.placed import Placements
from common.settings import BackendSettings, Settings
from common.watched import Contents, Watched
from dispatcher.sources.names import Names
from dispatcher.sources.wanted import BACKENDS_MAX, Listed, Wanted, endpoint, merge

log = logging.getLogger("fairlane.sources")

PLACED_S = 1.0
"""What was changed by HTTP is read this often."""


class Sources:
    """All sources of one dispatcher. `run` keeps them fresh."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        metrics: DispatcherMetrics,
        resolve: Resolve,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called whenever `wanted` may have changed."""
        self._settings = settings
        self._broker = broker
        self._metrics = metrics
        self._changed = changed
        self._names = Names(resolve, settings.dispatcher.resolve_s, changed)
        self._file: list[BackendSettings] = []
        self._placed = Placements()

    async def run(self) -> None:
        """Until cancelled."""
        self._changed()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._names.run())
            group.create_task(self._read_placed())
            if self._settings.backends_file is not None:
                path = Path(self._settings.backends_file)
                state = partial(self._metrics.source, "file")
                contents = Contents(partial(parse_backends, path=path))
                group.create_task(Watched(path, contents, self._took, state).run())

    def configure(self, settings: Settings) -> None:
        """Use the backends of another configuration, but for the path of its file."""
        self._settings = settings
        self._changed()

    def wanted(self) -> dict[str, Wanted]:
        """The backends that are to be used, by address. Names among them are looked up from now
        on; a new one has no address yet."""
        listed = self._listed()
        self._names.want({endpoint(e.settings.url) for e in listed if e.settings.resolve})
        wanted = merge(listed, self._names.known(), self._placed.drained)
        if len(wanted) >= BACKENDS_MAX:
            log.warning("there are %d backends or more: further ones are not used", BACKENDS_MAX)
        return wanted

    def _listed(self) -> list[Listed]:
        settings = self._settings
        models = settings.models.items()
        return [
            *(Listed(b, "config", model) for model, m in models for b in m.backends),
            *(Listed(b, "config") for b in settings.backends),
            *(Listed(b, "file") for b in self._file),
            *(Listed(b, "admin") for b in self._placed.added.values()),
        ]

    def _took(self, backends: list[BackendSettings]) -> None:
        log.info("%s: %d backends", self._settings.backends_file, len(backends))
        self._file = backends
        self._changed()

    async def _read_placed(self) -> None:
        while True:
            try:
                await self._look_at_placed()
            except BrokerError as e:
                log.debug("backends added by HTTP: %s", e)
            await asyncio.sleep(PLACED_S)

    async def _look_at_placed(self) -> None:
        now = await placed.read(self._broker)
        if placed.KEPT in self._placed.fields and placed.KEPT not in now.fields:
            await placed.restore(self._broker, self._placed)  # Redis lost it; this process did not
            return
        before, self._placed = self._placed, now
        if (before.added, before.drained) != (now.added, now.drained):
            self._changed()
