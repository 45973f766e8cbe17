"""The back half of a request: from a job's frames to its client's bytes, over raw ASGI.

Three things may happen while an exchange waits for frames: its client leaves, a comment or a
deadline is due, the gateway shuts down. Each sets what it wants and pokes the exchange, which is
then the only one to act; so nothing is ever written from two places.
"""

import asyncio

import msgspec

from common.intake.answers import ending
from common.outcomes import Outcome
from common.wire import Data, End, Head
from gateway.client import Client
from gateway.delivery import Delivery, Step
from gateway.metrics import GatewayMetrics
from gateway.submit import Desk
from gateway.tickets import Ticket
from gateway.watch import Watch

GRACE_S = 2.0
"""Redis ends a waiting job at its deadline; this much later the gateway does it alone."""
CHECK_S = 5.0
"""A job that runs past its deadline without a byte is looked at this often."""
STUCK_S = 120.0
"""A client that takes no byte for so long is given up."""

_INF = float("inf")
_AGAIN = (Outcome.GATEWAY_DEAD, Outcome.ORPHANED)
"""Ends of a run, not of the job, as long as its client has seen nothing of it."""


class Timing(msgspec.Struct, frozen=True):
    """When an exchange does something by itself, in seconds."""

    comment_first_s: float
    """inf: no comments."""
    comment_every_s: float
    run_s: float
    """A job past its deadline may run so long without a byte."""


