"""The front half of a request: into the queue, and back into it when Redis lost it.

Ownership: `submit` returns a ticket, whose holder must `close` it. Until the job's answer begins to
be handed on its body is kept here too, so that a Redis which lost the job can be told again.
"""

import asyncio
import logging

import msgspec

from common.broker import Broker
from common.errors import BrokerDown, BrokerError, BrokerUncertain
from common.follow import Follower
from common.intake.answers import Refusal, ending, whole_retry_s
from common.intake.models import Models
from common.intake.queues import Queues
from common.jobs import Enqueued, Limits, NewJob
from common.outcomes import Outcome
from common.settings import GatewaySettings
from gateway.cancels import CALLS_MAX, Cancels
from gateway.eta import Eta
from gateway.metrics import GatewayMetrics
from gateway.tickets import Ticket

log = logging.getLogger("fairlane.gateway")

ENQUEUE_TRIES = 3
ENQUEUE_S = 2.0
"""An enqueue that may or may not have run is repeated so often, and for so long."""
LARGE_BYTES = 1 << 20
"""Bodies above this go to Redis one at a time: all share one connection, on which a few large ones
would keep every other command waiting past its time."""
LARGE_S = 10.0
"""A large body waits so long for those before it."""
AGAIN_S = 0.05
ASSERT_AGAIN_S = 0.5
SUBSCRIBED_S = 1.0
"""A new job waits so long for the subscription to stand."""
RESUBMITS_MAX = 2
"""A job whose answer was lost before its client saw any of it is queued again so often."""
VERB_S = 2.5
"""Longer than Redis may take for a command before its connection is given up."""
UNKNOWN_AHEAD = 5
"""Jobs taken to be ahead, for Retry-After, where the service is not available."""

_REFUSED = {"full_user": Outcome.REJECTED_USER, "full_model": Outcome.REJECTED_MODEL}


