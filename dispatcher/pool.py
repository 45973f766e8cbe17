"""The backends in use, as they come and go: their pollers, and their places in the models' loops.

A backend serves the models that its source names, or those that it lists. One that is not wanted
any more gets no more jobs, and is dropped once its last run has ended, here and, where this
dispatcher leads, at others. After `remove_s` runs of which nothing has come are given back.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

import httpx
import msgspec

from common.metrics import DispatcherMetrics
from common.outcomes import Outcome
from common.settings import BackendSettings, DispatcherSettings
from common.wire import ServedBackend
from dispatcher.backend import Backend
from dispatcher.backends import Poller
from dispatcher.loop import ModelLoop
from dispatcher.pages import Pages
from dispatcher.runs import Runs
from dispatcher.sources.wanted import Wanted, diff

log = logging.getLogger("fairlane.pool")

LOOK_S = 0.25
"""Backends that are on their way out are looked at this often."""

Key = tuple[str, str]
"""A backend's address, and a model."""


class Place(msgspec.Struct):
    """One backend for one model."""

    backend: Backend
    loop: ModelLoop
    task: asyncio.Task[None]
    leaving_at: float | None = None


class Probe(msgspec.Struct):
    """Who asks one backend which models it serves."""

    backend: Backend
    task: asyncio.Task[None]


