"""Looks at the runs of one model's backends for engines that are dead though nothing says so.

An engine may hang behind a server that answers; a server may close its port and leave the
connections of its streams open for ever (vLLM at SIGTERM). Runs there would wait for the limits of
`first_byte_s` and `silence_s`, which are made for slow engines, not for dead ones.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from common.metrics import DispatcherMetrics
from common.outcomes import Outcome
from dispatcher.backend import Backend
from dispatcher.health import HEARD_S
from dispatcher.runs import Run, Runs

log = logging.getLogger("fairlane.watchdog")

WATCH_S = 0.5
GIVEN_UP_S = 30.0
"""A backend that is out of use for its silence may have a run so long without its first byte,
where another backend could have it."""
GONE_S = 10.0
"""A run whose backend's port is gone, or whose engine began anew, may be silent for so long."""


class Watchdog:
    """Of one model in one dispatcher process, whoever leads. `backends` may grow meanwhile."""

    def __init__(
        self, model: str, backends: Sequence[Backend], runs: Runs, metrics: DispatcherMetrics
    ) -> None:
        self._model = model
        self._backends = backends
        self._runs = runs
        self._metrics = metrics

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_S)
            self.round(loop.time())

    def round(self, now: float) -> None:
        """One look."""
        for backend in self._backends:
            busy = backend.load.counts(now).inflight
            if busy and now - backend.health.heard_at >= HEARD_S:
                runs = [r for r in self._runs if r.backend is backend and r.read_until < math.inf]
                self._stall(now, backend, runs)
                for run in runs:
                    self._look(now, backend, run)
            state = backend.health.breaker.state(now)
            self._metrics.backend_state(self._model, backend.url, state)

    def _stall(self, now: float, backend: Backend, runs: list[Run]) -> None:
        """Take a backend out of use whose engine does nothing with what it has."""
        if backend.health.breaker.state(now) != "closed" or not runs:
            return
        since = min(run.sent_at for run in runs)
        if backend.stalled(now, since, streams=any(run.meta.stream for run in runs)):
            log.warning("backend %s: no token for long with %d jobs", backend.url, len(runs))
            backend.health.breaker.trip(now, silent=True)

    def _look(self, now: float, backend: Backend, run: Run) -> None:
        """End a run that waits for what will not come."""
        health, silent_s = backend.health, now - max(run.heard_at, run.sent_at)
        gone = health.reachable is False or run.sent_at < health.restarted_at
        if gone and silent_s >= GONE_S:
            log.warning("job %s: backend %s is gone", run.lease.job, backend.url)
            run.stop(Outcome.FAILED if run.started else Outcome.TRIES)
        elif (
            health.breaker.silent and not run.started and silent_s >= GIVEN_UP_S
            and any(b is not backend and b.usable(now) for b in self._backends)
        ):  # fmt: skip
            run.stop(Outcome.TRIES)
