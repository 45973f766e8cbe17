"""The two hand-overs of a run that only Redis can grant: its first frames, and its end.

Both are verbs that the same pair may repeat, so both are offered until Redis answers; a run that
Redis lost is told to it again first.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from common.errors import BrokerError
from common.metrics import DispatcherMetrics
from common.outcomes import Outcome
from common.settings import DispatcherSettings
from dispatcher.dialects import error_event
from dispatcher.runs import Run, Runs

log = logging.getLogger("fairlane.closing")

T = TypeVar("T")

PERSIST_S = 600.0
"""How long the end of a run is offered to a Redis that does not answer; then its heir ends it."""

MESSAGES = {
    Outcome.TIMEOUT: "The engine did not answer in time.",
    Outcome.TRIES: "The engine failed several times before it answered.",
    Outcome.FAILED: "The engine failed while it answered.",
    Outcome.CANCELLED: "The request was cancelled.",
    Outcome.GATEWAY_DEAD: "The request was cancelled.",
    Outcome.ORPHANED: "The answer broke off: the dispatcher that carried it is gone.",
}


class Ending(msgspec.Struct, frozen=True):
    """How a run is to be ended."""

    outcome: Outcome
    message: str = ""
    requeue: bool = False
    """Give it back to the queue instead: nothing of an answer was sent."""
    counts: bool = False
    """With `requeue`: it counts among the job's tries."""
    yields: bool = False
    """With `requeue`: it made room for another job."""
    frames: tuple[bytes, ...] = ()
    """Frames that go out with the end: a whole small answer in one script."""
    told: bool = False
    """The client of a begun stream was already sent the error event."""


class Closing:
    """Starts and ends runs in Redis."""

    def __init__(
        self,
        owner: str,
        runs: Runs,
        settings: DispatcherSettings,
        metrics: DispatcherMetrics,
    ) -> None:
        self._owner = owner
        self._runs = runs
        self._settings = settings
        self._metrics = metrics

    async def start(self, run: Run, frames: list[bytes]) -> bool:
        """Publish the first frames under fencing. False: the run is over and was stopped."""
        lease, batch, log = run.lease, run.out.batch(frames), run.out.span(len(frames))
        for _ in range(2):
            word = await self._persist(
                lambda: run.queue.start(
                    lease.job,
                    self._owner,
                    lease.attempt,
                    lease.channel,
                    batch,
                    log=log,
                    ring=not run.leads(),
                )
            )
            if word == "started":
                run.started = True
                run.out.grant()
                return True
            if word != "unknown" or not await self._persist(lambda: self._runs.restore(run)):
                break
        run.stop(Outcome.CANCELLED if word == "cancelled" else Outcome.LOST)
        return False

    async def finish(self, run: Run, ending: Ending) -> None:
        try:
            if ending.outcome is Outcome.LOST:
                run.out.discard()
            elif ending.requeue:
                await self._requeue(run, ending)
            else:
                await self._settle(run, ending)
        except BrokerError as e:
            log.error("job %s is left to its heir: %s", run.lease.job, e)
            run.out.discard()

    async def _requeue(self, run: Run, ending: Ending) -> None:
        word = await self._persist(
            lambda: run.queue.requeue(
                run.lease, self._owner, count_try=ending.counts, yields=ending.yields,
                tries_max=self._settings.tries_max,
            )
        )  # fmt: skip
        self._metrics.requeued(run.queue.model, run.lease.cls)
        if ending.yields:
            self._metrics.yielded(run.queue.model)
        if word == "unknown" and await self._persist(lambda: self._runs.restore(run)):
            await self._requeue(run, ending)
        elif word == "cancelled":
            await self._settle(run, Ending(Outcome.CANCELLED, MESSAGES[Outcome.CANCELLED]))
        elif word == "tries":
            await self._settle(run, Ending(Outcome.TRIES, MESSAGES[Outcome.TRIES]))
        elif word == "started":  # its first frames went out as it was stopped
            run.started = True
            await self._settle(run, Ending(Outcome.FAILED, MESSAGES[Outcome.FAILED]))
        else:
            run.out.discard()

    async def _settle(self, run: Run, ending: Ending) -> None:
        if run.started and run.meta.stream and not ending.told:
            self._tell(run, ending)
        produced = run.started or bool(ending.frames)
        served = ending.outcome in (Outcome.FINISHED, Outcome.CANCELLED) or run.started
        usage = run.spent() if produced else None
        now = asyncio.get_running_loop().time()
        end = run.out.end(ending.outcome, ending.message, usage, now)
        await run.out.flush()
        batch = run.out.batch([*ending.frames, end])
        whole = ending.outcome is Outcome.FINISHED and run.pricing.learns(run.meta.max_output)
        learn = run.pricing.unit(run.spent(), run.seconds(now)) if whole else None
        cost = run.cost(now) if served else 0.0
        span = run.out.span(len(ending.frames) + 1)
        for _ in range(3):  # a Redis that lost the run may have lost a part of its log too
            word = await self._persist(
                lambda: run.queue.settle(
                    run.lease, self._owner, ending.outcome, batch,
                    cost=None if ending.outcome is Outcome.TIMEOUT else cost,
                    learn=learn, log=span, ring=not run.leads(),
                )
            )  # fmt: skip
            if word == "gap" and await run.out.mend():
                continue
            if word != "unknown" or not await self._persist(lambda: self._runs.restore(run)):
                break
        if word == "gap":  # a part of the answer is lost: it is to be had once more
            await self._requeue(run, Ending(Outcome.TRIES, requeue=True, counts=True))
            return
        if word == "settled":
            run.out.grant()
        else:
            run.out.discard()
        self._metrics.ended(run.queue.model, run.lease.cls, ending.outcome, run.spent(), served)

    def _tell(self, run: Run, ending: Ending) -> None:
        """One error event for a client that has seen a part of the answer."""
        if ending.outcome in (Outcome.TIMEOUT, Outcome.FAILED):
            code = str(ending.outcome)
            run.out.data(error_event(run.meta.dialect, ending.message, "server_error", code))

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a verb that may be repeated until Redis answers. Raises the last BrokerError."""
        now = asyncio.get_running_loop().time
        until = now() + PERSIST_S
        delay = 0.05
        while True:
            try:
                return await call()
            except BrokerError:
                if now() > until:
                    raise
                await asyncio.sleep(delay)
                delay = min(1.0, delay * 2)
