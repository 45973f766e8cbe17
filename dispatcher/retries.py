"""Runs that failed at their backend: what is noted against it, and how the run ends.

Before the first byte of an answer a run is given back, with its charge, to its place in the order;
it goes to another backend where there is one. A durable job is given back after it too: nobody has
more of its answer than its log, where another attempt begins. What broke after it was written
counts among the job's tries, so that a request that no engine survives ends; a refusal does not,
however often.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from common.jobs import Lease
from common.metrics import DispatcherMetrics
from common.outcomes import Outcome
from dispatcher.backend import Backend
from dispatcher.closing import MESSAGES, Ending
from dispatcher.runs import Run

TOO_LARGE = "The answer is larger than may be kept."


class Retries:
    """Says how failed runs end, and counts those that are tried again."""

    def __init__(self, metrics: DispatcherMetrics) -> None:
        self._metrics = metrics

    def refused(self, run: Run) -> Ending:
        """The engine did not take it, or said so."""
        run.backend.refused(_now(), run.lease.job)
        return self._again(run, "refused", counts=False)

    def broke(self, run: Run) -> Ending:
        """The connection broke after the request was written, and before the first byte."""
        run.backend.health.broke(_now(), run.lease.job, before=run.lease.tries > 0)
        return self._again(run, "broken", counts=True)

    def broke_off(self, run: Run) -> Ending:
        """An answer ended that had begun."""
        run.backend.health.failed(_now(), run.lease.job)
        if run.lease.durable:
            return self._again(run, "broken", counts=True)
        return Ending(Outcome.FAILED, MESSAGES[Outcome.FAILED])

    def stopped(self, run: Run, why: Outcome) -> Ending:
        """`Run.stop` ended it: TRIES is of a run whose backend is dead, FAILED of a begun answer
        that it will not end, or of any when this process stops."""
        if run.out.too_large:
            return Ending(Outcome.FAILED, TOO_LARGE)
        again = run.lease.durable or not run.started
        if why is Outcome.TIMEOUT and run.lease.durable:
            why = Outcome.TRIES
        if why is Outcome.TRIES and again:
            run.backend.health.failed(_now(), run.lease.job)
            return self._again(run, "silent", counts=True)
        if why is Outcome.FAILED and again:
            return self._again(run, "stopping", counts=False)
        if why is Outcome.TIMEOUT:
            run.backend.health.failed(_now(), run.lease.job)
        outcome = Outcome.FAILED if why is Outcome.TRIES else why
        return Ending(outcome, MESSAGES.get(outcome, ""))

    def _again(self, run: Run, reason: str, *, counts: bool) -> Ending:
        self._metrics.retried(run.queue.model, reason)
        return Ending(Outcome.TRIES, requeue=True, counts=counts)


def elsewhere(
    leases: Sequence[Lease],
    backends: Mapping[str, Backend],
    spare: Callable[[str], Mapping[str, int]],
) -> list[Lease]:
    """Popped jobs, each with a backend where it has not failed before, if one has room or another
    of these jobs can change places with it. Otherwise it stays: one backend may be all there is.

    `spare`: of a class, how many jobs each backend has room for besides these.
    """
    placed = list(leases)
    for i, lease in enumerate(placed):
        if backends[lease.backend].health.failed_here(lease.job):
            _move(placed, i, backends, spare)
    return placed


def _move(
    placed: list[Lease],
    i: int,
    backends: Mapping[str, Backend],
    spare: Callable[[str], Mapping[str, int]],
) -> None:
    lease = placed[i]
    taken = Counter(p.backend for p in placed)
    for url, room in spare(lease.cls).items():
        if room > taken[url] and not backends[url].health.failed_here(lease.job):
            placed[i] = msgspec.structs.replace(lease, backend=url)
            return
    for j, other in enumerate(placed):
        if not (
            backends[other.backend].health.failed_here(lease.job)
            or backends[lease.backend].health.failed_here(other.job)
        ):
            placed[i] = msgspec.structs.replace(lease, backend=other.backend)
            placed[j] = msgspec.structs.replace(other, backend=lease.backend)
            return


def _now() -> float:
    return asyncio.get_running_loop().time()
