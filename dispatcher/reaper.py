"""The leader as heir: ends or gives back what nobody owns any more.

`reap` names what is due; each thing is then ended by a verb that checks again, so a leader that was
slow, or two that overlap, do no harm.
"""

import logging
from collections.abc import Awaitable, Callable

from common import keys
from common.broker import Broker
from common.jobs import Due
from common.keys import GROUPS
from common.outcomes import Outcome
from common.queue import Queue
from common.settings import DispatcherSettings
from common.wire import End, encode_batch, encode_frame
from dispatcher.closing import MESSAGES

log = logging.getLogger("fairlane.reaper")

DEAD_MAX = 100
"""Most dead gateway replicas looked after at once."""
SWEPT_MAX = 1_000
"""Most sweeps of counters under way; keys beyond are swept when they are seen again."""
DEADLINE_MESSAGE = "The request waited longer than its class may wait."


class Reaper:
    """Looks after one model's queue while this process leads it."""

    def __init__(
        self, broker: Broker, queue: Queue, owner: str, settings: DispatcherSettings
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._owner = owner
        self._settings = settings
        groups = [group for group, _ in GROUPS[queue.keys.policy]]
        self._cursors = {(group, ""): "0" for group in groups}
        """(group, key whose sub-users' counters are swept) -> where the sweep goes on; each look
        takes the first of them and puts it last."""

    async def round(self, term: int) -> int:
        """One look. How many things were due. Raises BrokerError."""
        dead = await self._dead_gateways()
        group, key = swept = next(iter(self._cursors))
        cursor = self._cursors.pop(swept)
        self._cursors[swept] = cursor
        reaped = await self._queue.reap(
            self._owner, term, dead, group, key, cursor, lease_ms=self._settings.job_lease_ms
        )
        if reaped is None:
            return 0
        due, cursor = reaped
        if key and cursor == "0":
            del self._cursors[swept]  # until a sub-user of it is seen again
        else:
            self._cursors[swept] = cursor
        for thing in due:
            await self._end(thing)
        return len(due)

    def saw(self, cls: str, user: str) -> None:
        """A job of this user (its path) was popped: the counters beside its own are to be swept."""
        key = keys.parent(user)
        if key and len(self._cursors) < SWEPT_MAX:
            self._cursors.setdefault((self._queue.keys.classes[cls].group, key), "0")

    async def _dead_gateways(self) -> list[str]:
        now = await self._broker.now_ms()
        silent = await self._broker.command(
            "ZRANGEBYSCORE", keys.GATEWAYS, "-inf", now - self._settings.dead_after_ms,
            "LIMIT", 0, DEAD_MAX,
        )  # fmt: skip
        return [r.decode() for r in silent]

    async def _end(self, due: Due) -> None:
        kinds: dict[str, Callable[[Due], Awaitable[None]]] = {
            "deadline": self._deadline,
            "lease": self._lease,
            "gateway": self._gateway,
        }
        if due.state:
            await kinds[due.why](due)
        else:
            await self._forget(due)

    async def _forget(self, due: Due) -> None:
        """An entry whose record is gone."""
        k = self._queue.keys
        await self._broker.command("ZREM", k.running, due.job)
        await self._broker.command("ZREM", k.deadlines, due.job)

    def _frames(self, due: Due, outcome: Outcome, message: str) -> bytes:
        end = End(due.job, due.attempt, -1, outcome, message, None)
        return encode_batch(self._owner, [encode_frame(end)])

    async def _deadline(self, due: Due) -> None:
        frames = self._frames(due, Outcome.DEADLINE, DEADLINE_MESSAGE)
        await self._queue.cancel(
            due.job, due.cls, due.user, due.replica, Outcome.DEADLINE, due=True, frames=frames
        )

    async def _lease(self, due: Due) -> None:
        """Its dispatcher is gone: not started or durable it goes back, else its client is told."""
        word = "started"
        if due.state == "running" and (due.durable or not due.started):
            word = await self._queue.requeue(
                due, due.owner, heir=True, count_try=True, tries_max=self._settings.tries_max
            )
        outcome = {
            "started": Outcome.ORPHANED,
            "tries": Outcome.TRIES,
            "cancelled": Outcome.CANCELLED,
        }.get(word)
        if outcome is not None:
            frames = self._frames(due, outcome, MESSAGES[outcome])
            await self._queue.settle(due, due.owner, outcome, frames, heir=True)
        log.info("job %s lost its dispatcher: %s", due.job, word)

    async def _gateway(self, due: Due) -> None:
        """Nobody is left to hand the answer to."""
        await self._queue.stop(due.job, due.cls, due.user, due.replica, Outcome.GATEWAY_DEAD)
