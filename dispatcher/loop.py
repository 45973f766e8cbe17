"""One model's leader: waits for a reason, gathers facts, asks the deciders, pops, hands to relays.

Owner of a popped job: this dispatcher, from the reply of `pop`, through `relay.py`. A `pop` runs
to its end even when the loop is cancelled, and is never repeated: after any error of the broker
the jobs that Redis says are ours and that are not known here are given back.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from common.broker import Broker
from common.cost import Fairness
from common.errors import BrokerError, WireError
from common.jobs import Lease, Popped
from common.keys import CLASSES
from common.metrics import DispatcherMetrics
from common.outcomes import Outcome
from common.publish import Publisher
from common.queue import Queue
from common.settings import DispatcherSettings, ModelSettings
from common.wire import JobMeta, decode_meta
from dispatcher.backends import Backend
from dispatcher.census import Census
from dispatcher.leadership import Leadership, wait
from dispatcher.rate import Rate
from dispatcher.reaper import Reaper
from dispatcher.relay import Relay
from dispatcher.routing import Place, Router
from dispatcher.runs import Run, Runs

log = logging.getLogger("fairlane.loop")

BUSY_S = 0.1
"""A round at least this often while jobs wait."""
IDLE_S = 1.0
"""A look at every class at least this often: a lost bell costs no more."""
REAP_S = 0.5
OTHERS_S = 1.0
"""While others run jobs of this model, what runs is read again this often."""
POP_MAX = 64
"""Most jobs in one `pop`."""


class Parts(msgspec.Struct, frozen=True):
    """What all models of one dispatcher process share."""

    broker: Broker
    owner: str
    settings: DispatcherSettings
    runs: Runs
    relay: Relay
    publisher: Publisher
    metrics: DispatcherMetrics
    known: Callable[[str], bool]
    """Whether `fl:models` has held this model for a while."""


class ModelLoop:
    """One model in one dispatcher process; pops only while it leads."""

    def __init__(
        self, parts: Parts, model: str, settings: ModelSettings, backends: list[Backend]
    ) -> None:
        self.model = model
        self.backends = backends
        self._parts = parts
        self._fairness: Fairness = settings.fairness
        self._limits = {c: settings.queue_limit(c) for c in CLASSES}
        self.queue = Queue(parts.broker, model)
        s = parts.settings
        self._leadership = Leadership(self.queue, parts.owner, s, parts.known, self._led)
        self.election = self._leadership.election
        self._reaper = Reaper(parts.broker, self.queue, parts.owner, s)
        self._router = Router()
        self._waiting = dict.fromkeys(CLASSES, 0)
        self._rung = dict.fromkeys(CLASSES, 0)
        """Bells of enqueued jobs: one that rings while Redis counts may be of a job not counted."""
        self._look = True
        """Whether a class may have jobs that `_waiting` does not count."""
        self._reconcile = True
        self._census = Census(self.queue, parts.owner, parts.runs, parts.settings)
        self._wake = asyncio.Event()
        self._relays: set[asyncio.Task[None]] = set()
        self.drain = Rate()

    def wake(self) -> None:
        """A reason to look: a place is free, a job came, facts changed."""
        self._wake.set()

    def look(self) -> None:
        """Bells may have been missed: look at every class."""
        self._look = True
        self._wake.set()

    def busy(self) -> bool:
        """Whether jobs wait here: then engines are polled often."""
        return self.election.leads and any(self._waiting.values())

    def ring(self, event: str, job: str, detail: str) -> None:
        """One message of the model's bell: what others did to jobs."""
        now = asyncio.get_running_loop().time()
        if event == "give" and job != self._parts.owner:
            self._leadership.freed(job)
        if event == "enqueue" and detail in self._rung:
            self._waiting[detail] += 1
            self._rung[detail] += 1
        elif job not in self._parts.runs:
            for backend in self.backends:
                if backend.url != detail:
                    continue
                if event == "start":
                    backend.load.started(now, job)
                elif event in ("settle", "requeue"):
                    backend.load.ended(now, job)
                    self._census.others.discard(job)
        self._look = self._look or event in ("requeue", "assert")
        if event not in ("cancel", "give"):
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled. `stop` first gives up the lead."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._leadership.run())
                group.create_task(self._pop_loop())
                group.create_task(self._reap_loop())
        finally:
            for relay in self._relays:
                relay.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)

    async def stop(self) -> None:
        """Give up the lead at once; popped jobs go on."""
        await self._leadership.stop()

    def _led(self, leads: bool) -> None:
        """The lead was won or lost."""
        self._parts.metrics.leads(self.model, leads)
        self._reconcile = self._look = True
        self._wake.set()

    def _may_pop(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self.election.may_pop(now) and self._parts.runs.settled_in()

    async def _pop_loop(self) -> None:
        now, looked = asyncio.get_running_loop().time, 0.0
        while True:
            await wait(self._wake, BUSY_S if any(self._waiting.values()) else IDLE_S)
            if now() - looked >= IDLE_S:  # also where something wakes it all the time
                looked, self._look = now(), True
            self._wake.clear()
            if not self._may_pop():
                continue
            try:
                if self._reconcile:
                    await self._learn(give_back=True)
                await self._round()
            except BrokerError as e:
                log.warning("%s: %s", self.model, e)
                self._reconcile = True
                await asyncio.sleep(BUSY_S)
                self._wake.set()

    async def _round(self) -> None:
        """Pop for every class, highest first, as much as there is room for."""
        look, self._look = self._look, False
        above = 0
        for cls in CLASSES:
            while self._waiting[cls] > 0 or look:
                places = self._places(cls, above)
                if not places:
                    self._parts.metrics.closed(self.model)
                    self._look = self._look or look
                    return
                issued, rung = asyncio.get_running_loop().time(), self._rung[cls]
                popped = await self._pop(cls, places)
                if popped.word != "popped":
                    self._look = True
                    return
                self._waiting[cls] = popped.left + self._rung[cls] - rung
                self._parts.metrics.waiting(self.model, cls, popped.left)
                self._take(popped.leases, issued)
                if not popped.leases or not popped.left:
                    break
            above += self._waiting[cls]

    def _places(self, cls: str, above: int) -> list[str]:
        now = asyncio.get_running_loop().time()
        rooms = {}
        for backend in self.backends:
            room = backend.room(now, cls, self._limits[cls], others_waiting=above > 0)
            rooms[backend.url] = Place(room.n, backend.load.counts(now).inflight)
        most = min(POP_MAX, self._parts.settings.running_max - len(self._parts.runs))
        return self._router.places(rooms, most) if most > 0 else []

    async def _pop(self, cls: str, places: list[str]) -> Popped:
        """One `pop`, carried through even when this task is cancelled meanwhile."""
        parts = self._parts
        popping = asyncio.ensure_future(
            self.queue.pop(
                cls, places, parts.owner, self.election.term,
                lease_ms=parts.settings.job_lease_ms,
            )
        )  # fmt: skip
        try:
            popped = await asyncio.shield(popping)
        except asyncio.CancelledError:
            if not popping.cancelled():
                for lease in (await popping).leases:
                    await self.queue.requeue(lease, parts.owner, count_try=False)
            raise
        if popped.word == "held":
            await asyncio.sleep(popped.held_ms / 1000)
        return popped

    def _take(self, leases: list[Lease], issued: float) -> None:
        """Start a relay for each."""
        now = asyncio.get_running_loop().time()
        for lease in leases:
            backend = next(b for b in self.backends if b.url == lease.backend)
            try:
                meta = decode_meta(lease.meta)
            except WireError as e:
                log.error("job %s: %s", lease.job, e)
                meta = None
            streams = meta is not None and meta.stream
            backend.sent(now, lease.job, lease.cls, streams=streams)
            self._router.sent(backend.url)
            self._parts.metrics.popped(self.model, lease.cls, 1)
            relay = self._relay(lease, meta, backend, issued)
            task = asyncio.create_task(relay, name=lease.job)
            self._relays.add(task)
            task.add_done_callback(self._relayed)

    async def _relay(
        self, lease: Lease, meta: JobMeta | None, backend: Backend, issued: float
    ) -> None:
        parts = self._parts
        out = parts.publisher.open(lease.job, lease.attempt, lease.replica, lease.channel)
        if meta is None:
            end = out.end(Outcome.FAILED, "The request cannot be read.", None, issued)
            await self.queue.settle(
                lease, parts.owner, Outcome.FAILED, out.batch([end]), cost=0.0, seq=0
            )
            out.grant()
            backend.ended(asyncio.get_running_loop().time(), lease.job)
            return
        leads = self._leadership.leads
        run = Run(lease, meta, self.queue, backend, self._fairness, out, issued, leads)
        await parts.relay.run(run, self.wake)

    def _relayed(self, task: asyncio.Task[None]) -> None:
        self._relays.discard(task)
        self.drain.count(asyncio.get_running_loop().time())
        if not task.cancelled() and task.exception() is not None:
            log.error("a relay failed", exc_info=task.exception())
        self._parts.runs.ended.set()

    async def _reap_loop(self) -> None:
        looked = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(REAP_S)
            if not self._may_pop():
                continue
            try:
                await self._reaper.round(self.election.term)
                if self._census.others and loop.time() - looked >= OTHERS_S:
                    looked = loop.time()
                    await self._learn(give_back=False)
            except BrokerError as e:
                log.debug("%s: reaping: %s", self.model, e)
            self._measure()

    async def _learn(self, *, give_back: bool) -> None:
        """Read what waits and what runs (strays only between pops, whose jobs are not known here
        before their reply)."""
        popped = {task.get_name() for task in self._relays} if give_back else None
        rung = self._rung.copy()
        waiting = await self._census.take(self.backends, popped)
        self._waiting = {c: n + self._rung[c] - rung[c] for c, n in waiting.items()}
        if give_back:
            self._reconcile = False

    def _measure(self) -> None:
        now = asyncio.get_running_loop().time()
        for b in self.backends:
            counts = b.load.counts(now)
            self._parts.metrics.backend(
                self.model, b.url, counts.inflight, counts.unstarted, counts.foreign,
                b.load.fresh(now),
            )  # fmt: skip
