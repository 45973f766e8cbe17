"""The runs of one dispatcher: their leases, their charges, their time-outs, their ends.

A run is one attempt at one job. It is owned here from `pop` until `settle` or `requeue`, whoever
leads meanwhile. Three ticks look after all of them at once: leases are renewed in one batch a
second, charges are raised in one batch a second, and read deadlines are compared four times a
second, so that no run needs timers of its own.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator

from common.broker import Broker
from common.cost import Pricing
from common.errors import BrokerError
from common.jobs import Lease
from common.logged import Logged
from common.outcomes import Outcome
from common.publish import Outgoing
from common.queue import Queue
from common.settings import DispatcherSettings
from common.wire import JobMeta, Usage
from dispatcher.backend import Backend
from dispatcher.engine import Answer
from dispatcher.tpot import Chunks

log = logging.getLogger("fairlane.runs")

WATCH_S = 0.25
FRESH_S = 2.0
"""A lease whose pop or renewal was asked for longer ago is renewed before a request is sent."""
BATCH = 200
"""Most jobs in one renewal or charge."""


class Run:
    """One attempt at one job."""

    def __init__(
        self,
        lease: Lease,
        meta: JobMeta,
        queue: Queue,
        backend: Backend,
        pricing: Pricing,
        out: Outgoing | Logged,
        now: float,
        leads: Callable[[], bool],
    ) -> None:
        """`leads`: whether this dispatcher leads the model, so that no other counts the run."""
        self.lease = lease
        self.meta = meta
        self.queue = queue
        self.backend = backend
        self.pricing = pricing
        self.out = out
        if isinstance(out, Logged):
            out.over = self.stop
        self.leads = leads
        self.leased_at = now
        self.sent_at = now
        self.started = False
        """Whether `start` succeeded: from then on the answer cannot be had from another engine."""
        self.output = 0
        """Events handed on: output tokens, until the engine tells."""
        self.chunks = Chunks(backend.load.signal.gaps)
        self.usage: Usage | None = None
        self.charged = lease.charged
        self.read_until = float("inf")
        """When it has been silent for too long; infinite while nothing is read."""
        self.heard_at = now
        """When the last piece of the answer came."""
        self.begun = False
        """Whether a byte of its answer came."""
        self.yielded = False
        """Whether it was taken out of its engine for another."""
        self.stopped: Outcome | None = None
        self.task: asyncio.Task[None] | None = None
        """The relay's, while the engine has its part; None before and after."""
        self.answer: Answer | None = None
        self.priority: int | None = None
        """Told to an engine that orders its own queue."""

    def stop(self, why: Outcome) -> None:
        """Hang up on the engine and end the run with this outcome, unless it ends already."""
        if self.stopped is None and self.task is not None:
            self.stopped = why
            if self.task is not asyncio.current_task():
                self.task.cancel()

    def heard(self, now: float, silence_s: float) -> None:
        """A piece of the answer came, and the next may take so long."""
        self.heard_at = now
        self.read_until = now + silence_s

    def give_way(self) -> bool:
        """Hang up on the engine, to be run again later. False: too late, it ends or is stopped
        already, or its answer comes."""
        if self.begun or self.stopped is not None or self.task is None:
            return False
        self.yielded = True
        self.stop(Outcome.TRIES)
        return True

    def spent(self) -> Usage:
        """What the engine told, or as far as can be counted from outside."""
        return self.usage or Usage(self.meta.input, 0, self.output)

    def left(self, now: float, outcome: Outcome) -> None:
        """Its engine does not have it any more. One that orders its queue by priority tells nothing
        by when it is done."""
        whole = outcome is Outcome.FINISHED and self.priority is None
        tokens = None if self.usage is None else self.usage.output / max(1, self.meta.choices)
        self.backend.ended(now, self.lease.job, whole=whole, tokens=tokens)

    def seconds(self, now: float) -> float:
        """Since the request was sent, what it waits inside the engine included."""
        return now - self.sent_at

    def cost(self, now: float) -> float:
        """Cost of what was spent so far, before weighting."""
        return self.pricing.real(self.spent(), self.seconds(now))


