"""One model's leader: waits for a reason, gathers facts, asks the deciders, pops, hands to relays.

Owner of a popped job: this dispatcher, from the reply of `pop`, through `relays.py`. A `pop` runs
to its end even when the loop is cancelled, and is never repeated: after any error of the broker
the jobs that Redis says are ours and that are not known here are given back.
"""

import asyncio
import contextlib
import logging

from common.cost import pricing
from common.errors import BrokerError
from common.jobs import Lease, Popped
from common.keys import CLASSES, GROUPS
from common.queue import POP_BYTES_MAX, Queue
from common.settings import ModelSettings
from dispatcher.affinity import Affinity
from dispatcher.backend import Backend
from dispatcher.census import Census
from dispatcher.facts import Facts
from dispatcher.leadership import Leadership, wait
from dispatcher.parts import Parts
from dispatcher.reaper import Reaper
from dispatcher.relays import Relays
from dispatcher.routing import Router
from dispatcher.turns import Round, Turn
from dispatcher.watchdog import Watchdog
from dispatcher.yields import Yields

log = logging.getLogger("fairlane.loop")

BUSY_S = 0.1
"""A round at least this often while jobs wait."""
IDLE_S = 1.0
"""A look at every class at least this often: a lost bell costs no more."""
REAP_S = 0.5
OTHERS_S = 1.0
"""While others run jobs of this model, or none can be popped, Redis is asked this often."""
POP_MAX = 64
"""Most jobs in one `pop`."""


