"""A configuration that is read again: when its file changes, and at SIGHUP."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.config import load
from common.reload import live
from common.settings import Settings
from common.watched import Contents, Watched

log = logging.getLogger("fairlane.reload")


class Configuration:
    """Where a process's settings come from, and what they are now."""

    def __init__(self, path: Path | None = None, options: dict[str, Any] | None = None) -> None:
        """Reads them. Raises ConfigError."""
        self.path = path
        self.options = options or {}
        self.settings = load(path, self.options)

    def again(self, data: bytes) -> Settings:
        """As they would be with these bytes in the file. Raises ConfigError."""
        return load(self.path, self.options, data=data)


class Reload:
    """Tells the parts of a process of a changed configuration."""

    def __init__(
        self, configuration: Configuration, parts: Sequence[Callable[[Settings], None]]
    ) -> None:
        self._configuration = configuration
        self._settings = configuration.settings
        self._parts = parts
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._asked.set)
        try:
            path = self._configuration.path
            if path is None:
                await self._ignore()
                return
            contents = Contents(self._configuration.again)
            watched = Watched(path, contents, self._changed, lambda good: None)
            async with asyncio.TaskGroup() as group:
                group.create_task(watched.run())
                group.create_task(self._follow(watched))
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    async def _ignore(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            log.warning("SIGHUP: there is no --config to read again")

    async def _follow(self, watched: Watched[Settings]) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            log.info("SIGHUP: reading %s again", self._configuration.path)
            await watched.look(settled=True)

    def _changed(self, new: Settings) -> None:
        settings, ignored = live(self._settings, new)
        for place in ignored:
            log.warning("%s has changed, which needs a restart", place)
        if settings == self._settings:
            return
        self._settings = settings
        for part in self._parts:
            part(settings)
        log.info(
            "%s is in use: %d keys, %d models, %d backends", self._configuration.path,
            len(settings.keys), len(settings.models),
            len(settings.backends) + sum(len(m.backends) for m in settings.models.values()),
        )  # fmt: skip
