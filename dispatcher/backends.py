"""The poller that asks the engines of a dispatcher's backends how they are.

Polls only add to what the dispatcher knows of its own jobs. A backend whose metrics page is
missing, broken or hangs is used all the same, within the limits of `dispatcher.admission`; what
takes a backend out of use is in `dispatcher.health`.
"""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence

from dispatcher.backend import Backend
from dispatcher.engines.facts import NOTHING, EngineFacts
from dispatcher.engines.kinds import ADAPTERS
from dispatcher.engines.models import read_models
from dispatcher.pages import Pages, Unreadable

log = logging.getLogger("fairlane.backends")

MODELS_S = 10.0
"""How often served models are read; each MODELS_RETRY_S until known, or where no metrics are."""
MODELS_RETRY_S = 1.0
JITTER = 0.1
TICK_S = 0.001
"""Pauses are not finer than that: a shorter sleep need not move a coarse clock at all."""
WARN_S = 60.0
"""At most one warning of each kind a backend in this time."""


class Poller:
    """Reads each backend's `/metrics` and `/v1/models`, one request of each kind at a time."""

    def __init__(
        self,
        pages: Pages,
        backends: Sequence[Backend],
        *,
        busy: Callable[[Backend], bool],
        changed: Callable[[Backend], None],
        rng: random.Random,
        busy_ms: int = 100,
        idle_ms: int = 1_000,
    ) -> None:
        """`busy`: whether jobs wait for this backend, so that it is polled often.

        `changed` is told when facts, reachability or served models of a backend are new; it must
        neither wait nor raise. `pages` are shared with the pollers of other models.
        """
        self._pages = pages
        self._backends = tuple(backends)
        self._busy = busy
        self._changed = changed
        self._rng = rng
        self._busy_s = busy_ms / 1000
        self._idle_s = idle_ms / 1000

    async def run(self) -> None:
        """Poll both until cancelled."""
        async with asyncio.TaskGroup() as group:
            for backend in self._backends:
                if backend.reading.path is not None:
                    group.create_task(self._poll_metrics(backend))
                group.create_task(self._poll_models(backend))

    async def run_load(self) -> None:
        """Read what load there is, or whether an engine without metrics is there, until
        cancelled."""
        async with asyncio.TaskGroup() as group:
            for backend in self._backends:
                metrics = backend.reading.path is not None
                poll = self._poll_metrics if metrics else self._poll_models
                group.create_task(poll(backend))

    async def run_models(self) -> None:
        """Read which models there are, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for backend in self._backends:
                group.create_task(self._poll_models(backend))

    async def _poll_metrics(self, backend: Backend) -> None:
        now, looked = asyncio.get_running_loop().time, -math.inf
        with self._pages.reading(backend.url):
            while True:
                try:
                    facts, asked_at = await self._facts(backend, looked)
                except Unreadable as e:
                    self._failed(backend, e)
                else:
                    self._read(backend, facts, asked_at)
                looked = now()
                await self._pause(backend)

    async def _pause(self, backend: Backend) -> None:
        """From the end of one poll to the next: an engine that answers slowly is not pressed."""
        now = asyncio.get_running_loop().time
        began = now()
        busy_s, idle_s = self._jittered(self._busy_s), self._jittered(self._idle_s)
        while True:
            busy = self._busy(backend)
            if not busy:
                backend.load.expect(self._idle_s)
            left = began + (busy_s if busy else idle_s) - now()
            if left < TICK_S:
                return
            await asyncio.sleep(min(left, busy_s))

    async def _facts(self, backend: Backend, looked: float) -> tuple[EngineFacts, float]:
        """What a page tells that was asked for since the last one was looked at here, and when
        that was. Raises Unreadable."""
        reading = backend.reading
        recent = self._busy_s if self._busy(backend) else self._idle_s
        since = max(looked, asyncio.get_running_loop().time() - recent)
        path = reading.path or "/metrics"
        try:
            page, asked_at = await self._pages.read(backend.settings, backend.host, path, since)
        except Unreadable as e:
            if not e.refused:
                reading.missed()
            raise
        facts = reading.read(page, backend.model)
        if facts == NOTHING:
            what = reading.kind if reading.kind in ADAPTERS else "known engine"
            raise Unreadable(f"nothing of a {what} in {len(page)} bytes")
        return facts, asked_at

    def _read(self, backend: Backend, facts: EngineFacts, asked_at: float) -> None:
        now = asyncio.get_running_loop().time()
        load = backend.load
        before = (load.facts, load.fresh(now), load.counts(now), backend.reachable)
        period = self._busy_s + (now - asked_at)
        backend.polled(now, facts, period=period, asked_at=asked_at)
        if before != (load.facts, True, load.counts(now), True):
            self._changed(backend)

    def _failed(self, backend: Backend, why: Unreadable) -> None:
        now = asyncio.get_running_loop().time()
        before = (backend.reachable, backend.metrics_up)
        backend.unread(now, refused=why.refused)
        self._warn(backend, "metrics", why)
        if before != (backend.reachable, False):
            self._changed(backend)

    async def _poll_models(self, backend: Backend) -> None:
        now, looked = asyncio.get_running_loop().time, -math.inf
        with self._pages.reading(backend.url):
            while True:
                await self._look_for_models(backend, max(looked, now() - MODELS_RETRY_S))
                looked = now()
                often = backend.reading.path is None or backend.models is None
                await asyncio.sleep(self._jittered(MODELS_RETRY_S if often else MODELS_S))

    async def _look_for_models(self, backend: Backend, since: float) -> None:
        before = (backend.models, backend.reachable)
        refused = False
        try:
            page, _ = await self._pages.read(backend.settings, backend.host, "/v1/models", since)
            names = read_models(page)
            if names is None:
                raise Unreadable("not a list of models")
            backend.models = names
        except Unreadable as e:
            refused = e.refused
            self._warn(backend, "models", e)
        if backend.reading.path is None:  # nothing else tells whether it is there
            backend.health.reached(asyncio.get_running_loop().time(), not refused)
        if before != (backend.models, backend.reachable):
            self._changed(backend)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - JITTER, 1 + JITTER)

    def _warn(self, backend: Backend, what: str, why: Unreadable) -> None:
        if self._pages.tells(backend.url, what, WARN_S):
            text = "it takes no connection" if why.refused else str(why)
            log.warning("backend %s: %s unknown: %s", backend.url, what, text)