class Exchange:
    """One job's answer on its way to one client. `run` owns the ticket until it returns."""

    def __init__(
        self,
        client: Client,
        ticket: Ticket,
        desk: Desk,
        watch: Watch,
        metrics: GatewayMetrics,
        timing: Timing,
        dialect: str = "chat",
    ) -> None:
        self.ticket = ticket
        self.comment_at = ticket.at + timing.comment_first_s
        self._client = client
        self._desk = desk
        self._watch = watch
        self._metrics = metrics
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._delivery = Delivery(ticket.job, self._retry_s, dialect)
        self._task = asyncio.current_task()
        self._outcome = Outcome.CANCELLED
        self._job_ended = False
        self._check_at = ticket.deadline + GRACE_S
        self._sending_since = _INF
        self._stuck = False
        self._listening = False
        self._poked = False
        self._overdue = False
        self._shutting = False
        self._comment = False
        self._place: int | None = None
        self._eta_s: float | None = None

    @property
    def waits(self) -> bool:
        """Whether nothing of its answer has come."""
        return self._delivery.head is None

    def tick(self, now: float) -> None:
        """Look at its client and at its own deadlines.

        The client is watched from the first tick on: most short answers are over by then, and one
        who leaves sooner is noticed at that tick.
        """
        self._client.watch(self._poke)
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            self._overdue = True
            self._poke()
        if now - self._sending_since > STUCK_S and self._task is not None:
            self._sending_since = _INF
            self._stuck = True
            self._task.cancel()

    def comment(self, place: int | None, eta_s: float | None = None) -> None:
        """Send a comment: `place` in the queue, 0 where it does not wait, None if unknown; and the
        seconds until its turn, where known."""
        self.comment_at = self._loop.time() + self._timing.comment_every_s
        self._place, self._eta_s, self._comment = place, eta_s, True
        self._poke()

    def shut_down(self) -> None:
        """End now, as well as can be."""
        self._shutting = True
        self._poke()

    async def run(self) -> None:
        """Until the answer is sent, has failed, or nobody wants it any more. Where it returns
        with the client's answer begun and not complete, the connection must be cut."""
        self._watch.add(self)
        self._metrics.opened(self.ticket.model, self.ticket.cls)
        try:
            await self._serve()
        except asyncio.CancelledError:
            if not self._stuck or self._task is None or self._task.uncancel() > 0:
                raise
        finally:
            self._watch.remove(self)
            self._desk.close(self.ticket, cancel=not self._job_ended)
            self._metrics.ended(self.ticket.model, self.ticket.cls, self._outcome)
            await self._client.unwatch()

    def _poke(self) -> None:
        self._poked = True
        if self._listening and self._task is not None:
            self._listening = False
            self._task.cancel()

    async def _serve(self) -> None:
        while True:
            frames = await self._frames()
            if self._client.gone:
                return
            if frames:
                data = self._delivery.flow(frames)
                if data is not None:
                    await self._write(data, True)
                    self.ticket.reply.taken(len(data))
                elif await self._deliver(frames):
                    return
            elif await self._asked():
                return

    async def _asked(self) -> bool:
        """Do what the pokes ask for; whether that ended it."""
        if self._shutting:
            await self._fail(Outcome.GATEWAY_DEAD)
            return True
        if self._overdue:
            self._overdue = False
            if self.waits and await self._expired():
                await self._fail(Outcome.DEADLINE)
                return True
        if self._comment:
            self._comment = False
            step = self._delivery.comment(self._place, self._eta_s)
            if step is not None:
                await self._send(step)
        return False

    async def _frames(self) -> list[Head | Data | End]:
        """The next frames; none where something else is to be looked at.

        A poke cancels this wait as `asyncio.timeout` would, at a fraction of its cost for each
        frame; the reply keeps what came meanwhile.
        """
        if not self._poked:
            self._listening = True
            try:
                return await self.ticket.reply.next()
            except asyncio.CancelledError:
                poked = not self._listening
                if not poked or self._task is None or self._task.uncancel() > 0:
                    raise
            finally:
                self._listening = False
        self._poked = False
        return []

    async def _expired(self) -> bool:
        force = self._loop.time() > self.ticket.deadline + self._timing.run_s
        expired = await self._desk.expire(self.ticket, force=force)
        self._job_ended = expired
        return expired

    async def _deliver(self, frames: list[Head | Data | End]) -> bool:
        """Hand on what came; whether that was the end."""
        last = frames[-1]
        end = last if type(last) is End else None
        if end is not None:
            if end.outcome in _AGAIN and not self._delivery.forwarded:
                if await self._desk.resubmit(self.ticket, end.attempt):
                    self._delivery.reset()
                    self._check_at = self.ticket.deadline + GRACE_S
                    return False
            else:
                self._job_ended = True
            self._outcome = end.outcome
        now = self._loop.time()
        waited_s = now - self.ticket.at
        if self._check_at != _INF:
            self._check_at = _INF
            self._metrics.first_byte(self.ticket.model, self.ticket.cls, waited_s)
            if type(frames[0]) is Head:
                self._desk.went(self.ticket)
        step = self._delivery.take(frames, self._queue_ms())
        if step is not None:
            await self._send(step)
        return end is not None

    def _queue_ms(self) -> int:
        """How long the job waited: its attempt is numbered by the time of its `pop`, its arrival
        by that of its `enqueue`, both by the clock of Redis."""
        return max(0, (self.ticket.reply.attempt or 0) - self.ticket.arrival // 1000)

    async def _fail(self, outcome: Outcome) -> None:
        self._outcome = outcome
        await self._send(self._delivery.fail(ending(outcome, "", self._retry_s())))

    def _retry_s(self) -> int:
        return self._desk.retry_after(self.ticket.model)

    async def _send(self, step: Step) -> None:
        if step.forwards and not self.ticket.reply.forwarded:
            self._desk.forwarded(self.ticket)
        if step.status:
            self._sending_since = self._loop.time()
            await self._client.start(step.status, step.headers)
        if step.data or step.last:
            await self._write(step.data, not step.last)
        if step.taken:
            self.ticket.reply.taken(step.taken)

    async def _write(self, data: bytes, more: bool) -> None:
        self._sending_since = now = self._loop.time()
        await self._client.write(data, more)
        self._sending_since = _INF
        self.comment_at = now + self._timing.comment_every_s
