"""The relays of one model: a task for each popped job, at the backend where it goes.

Owner of a popped job: this dispatcher, from the reply of `pop`, through `relay.py`.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from common.cost import Pricing
from common.errors import WireError
from common.jobs import Lease
from common.logged import Logged
from common.outcomes import Outcome
from common.publish import Outgoing
from common.queue import Queue
from common.wire import JobMeta, decode_meta
from dispatcher.backend import Backend
from dispatcher.parts import Parts
from dispatcher.rate import Rate
from dispatcher.retries import elsewhere
from dispatcher.runs import Run
from dispatcher.turns import engine_priority

log = logging.getLogger("fairlane.relays")

DRAIN_S_MIN = 5.0
"""The rate at which jobs end is told as if of no less time."""


class Relays:
    """The tasks that run a model's popped jobs; `close` cancels and awaits them."""

    def __init__(
        self,
        parts: Parts,
        queue: Queue,
        backends: Sequence[Backend],
        *,
        leads: Callable[[], bool],
        moved: Callable[[str], None],
        settled: Callable[[], None],
    ) -> None:
        """`moved` is told of each job whose answer comes, or which leaves its engine; `settled`
        when a user has one job less in flight."""
        self._parts = parts
        self._queue = queue
        self._backends = backends
        self._leads = leads
        self._moved = moved
        self._settled = settled
        self._tasks: set[asyncio.Task[bool]] = set()
        self.drain = Rate(least_s=DRAIN_S_MIN)
        """Jobs that ended."""

    def jobs(self) -> set[str]:
        """Those that have a relay."""
        return {task.get_name() for task in self._tasks}

    def place(
        self, leases: Sequence[Lease], spare: Callable[[str], Mapping[str, int]]
    ) -> list[tuple[Lease, Backend, bool]]:
        """Popped jobs with the backends they go to, and whether Redis was told another one.

        `spare`: of a class, how many more jobs each backend has room for."""
        backends = {b.url: b for b in self._backends}
        placed = elsewhere(leases, backends, spare)
        return [
            (lease, backends[lease.backend], lease is not popped)
            for popped, lease in zip(leases, placed, strict=True)
        ]

    def start(
        self, lease: Lease, backend: Backend, pricing: Pricing, issued: float, *, moved: bool,
        priority: bool,
    ) -> None:  # fmt: skip
        """Run a job there. `issued`: when it was asked for; `moved`: Redis is told before anything
        is sent; `priority`: the engine is told one."""
        try:
            meta = decode_meta(lease.meta)
        except WireError as e:
            log.error("job %s: %s", lease.job, e)
            meta = None
        streams = meta is not None and meta.stream
        backend.sent(asyncio.get_running_loop().time(), lease.job, lease.cls, streams=streams)
        relay = self._relay(lease, meta, backend, pricing, issued, moved, priority)
        task = asyncio.create_task(relay, name=lease.job)
        self._tasks.add(task)
        task.add_done_callback(self._relayed)

    async def _relay(
        self, lease: Lease, meta: JobMeta | None, backend: Backend, pricing: Pricing,
        issued: float, moved: bool, priority: bool,
    ) -> bool:  # fmt: skip
        """One run; True: it was the job's last."""
        parts = self._parts
        out: Outgoing | Logged
        if lease.durable:
            out = Logged(self._queue, parts.owner, lease.job, lease.attempt)
        else:
            out = parts.publisher.open(lease.job, lease.attempt, lease.replica, lease.channel)
        if meta is None:
            end = out.end(Outcome.FAILED, "The request cannot be read.", None, issued)
            await self._queue.settle(
                lease, parts.owner, Outcome.FAILED, out.batch([end]), cost=0.0, log=out.span(1)
            )
            out.grant()
            backend.ended(asyncio.get_running_loop().time(), lease.job)
            self._moved(lease.job)
            return True
        run = Run(lease, meta, self._queue, backend, pricing, out, issued, self._leads)
        if moved:
            run.leased_at = -math.inf
        if priority:
            run.priority = engine_priority(lease.cls, lease.inflight)
        return await parts.relay.run(run, partial(self._moved, lease.job), self._settled)

    def _relayed(self, task: asyncio.Task[bool]) -> None:
        self._tasks.discard(task)
        self._parts.runs.ended.set()
        if task.cancelled():
            return
        if task.exception() is not None:
            log.error("a relay failed", exc_info=task.exception())
        elif task.result():
            self.drain.count(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Cancel them all and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
