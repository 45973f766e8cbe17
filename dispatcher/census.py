"""What Redis says is running, against what this dispatcher knows.

Jobs that other dispatchers run count in the load of their backends, as long as their leases are
renewed: a dispatcher that died has left its engines, and must not keep its heir from popping. A job
that is said to run here and is not known here was leased by a `pop` whose reply was lost: it goes
back to its place.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence

from common.jobs import Due, Running
from common.queue import SNAPSHOT_MAX, Queue
from common.settings import DispatcherSettings
from dispatcher.backend import Backend
from dispatcher.runs import Runs

log = logging.getLogger("fairlane.census")

SILENT_RENEWALS = 1.5
"""A job whose lease was not renewed for so many periods counts no more: if its engine has it all
the same, the engine's own metrics show it as foreign load."""


class Census:
    """Reads one model's running jobs."""

    def __init__(self, queue: Queue, owner: str, runs: Runs, settings: DispatcherSettings) -> None:
        self._queue = queue
        self._owner = owner
        self._runs = runs
        self._settings = settings
        self.others: set[str] = set()
        """Jobs that other dispatchers ran at the last look and have not ended since."""

    async def take(
        self, backends: Sequence[Backend], popped: Collection[str] | None
    ) -> dict[str, int]:
        """Count what others run at these backends; returns how many jobs wait, by class.

        `popped`: jobs leased here whatever `Runs` says; strays are given back only where it is
        given. Raises BrokerError.
        """
        snapshot = await self._queue.snapshot()
        others = [r for r in snapshot.running if r.owner != self._owner]
        silent = await self._silent() if others else set()
        now = asyncio.get_running_loop().time()
        counted = [r for r in others if r.job not in silent]
        for running in counted:
            for backend in backends:
                if backend.url == running.backend:
                    backend.load.sent(now, running.job, running.cls, streams=True, mine=False)
                    if running.started:
                        backend.load.started(now, running.job)
        self.others = {r.job for r in others}
        for backend in backends:
            backend.load.keep_others(now, {r.job for r in counted})
        if popped is not None:
            for running in snapshot.running:
                known = running.job in self._runs or running.job in popped
                if running.owner == self._owner and not known:
                    await self._give_back(running)
        return snapshot.waiting

    async def _silent(self) -> set[str]:
        """Jobs whose leases nobody renews, orphans among them."""
        s = self._settings
        young = await self._queue.broker.now_ms() + s.job_lease_ms
        young -= int(s.job_renew_ms * SILENT_RENEWALS)
        jobs = await self._queue.broker.command(
            "ZRANGEBYSCORE", self._queue.keys.running, "-inf", f"({young}",
            "LIMIT", 0, SNAPSHOT_MAX,
        )  # fmt: skip
        return {job.decode() for job in jobs}

    async def _give_back(self, running: Running) -> None:
        due = Due(
            "lease", running.job, "running", running.user, running.cls, running.owner,
            running.attempt, running.started, "", "",
        )  # fmt: skip
        word = await self._queue.requeue(due, running.owner, count_try=False)
        log.warning("job %s was popped without our knowing: %s", running.job, word)
