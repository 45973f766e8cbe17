"""The clock of all open exchanges: comments that are due, deadlines that are past, clients stuck.

One loop looks at all of them, so that a request needs no timers of its own; and those whose
comment is due are asked about together.
"""

import asyncio
import logging
from collections import defaultdict
from typing import Protocol

from common.broker import Broker
from common.errors import BrokerError
from common.queue import Queue
from gateway.tickets import Ticket

log = logging.getLogger("fairlane.gateway")

TICK_S = 0.25
PLACES_MAX = 256
"""Most jobs in one snapshot."""
PLACES_S = 1.0
"""Comments go out without places where Redis takes longer than this."""


class Watched(Protocol):
    """What an exchange shows of itself."""

    ticket: Ticket
    comment_at: float
    """When its next comment is due on the loop's clock; inf: never."""

    @property
    def waits(self) -> bool:
        """Whether nothing of its answer has come."""

    def tick(self, now: float) -> None:
        """Look at its client and at its own deadlines."""

    def comment(self, place: int | None) -> None:
        """Send a comment: `place` in the queue, 0 where it does not wait, None if unknown."""

    def shut_down(self) -> None:
        """End now, as well as can be."""


class Watch:
    """All open exchanges of one gateway."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._open: set[Watched] = set()

    def add(self, exchange: Watched) -> None:
        """Look after an exchange until `remove`."""
        self._open.add(exchange)

    def remove(self, exchange: Watched) -> None:
        """It is over."""
        self._open.discard(exchange)

    def shut_down(self) -> None:
        """End all of them."""
        for exchange in list(self._open):
            exchange.shut_down()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deadlines())
            group.create_task(self._comments())

    async def _deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            for exchange in self._open:
                exchange.tick(now)

    async def _comments(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            asked: defaultdict[str, list[Watched]] = defaultdict(list)
            for exchange in self._open:
                if exchange.comment_at <= now:
                    if exchange.waits:
                        asked[exchange.ticket.model].append(exchange)
                    else:
                        exchange.comment(0)
            for model, exchanges in asked.items():
                for i in range(0, len(exchanges), PLACES_MAX):
                    await self._tell(model, exchanges[i : i + PLACES_MAX])

    async def _tell(self, model: str, exchanges: list[Watched]) -> None:
        tickets = [e.ticket for e in exchanges]
        places: list[int] | list[None] = [None] * len(tickets)
        try:
            async with asyncio.timeout(PLACES_S):
                snapshot = await Queue(self._broker, model).snapshot(
                    [(t.cls, t.user, t.job) for t in tickets]
                )
                places = snapshot.places
        except (BrokerError, TimeoutError) as e:
            log.debug("places: %s", e)
        for exchange, place in zip(exchanges, places, strict=True):
            exchange.comment(place)