class Desk:
    """All open jobs of one gateway replica."""

    def __init__(
        self,
        broker: Broker,
        follower: Follower,
        models: Models,
        queues: Queues,
        eta: Eta,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
    ) -> None:
        self._broker = broker
        self._follower = follower
        self._models = models
        self.queues = queues
        self._eta = eta
        self._settings = settings
        metrics.bodies(lambda: self._bodies)
        self._open: dict[str, Ticket] = {}
        self._bodies = 0
        self._large = asyncio.Lock()
        self._epoch = broker.epoch_event()
        self.cancels = Cancels(broker, queues, follower.replica)

    @property
    def replica(self) -> str:
        """Our id."""
        return self._follower.replica

    def __len__(self) -> int:
        return len(self._open)

    async def submit(self, new: NewJob, model: str, limits: Limits) -> Ticket:
        """Queue a job. The caller then owns the ticket. Raises Refusal (429 or 503), after which
        nobody owns anything."""
        if self._bodies + len(new.body) > self._settings.bodies_max_bytes:
            raise self._refused(Outcome.REJECTED_UNAVAILABLE, model)
        if not self._follower.ready.is_set():
            await self._subscribed(model)
        now = asyncio.get_running_loop().time()
        ticket = Ticket(new, limits, self._follower.open(new.id, model), now)
        self._open[new.id] = ticket
        self._bodies += len(new.body)
        uncertain = True  # also where this very task is cancelled in between
        try:
            if len(new.body) > LARGE_BYTES:
                answer, uncertain = await self._enqueue_large(ticket)
            else:
                answer, uncertain = await self._enqueue(ticket)
        finally:
            if uncertain:
                self.close(ticket, cancel=True)
        if answer is not None and answer.word in ("queued", "known"):
            ticket.accepted, ticket.arrival = True, answer.arrival
            return ticket
        self.close(ticket, cancel=False)
        word = answer.word if answer is not None else ""
        raise self.refused(word, model, ticket.cls, ticket.user, limits)

    def refused(self, word: str, model: str, cls: str, user: str, limits: Limits) -> Refusal:
        """What a user (its path) gets whose job the queue did not take; `word` is the verb's, none
        where Redis did not say."""
        outcome = _REFUSED.get(word, Outcome.REJECTED_UNAVAILABLE)
        if outcome is Outcome.REJECTED_USER:
            after_s = self._user_retry_after(model, cls, user, limits)
            return Refusal(ending(outcome, "", after_s))
        ahead = limits.model_jobs if outcome is Outcome.REJECTED_MODEL else UNKNOWN_AHEAD
        return self._refused(outcome, model, ahead)

    async def resubmit(self, ticket: Ticket, attempt: int) -> bool:
        """Queue a job again whose run is over and of which its client has seen nothing, at its old
        place; `attempt` is the highest seen. False where that cannot be."""
        new = ticket.new
        if new is None or ticket.closed or ticket.resubmits >= RESUBMITS_MAX:
            return False
        ticket.resubmits += 1
        ticket.floor = max(ticket.floor, attempt + 1)
        ticket.reply.close()
        ticket.reply = self._follower.open(new.id, ticket.model)
        ticket.reply.attempt = ticket.floor  # an older run's frames are none of this one's
        try:
            async with asyncio.timeout(VERB_S):
                await self.queues.of(ticket.model).ack([new.id], self.replica)
                answer = await self._again(ticket, new)
        except (BrokerError, TimeoutError):
            return False
        # Otherwise known, it ended in between, and its end is not to be waited for.
        return answer.word == "queued" or answer.state in ("waiting", "running")

    def forwarded(self, ticket: Ticket) -> None:
        """The answer begins to be handed on: no other run will do now, and the body may go."""
        ticket.reply.forwarded = True
        self._drop_body(ticket)

    def went(self, ticket: Ticket) -> None:
        """Its answer has begun, so it has left its lane."""
        now = asyncio.get_running_loop().time()
        self._eta.went(ticket.model, ticket.cls, ticket.user, now)

    def close(self, ticket: Ticket, *, cancel: bool) -> None:
        """The holder is done with it; `cancel`: the job is not, and must be stopped."""
        if ticket.closed:
            return
        ticket.closed = True
        self._drop_body(ticket)
        self._open.pop(ticket.job, None)
        ticket.reply.close()
        if cancel:
            self.cancels.give(ticket)

    async def expire(self, ticket: Ticket, *, force: bool) -> bool:
        """Whether a job past its deadline is out of the queue now: False where it runs.

        `force` stops it even then. Where Redis does not answer it counts as out, and is cancelled
        as soon as Redis does.
        """
        try:
            async with asyncio.timeout(VERB_S):
                word = await self.cancels.now(ticket, Outcome.DEADLINE, due=not force)
        except (BrokerError, TimeoutError):
            self.close(ticket, cancel=True)
            return True
        return word != "early"

    def retry_after(self, model: str, ahead: int = UNKNOWN_AHEAD) -> int:
        """Seconds for Retry-After where about `ahead` jobs come first."""
        return self._models.retry_after(model, ahead)

    def reassert(self) -> None:
        """Redis may have lost our jobs, or taken us for dead: tell it of all that wait."""
        self._epoch.set()

    async def run(self) -> None:
        """Cancel what was given up, and tell a new Redis connection what waits; until
        cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cancels.run())
            group.create_task(self._asserting())

    async def _subscribed(self, model: str) -> None:
        try:
            async with asyncio.timeout(SUBSCRIBED_S):
                await self._follower.ready.wait()
        except TimeoutError:
            raise self._refused(Outcome.REJECTED_UNAVAILABLE, model) from None

    async def _enqueue_large(self, ticket: Ticket) -> tuple[Enqueued | None, bool]:
        try:
            async with asyncio.timeout(LARGE_S):
                await self._large.acquire()
        except TimeoutError:
            return None, False
        try:
            return await self._enqueue(ticket)
        finally:
            self._large.release()

    async def _enqueue(self, ticket: Ticket) -> tuple[Enqueued | None, bool]:
        """(what Redis said, whether the job may be queued although it did not say so)."""
        assert ticket.new is not None
        queue = self.queues.of(ticket.model)
        end = asyncio.get_running_loop().time() + ENQUEUE_S
        uncertain = False
        for _ in range(ENQUEUE_TRIES):
            try:
                return await queue.enqueue(ticket.new, ticket.limits), False
            except BrokerUncertain:
                uncertain = True
            except BrokerDown:
                if not uncertain:
                    return None, False
            except BrokerError as e:
                log.warning("enqueue: %s", e)
                return None, uncertain
            if not await self._broker.back(AGAIN_S, end):
                break
        return None, uncertain

    async def _again(self, ticket: Ticket, new: NewJob) -> Enqueued:
        """Enqueue under the old id, number and floor, for the time that is left."""
        left = ticket.deadline - asyncio.get_running_loop().time()
        again = msgspec.structs.replace(
            new, arrival=ticket.arrival, floor=ticket.floor, wait_ms=max(1, int(left * 1000))
        )
        return await self.queues.of(ticket.model).enqueue(again, ticket.limits)

    async def _asserting(self) -> None:
        while True:
            await self._epoch.wait()
            self._epoch.clear()
            waiting = [t for t in self._open.values() if t.accepted and not t.heard]
            waiting.sort(key=lambda t: t.arrival)
            done = True
            for i in range(0, len(waiting), CALLS_MAX):
                chunk = waiting[i : i + CALLS_MAX]
                done = all(await asyncio.gather(*map(self._assert_one, chunk))) and done
            if not done:
                await asyncio.sleep(ASSERT_AGAIN_S)
                self._epoch.set()

    async def _assert_one(self, ticket: Ticket) -> bool:
        new = ticket.new
        if ticket.closed or ticket.heard or new is None:
            return True
        try:
            answer = await self._again(ticket, new)
        except BrokerError:
            return False
        if answer.word not in ("queued", "known"):
            ticket.reply.lose(_REFUSED.get(answer.word, Outcome.REJECTED_UNAVAILABLE), "")
        return True

    def _user_retry_after(self, model: str, cls: str, user: str, limits: Limits) -> int:
        """Until one more job of the user fits in: one leaves its lane, as fast as they did; where
        none was seen to, all that may wait have gone, as fast as the model's do."""
        now = asyncio.get_running_loop().time()
        leaves_s = self._eta.next_leaves_s(model, cls, user, now)
        if leaves_s is None:
            return self.retry_after(model, limits.user_jobs)
        return whole_retry_s(leaves_s)

    def _refused(self, outcome: Outcome, model: str, ahead: int = UNKNOWN_AHEAD) -> Refusal:
        return Refusal(ending(outcome, "", self.retry_after(model, ahead)))

    def _drop_body(self, ticket: Ticket) -> None:
        if ticket.new is not None:
            self._bodies -= len(ticket.new.body)
            ticket.new = None