class Runs:
    """All runs of one dispatcher process."""

    def __init__(self, broker: Broker, owner: str, settings: DispatcherSettings) -> None:
        self._broker = broker
        self._owner = owner
        self._settings = settings
        self._runs: dict[str, Run] = {}
        self._epoch = 0
        self.ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, job: str) -> bool:
        return job in self._runs

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def add(self, run: Run) -> None:
        """The run is ours from here."""
        self._runs[run.lease.job] = run

    def remove(self, run: Run) -> None:
        """The run has ended or was given back."""
        if self._runs.get(run.lease.job) is run:
            del self._runs[run.lease.job]
        self.ended.set()

    def cancel(self, job: str, attempt: int) -> None:
        """A gateway no longer wants an answer; `attempt` 0 means whichever runs."""
        run = self._runs.get(job)
        if run is not None and attempt in (0, run.lease.attempt):
            run.stop(Outcome.CANCELLED)

    def give_way(self, job: str) -> bool:
        """Take a run out of its engine, to be run again later; False: it is too late."""
        run = self._runs.get(job)
        return run is not None and run.give_way()

    def settled_in(self) -> bool:
        """Whether Redis knows of every run since the present connection was made: no pop before."""
        return self._epoch == self._broker.epoch

    async def run(self) -> None:
        """The three ticks, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._every(self._settings.job_renew_ms / 1000, self._renew))
            group.create_task(self._every(1.0, self._charge))
            group.create_task(self._reconnected())

    async def _every(self, period: float, do: "Callable[[], object]") -> None:
        while True:
            await asyncio.sleep(period)
            try:
                await do()  # type: ignore[misc]
            except BrokerError as e:
                log.debug("%s: %s", getattr(do, "__name__", ""), e)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_S)
            now = loop.time()
            for run in list(self._runs.values()):
                if now > run.read_until:
                    run.stop(Outcome.TIMEOUT)

    async def _reconnected(self) -> None:
        """After each new connection, tell Redis of every run before anything is popped."""
        changed = self._broker.epoch_event()
        changed.set()
        while True:
            await changed.wait()
            changed.clear()
            epoch = self._broker.epoch
            try:
                if epoch > 1:
                    for run in list(self._runs.values()):
                        await self.restore(run)
                self._epoch = epoch
            except BrokerError as e:
                log.warning("re-asserting runs: %s", e)
                await asyncio.sleep(0.1)
                if self._broker.up.is_set():
                    changed.set()

    async def restore(self, run: Run) -> bool:
        """Tell Redis of one run again. False: it is not ours any more, and is being stopped."""
        word = await run.queue.restore(
            run.lease, self._owner, run.backend.url, run.charged, started=run.started,
            keep_ms=run.meta.keep_ms, sink=run.meta.sink,
            lease_ms=self._settings.job_lease_ms,
        )  # fmt: skip
        if word in ("running", "restored"):
            return True
        run.stop(Outcome.CANCELLED if word == "cancelled" else Outcome.LOST)
        return False

    async def fresh(self, run: Run) -> bool:
        """Whether a request may be sent for this run: its lease is young, or was just renewed."""
        now = asyncio.get_running_loop().time()
        if now - run.leased_at < FRESH_S:
            return True
        words = await run.queue.renew(
            [(run.lease.job, run.lease.attempt, run.backend.url)], self._owner,
            lease_ms=self._settings.job_lease_ms,
        )  # fmt: skip
        if words == ["ok"]:
            run.leased_at = now
            return True
        run.stop(Outcome.CANCELLED if words == ["cancelled"] else Outcome.LOST)
        return False

    def _by_model(self) -> list[list[Run]]:
        groups: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs.values():
            groups[run.queue.model].append(run)
        return list(groups.values())

    async def _renew(self) -> None:
        for runs in self._by_model():
            for i in range(0, len(runs), BATCH):
                await self._renew_batch(runs[i : i + BATCH])

    async def _renew_batch(self, runs: list[Run]) -> None:
        now = asyncio.get_running_loop().time()
        words = await runs[0].queue.renew(
            [(r.lease.job, r.lease.attempt, "") for r in runs], self._owner,
            lease_ms=self._settings.job_lease_ms,
        )  # fmt: skip
        for run, word in zip(runs, words, strict=True):
            if run.lease.job not in self._runs:
                continue
            if word == "ok":
                run.leased_at = now
            elif word == "unknown":
                await self.restore(run)
            else:
                run.stop(Outcome.CANCELLED if word == "cancelled" else Outcome.LOST)

    async def _charge(self) -> None:
        now = asyncio.get_running_loop().time()
        for runs in self._by_model():
            due = [(r, c) for r in runs if (c := r.cost(now)) > r.charged * r.lease.weight]
            for i in range(0, len(due), BATCH):
                part = due[i : i + BATCH]
                costs = [(run.lease, cost) for run, cost in part]
                words = await part[0][0].queue.charge(costs, self._owner)
                for (run, cost), word in zip(part, words, strict=True):
                    if word == "raised":
                        run.charged = cost / run.lease.weight