class Pool:
    """All backends of one dispatcher process. `run` must run before `want` is called."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        settings: DispatcherSettings,
        runs: Runs,
        loop_of: Callable[[str], ModelLoop | None],
        metrics: DispatcherMetrics,
        rng: random.Random,
    ) -> None:
        """`loop_of`: the loop of a model, made where there is none; None: there are too many."""
        self._pages = Pages(transport)
        self._settings = settings
        self._runs = runs
        self._loop_of = loop_of
        self._metrics = metrics
        self._random = rng
        self._group = asyncio.TaskGroup()
        self._wanted: Mapping[str, Wanted] = {}
        self._places: dict[Key, Place] = {}
        self._probes: dict[str, Probe] = {}

    async def run(self) -> None:
        """Own the pollers, and drop what has left, until cancelled."""
        async with self._group:
            while True:
                await asyncio.sleep(LOOK_S)
                self._let_go()

    def want(self, wanted: Mapping[str, Wanted]) -> None:
        """These backends are to be used from now on, and no others."""
        self._wanted = wanted
        asking = {url: w for url, w in wanted.items() if w.discover}
        change = diff(asking.keys(), dict.fromkeys(self._probes, False))
        for url in change.start:
            self._probe(asking[url])
        for url in change.leave:
            self._probes.pop(url).task.cancel()
        for url, w in asking.items():
            probe = self._probes[url].backend
            probe.settings, probe.host = w.settings, w.host
        self._reconcile()

    def again(self) -> None:
        """There may be room for models that had none."""
        self._reconcile()

    def any_wanted(self) -> bool:
        """Whether there is any backend to be used."""
        return bool(self._wanted)

    def served(self) -> list[ServedBackend]:
        """What to announce."""
        running: dict[str, int] = {}
        for run in self._runs:
            running[run.backend.url] = running.get(run.backend.url, 0) + 1
        found = []
        for url in dict.fromkeys((*self._wanted, *(url for url, _ in self._places))):
            places = {m: p for (u, m), p in self._places.items() if u == url}
            here = [p.backend for p in places.values()]
            wanted = self._wanted.get(url)
            found.append(
                ServedBackend(
                    url, wanted.name if wanted else url, wanted.source if wanted else "",
                    _state(wanted), sorted(m for m, p in places.items() if p.leaving_at is None),
                    any(b.reachable for b in here), running.get(url, 0),
                )
            )  # fmt: skip
        return found

    def _reconcile(self) -> None:
        """Let each backend serve what it is to serve now."""
        serve = {
            (url, model): settings
            for url, w in self._wanted.items()
            for model, settings in self._models(url, w).items()
        }
        present = {key: p.leaving_at is not None for key, p in self._places.items()}
        change = diff(serve.keys(), present)
        for key in change.start:
            self._start(key, serve[key])
        for key in change.resume:
            self._places[key].leaving_at = None
        for key in change.leave:
            log.info("%s: %s leaves", key[1], key[0])
            self._places[key].leaving_at = asyncio.get_running_loop().time()
        for (url, model), place in self._places.items():
            settings = serve.get((url, model))
            if settings is not None:
                host = self._wanted[url].host
                if place.backend.reconfigure(settings, host):
                    place.task.cancel()
                    place.task = self._poll(place.backend, place.loop)
            place.backend.drained = settings is None or self._wanted[url].drained
            place.loop.wake()

    def _models(self, url: str, wanted: Wanted) -> dict[str, BackendSettings]:
        probe = self._probes.get(url)
        listed = (probe.backend.models or ()) if probe is not None else ()
        return {**dict.fromkeys(listed, wanted.settings), **wanted.models}

    def _start(self, key: Key, settings: BackendSettings) -> None:
        url, model = key
        loop = self._loop_of(model)
        if loop is None:
            return
        backend = Backend(
            settings, model=model, kv_max=self._settings.kv_max, host=self._wanted[url].host
        )
        self._places[key] = Place(backend, loop, self._poll(backend, loop))
        loop.backends.append(backend)
        loop.look(learn=True)  # others may run jobs there already
        self._share(url)

    def _poll(self, backend: Backend, loop: ModelLoop) -> asyncio.Task[None]:
        poller = Poller(
            self._pages, [backend], busy=lambda _: loop.busy(), changed=lambda _: loop.wake(),
            rng=self._random, busy_ms=self._settings.poll_busy_ms,
            idle_ms=self._settings.poll_idle_ms,
        )  # fmt: skip
        return self._group.create_task(poller.run_load())

    def _share(self, url: str) -> None:
        """Jobs that one model has in an engine are no foreign load for another."""
        peaks = [p.backend.load.peak for (u, _), p in self._places.items() if u == url]
        for peak in peaks:
            peak.beside = [other for other in peaks if other is not peak]

    def _probe(self, wanted: Wanted) -> None:
        backend = Backend(wanted.settings, host=wanted.host)
        poller = Poller(
            self._pages, [backend], busy=lambda _: False,
            changed=lambda _: self._reconcile(), rng=self._random,
        )  # fmt: skip
        task = self._group.create_task(poller.run_models())
        self._probes[backend.url] = Probe(backend, task)

    def _let_go(self) -> None:
        now = asyncio.get_running_loop().time()
        for key, place in list(self._places.items()):
            if place.leaving_at is None:
                continue
            if self._idle(place, now):
                self._drop(key, place)
            elif now - place.leaving_at >= self._settings.remove_s:
                self._give_back(place.backend)

    def _idle(self, place: Place, now: float) -> bool:
        """Whether no job is there, nor on its way there."""
        load = place.backend.load
        if not place.loop.election.leads:  # what others run there is not followed, and not counted
            load.keep_others(now, ())
        return not place.loop.popping and not load.counts(now).inflight

    def _drop(self, key: Key, place: Place) -> None:
        url, model = key
        place.task.cancel()
        place.loop.backends.remove(place.backend)
        place.loop.router.forget(url)
        self._metrics.forget_backend(model, url)
        del self._places[key]
        self._share(url)
        log.info("%s: %s has left", model, url)

    def _give_back(self, backend: Backend) -> None:
        """To other backends, or to wait for one."""
        for run in self._runs:
            if run.backend is backend and not run.started:
                run.stop(Outcome.FAILED)


def _state(wanted: Wanted | None) -> str:
    if wanted is None:
        return "leaving"
    return "draining" if wanted.drained else "active"