class ModelLoop:
    """One model in one dispatcher process; pops only while it leads."""

    def __init__(
        self, parts: Parts, model: str, settings: ModelSettings, backends: list[Backend]
    ) -> None:
        self.model = model
        self.backends = backends
        self._parts = parts
        self.queue = Queue(parts.broker, model, settings.class_policy)
        self._affinity = Affinity(self.queue, parts, backends)
        self._yields = Yields(kv_max=parts.settings.kv_max)
        self.configure(settings)
        s = parts.settings
        self._leadership = Leadership(self.queue, parts.owner, s, parts.known, self._led)
        self.election = self._leadership.election
        self._reaper = Reaper(parts.broker, self.queue, parts.owner, s)
        self.router = Router()
        self._waiting = dict.fromkeys(CLASSES, 0)
        self._due: tuple[str, ...] = ()
        """Groups whose floor share is due."""
        self._rung = dict.fromkeys(CLASSES, 0)
        """Bells of enqueued jobs: one that rings while Redis counts may be of a job not counted."""
        self._look = True
        """Whether a class may have jobs that `_waiting` does not count."""
        self._reconcile = True
        self._census = Census(self.queue, parts.owner, parts.runs, parts.settings)
        self._watchdog = Watchdog(model, backends, parts.runs, parts.metrics)
        self._wake = asyncio.Event()
        self.popping = False
        """Whether jobs may be on their way to one of the backends."""
        self.relays = Relays(
            parts, self.queue, backends, leads=self._leadership.leads, moved=self._moved,
            settled=self._settled,
        )  # fmt: skip

    def configure(self, settings: ModelSettings) -> None:
        """Go by these settings from the next job on; the class policy stays as it was."""
        self._settings = settings
        self._pricing = pricing(settings)
        self._affinity.configure(settings)
        self._facts = Facts(settings, self.backends, self._yields)
        self._turns: Round | None = None
        """Used again until something changes for those who wait."""

    def wake(self) -> None:
        """A reason to look: a place is free, a job came, facts changed."""
        self._wake.set()

    def look(self, *, learn: bool = False) -> None:
        """Bells may have been missed: look at every class, and with `learn` at what runs."""
        self._look, self._reconcile = True, self._reconcile or learn
        self._wake.set()

    @property
    def unused(self) -> bool:
        """Whether it has no backend, and no job is here or on its way."""
        return not (self.backends or self.popping or self.relays.jobs())

    def busy(self) -> bool:
        """Whether jobs wait here: then engines are polled often."""
        return self.election.leads and any(self._waiting.values())

    def reasons(self) -> dict[str, str]:
        """Why nothing is sent of each class that waits, in words; empty where another leads."""
        now = asyncio.get_running_loop().time()
        return self._facts.reasons(now) if self.election.leads else {}

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
        if event != "start":
            self._turns = None
        self._look = self._look or event in ("requeue", "assert")
        if event not in ("cancel", "give"):
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled. `stop` first gives up the lead."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watchdog.run())
                group.create_task(self._leadership.run())
                group.create_task(self._pop_loop())
                group.create_task(self._reap_loop())
        finally:
            await self.relays.close()

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
            self.popping = True
            try:
                if self._reconcile:
                    await self._learn(give_back=True)
                await self._round()
            except BrokerError as e:
                log.warning("%s: %s", self.model, e)
                self._reconcile = True
                await asyncio.sleep(BUSY_S)
                self._wake.set()
            self.popping = False

    async def _round(self) -> None:
        """Pop turn after turn, until nothing that waits may run."""
        parts, now = self._parts, asyncio.get_running_loop().time
        if self._turns is None or self._look:
            groups = GROUPS[self.queue.keys.policy]
            self._turns = Round(groups, self._facts.rules, self.router)
        turns = self._turns
        while True:
            look, self._look = self._look, False
            most = min(POP_MAX, parts.settings.running_max - len(parts.runs))
            issued, rung = now(), self._rung.copy()
            view = self._facts.view(issued, self._waiting, self._due, look=look, most=most)
            turn = turns.next(view)
            if turn is None:
                self._look = self._look or look
                self._facts.closed(
                    issued, turns.why, self._waiting, self.model, parts.metrics, turns.held
                )
                self._make_room(turns, issued)
                return
            popped = await self._pop(turn)
            if popped.word != "popped":
                self._look = True
                return
            self._waiting = {c: n + self._rung[c] - rung[c] for c, n in popped.left.items()}
            self._due = popped.due
            self._take(popped.leases, issued, floor=turn.floor)
            cut = sum(len(lease.body) for lease in popped.leases) >= POP_BYTES_MAX
            turns.told(turn, len(popped.leases), cut=cut)

    def _make_room(self, turns: Round, now: float) -> None:
        """Nothing more may run: what batch holds and others lack goes back to the queue."""
        for job in self._facts.yielding(now, turns):
            if not self._parts.runs.give_way(job):
                self._facts.kept(job)

    async def _pop(self, turn: Turn) -> Popped:
        """One `pop`, carried through even when this task is cancelled meanwhile."""
        parts = self._parts
        popping = asyncio.ensure_future(self._popped(turn))
        try:
            popped = await asyncio.shield(popping)
        except asyncio.CancelledError:
            with contextlib.suppress(BrokerError):  # then their leases run out
                if not popping.cancelled():
                    for lease in (await popping).leases:
                        await self.queue.requeue(lease, parts.owner, count_try=False)
            raise
        if popped.word == "held":
            await asyncio.sleep(popped.held_ms / 1000)
        return popped

    async def _popped(self, turn: Turn) -> Popped:
        parts = self._parts
        popped = await self.queue.pop(
            turn.classes, turn.places, parts.owner, self.election.term, anyone=turn.anyone,
            user_max=turn.user_max, floor=self._settings.floor_share,
            lookahead=self._affinity.lookahead, liked=self._affinity.liked(turn),
            start=self._pricing.start, lease_ms=parts.settings.job_lease_ms,
        )  # fmt: skip
        return await self._affinity.placed(turn, popped)

    def _take(self, leases: list[Lease], issued: float, *, floor: bool) -> None:
        """Start a relay for each."""
        now, settings = asyncio.get_running_loop().time(), self._settings
        placed = self.relays.place(leases, lambda cls: self._facts.spare(now, cls))
        for lease, backend, moved in placed:
            self._facts.sent(lease, floor=floor)
            self.router.sent(backend.url)
            self._reaper.saw(lease.cls, lease.user)
            self._parts.metrics.popped(self.model, lease.cls, 1)
            self.relays.start(
                lease, backend, self._pricing, issued, moved=moved,
                priority=settings.engine_priority,
            )  # fmt: skip

    def _moved(self, job: str) -> None:
        """Its answer comes, or it left its engine."""
        self._facts.kept(job)
        self._wake.set()

    def _settled(self) -> None:
        """Its user has one job less in flight, and may go where it was passed over."""
        self._turns = None
        self._wake.set()

    async def _reap_loop(self) -> None:
        looked = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(REAP_S)
            if not self._may_pop():
                continue
            try:
                await self._reaper.round(self.election.term)
                asks = self._look or self._census.others
                if asks and loop.time() - looked >= OTHERS_S:
                    looked = loop.time()
                    await self._learn(give_back=False)
            except BrokerError as e:
                log.debug("%s: reaping: %s", self.model, e)
            if self.election.leads:  # the lead may have been lost meanwhile
                self._facts.measure(loop.time(), self.model, self._parts.metrics, self._waiting)

    async def _learn(self, *, give_back: bool) -> None:
        """Read what waits and what runs (strays only between pops, whose jobs are not known here
        before their reply)."""
        popped = self.relays.jobs() if give_back else None
        rung = self._rung.copy()
        waiting = await self._census.take(self.backends, popped)
        self._waiting = {c: n + self._rung[c] - rung[c] for c, n in waiting.items()}
        if give_back:
            self._reconcile = False
