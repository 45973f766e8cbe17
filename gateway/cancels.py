"""Jobs that must be stopped: told to Redis at once, or as soon as it answers again."""

import asyncio
import logging

from common.broker import Broker
from common.errors import BrokerError
from common.intake.queues import Queues
from common.outcomes import Outcome
from gateway.tickets import Ticket

log = logging.getLogger("fairlane.gateway")

OPEN_MAX = 10_000
"""Most cancels kept; frames of a job that nobody follows make the follower cancel it too."""
KEEP_S = 120.0
"""One that Redis does not take is given up after this."""
CALLS_MAX = 64
"""Most outstanding at once."""
AGAIN_S = 0.5


class Cancels:
    """The cancels of one gateway replica. `run` owns what `give` was given."""

    def __init__(self, broker: Broker, queues: Queues, replica: str) -> None:
        self._broker = broker
        self._queues = queues
        self._replica = replica
        self._open: dict[str, tuple[Ticket, float]] = {}
        self._bell = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def give(self, ticket: Ticket) -> None:
        """Stop a job, without waiting for it."""
        if len(self._open) < OPEN_MAX:
            self._open[ticket.job] = (ticket, asyncio.get_running_loop().time())
            self._bell.set()
            self._idle.clear()

    async def now(self, ticket: Ticket, reason: Outcome, *, due: bool = False) -> str:
        """Take a job out of its queue, or have its dispatcher stop it; the verb's word.

        `due`: only where it waits and its deadline is past. Raises BrokerError.
        """
        return await self._queues.of(ticket.model).stop(
            ticket.job, ticket.cls, ticket.user, self._replica, reason, due=due
        )

    async def run(self) -> None:
        """Cancel what is given, until cancelled itself."""
        while True:
            await self._bell.wait()
            self._bell.clear()
            await self._broker.up.wait()
            batch = list(self._open.values())[:CALLS_MAX]
            done = await asyncio.gather(*(self._one(*item) for item in batch))
            for (ticket, _), is_done in zip(batch, done, strict=True):
                if is_done:
                    del self._open[ticket.job]
            if self._open:
                self._bell.set()
            else:
                self._idle.set()
            if not all(done):
                await asyncio.sleep(AGAIN_S)

    async def flush(self) -> None:
        """Until none is outstanding."""
        await self._idle.wait()

    async def _one(self, ticket: Ticket, since: float) -> bool:
        try:
            await self.now(ticket, Outcome.CANCELLED)
        except BrokerError as e:
            late = asyncio.get_running_loop().time() - since > KEEP_S
            if late:
                log.warning("gave up cancelling %s: %s", ticket.job, e)
            return late
        return True
