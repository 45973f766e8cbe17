"""The clock of all open exchanges: comments that are due, deadlines that are past, clients stuck.

One loop looks at all of them, so that a request needs no timers of its own; and those whose
comment is due are asked about together. Another follows one job of each lane, to see how fast
places fall.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from common.errors import BrokerError
from common.intake.models import Models
from common.intake.queues import Queues
from gateway.eta import Eta
from gateway.tickets import Ticket

log = logging.getLogger("fairlane.gateway")

TICK_S = 0.25
PLACES_MAX = 256
"""Most jobs in one snapshot."""
PLACES_S = 1.0
"""Comments go out without places where Redis takes longer than this."""
LOOK_S = 2.0
"""Places are looked at so often, of jobs that have waited so long."""
FOLLOWED_MAX = 32
"""Most lanes of one model of which a job is followed."""


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

    def comment(self, place: int | None, eta_s: float | None = None) -> None:
        """Send a comment: `place` in the queue, 0 where it does not wait, None if unknown; and the
        seconds until its turn, where known."""

    def shut_down(self) -> None:
        """End now, as well as can be."""


class Watch:
    """All open exchanges of one gateway."""

    def __init__(self, queues: Queues, models: Models, eta: Eta) -> None:
        self._queues = queues
        self._models = models
        self._eta = eta
        self._open: set[Watched] = set()
        self._followed: set[Watched] = set()
        self._went: set[Watched] = set()
        """Those seen to wait no more, though nothing of their answer has come."""

    def add(self, exchange: Watched) -> None:
        """Look after an exchange until `remove`."""
        self._open.add(exchange)

    def remove(self, exchange: Watched) -> None:
        """It is over."""
        for kept in (self._open, self._followed, self._went):
            kept.discard(exchange)
        self._eta.forget(exchange.ticket.job)

    def shut_down(self) -> None:
        """End all of them."""
        for exchange in list(self._open):
            exchange.shut_down()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._deadlines())
            group.create_task(self._comments())
            group.create_task(self._looks())

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
        places = await self._places(model, exchanges)
        now, drain = asyncio.get_running_loop().time(), self._models.drain(model)
        for exchange, place in zip(exchanges, places, strict=True):
            t, eta_s = exchange.ticket, None
            if place:
                eta_s = self._eta.seconds(model, t.cls, t.user, place, drain, now)
            exchange.comment(place, eta_s)

    async def _looks(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            for model, exchanges in self._to_follow(loop.time()).items():
                await self._places(model, exchanges)

    def _to_follow(self, now: float) -> dict[str, list[Watched]]:
        """One exchange of each lane that waits, by model: the same as before, while it waits; a new
        one is the newest, which waits the longest."""
        lanes: dict[tuple[str, str, str], Watched] = {}
        for e in self._open:
            t = e.ticket
            if now - t.at < LOOK_S or not e.waits or e in self._went:
                continue
            old = lanes.setdefault((t.model, t.cls, t.user), e)
            if old not in self._followed and (e in self._followed or t.at > old.ticket.at):
                lanes[t.model, t.cls, t.user] = e
        found: defaultdict[str, list[Watched]] = defaultdict(list)
        for e in sorted(lanes.values(), key=lambda e: e not in self._followed):
            if len(found[e.ticket.model]) < FOLLOWED_MAX:
                found[e.ticket.model].append(e)
        self._followed = {e for exchanges in found.values() for e in exchanges}
        return found

    async def _places(self, model: str, exchanges: list[Watched]) -> Sequence[int] | Sequence[None]:
        """Of jobs of one model, where Redis says so in time; the estimator sees them too."""
        tickets = [e.ticket for e in exchanges]
        asked = [(t.cls, t.user, t.job) for t in tickets]
        try:
            async with asyncio.timeout(PLACES_S):
                places = (await self._queues.of(model).snapshot(asked, runs=False)).places
        except (BrokerError, TimeoutError) as e:
            log.debug("places: %s", e)
            return [None] * len(tickets)
        now = asyncio.get_running_loop().time()
        for exchange, t, place in zip(exchanges, tickets, places, strict=True):
            if exchange in self._open:
                self._eta.look(model, t.cls, t.user, t.job, place, now)
                if not place:
                    self._went.add(exchange)
        return places
