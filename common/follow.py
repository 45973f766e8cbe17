"""A gateway's side of replies: frames in, in order and without gaps, to the client that waits.

The subscription only reads and sorts, so a slow client slows its own job alone. Sequence numbers
find what is missing inside a reply, `alive` frames what is missing at its end, and the replica's
own ping a subscription that died without a word. Once a byte of one run was forwarded to a client,
no other run is spliced in.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict

from common import keys
from common.broker import Broker, Subscriber
from common.errors import BrokerError, WireError
from common.keys import ModelKeys
from common.links import Message
from common.outcomes import Outcome
from common.queue import Queue
from common.reply import Reply
from common.wire import (
    Ack,
    Alive,
    Batch,
    Cancel,
    Control,
    Data,
    End,
    Head,
    Ping,
    decode_batch,
    encode_batch,
    encode_controls,
    encode_frame,
)

log = logging.getLogger("fairlane.follow")

ACK_S = 0.2
ACK_BYTES = 256 << 10
"""Received is told after this long or this much, whichever comes first."""
SILENCE_S = 3.0
"""A dispatcher with open jobs, or our own ping, unheard for this long: subscribe anew."""
GIVE_UP_S = 20.0
"""A dispatcher unheard for this long has an heir, or its answers are lost."""
HEARD_KEEP_S = 600.0
"""A dispatcher unheard for this long is forgotten."""
CLOSED_MAX = 10_000
"""Most jobs that are remembered after their reader left."""
STRANGERS_MAX = 1_000
"""Most unknown jobs answered with a cancel in one tick."""


class Follower:
    """The replies of one gateway replica."""

    def __init__(self, broker: Broker, replica: str, *, window: int = 1 << 20) -> None:
        self._broker = broker
        self.replica = replica
        self.window = window
        self._channel = keys.reply(replica)
        self._subscriber = Subscriber(broker, (self._channel,), self._deliver, self._subscribed)
        self.ready = self._subscriber.ready
        self._replies: dict[str, Reply] = {}
        self._heard: dict[str, float] = {}
        self._received: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self._taken: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self._controls: dict[str, list[Control]] = defaultdict(list)
        self._ended: dict[str, dict[str, None]] = defaultdict(dict)
        self._closed: dict[str, str] = {}
        """Job -> model, of those whose reader left: an end that comes now is acknowledged too."""
        self._strangers = 0
        self._bytes = 0
        self._flush = asyncio.Event()
        self._ping_sent = 0
        self._ping_heard = 0.0

    def open(self, job: str, model: str) -> Reply:
        """Follow a job; called before it is enqueued, so that no frame can come too early."""
        reply = Reply(self, job, model)
        self._replies[job] = reply
        return reply

    def __len__(self) -> int:
        return len(self._replies)

    async def run(self) -> None:
        """Subscribe, acknowledge and watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._subscriber.run())
            group.create_task(self._acknowledge())
            group.create_task(self._watch())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _deliver(self, message: Message) -> None:
        try:
            batch: Batch = decode_batch(message[1])
        except WireError as e:
            log.warning("dropped a message: %s", e)
            return
        now = self._now()
        self._heard[batch.sender] = now
        for frame in batch.frames:
            if isinstance(frame, Ping):
                self._ping_heard = now
            elif isinstance(frame, Alive):
                self._alive(batch.sender, frame, now)
            else:
                self._frame(batch.sender, frame, now)
        self._bytes += len(message[1])
        if self._bytes >= ACK_BYTES:
            self._flush.set()

    def _frame(self, sender: str, frame: Head | Data | End, now: float) -> None:
        reply = self._replies.get(frame.job)
        if reply is None:
            self._stranger(sender, frame)
            return
        reply.accept(sender, frame, now)
        if reply.attempt == frame.attempt and frame.seq >= 0:
            self._received[sender][frame.job] = (frame.attempt, reply.next_seq - 1)
        if reply.ended and isinstance(frame, End):
            self._ended[reply.model][reply.job] = None

    def _stranger(self, sender: str, frame: Head | Data | End) -> None:
        """A frame for nobody: let its dispatcher forget it, and stop it if it still runs."""
        self._received[sender][frame.job] = (frame.attempt, 1 << 53)
        if not isinstance(frame, End):
            self.stop(sender, frame.job, frame.attempt)
        elif model := self._closed.get(frame.job):
            self._ended[model][frame.job] = None

    def stop(self, sender: str, job: str, attempt: int) -> None:
        if self._strangers < STRANGERS_MAX:
            self._strangers += 1
            self.send(sender, Cancel(job, attempt))

    def _alive(self, sender: str, frame: Alive, now: float) -> None:
        for job, attempt, last in frame.jobs:
            reply = self._replies.get(job)
            if reply is None:
                self._received[sender][job] = (attempt, 1 << 53)
                self.stop(sender, job, attempt)
                continue
            if reply.attempt is None or (attempt > reply.attempt and not reply.forwarded):
                reply.pin(sender, attempt)
            if reply.attempt != attempt:
                continue
            # An acknowledgement may have been lost, and a full window would then stay full.
            self._received[sender][job] = (attempt, reply.next_seq - 1)
            self._taken[sender][job] = (attempt, reply.bytes_taken)
            if last >= reply.next_seq and not reply.ended:
                reply.ask(now)

    def _subscribed(self) -> None:
        """Ask for all that may have been published while nobody listened."""
        self._ping_heard = self._now()
        for reply in self._replies.values():
            if reply.attempt is not None and not reply.ended:
                reply.asked_at = float("-inf")
                reply.ask(self._now())

    def send(self, dispatcher: str, control: Control) -> None:
        self._controls[dispatcher].append(control)
        self._flush.set()

    def tell_taken(self, reply: Reply, taken: int) -> None:
        if reply.dispatcher is not None and reply.attempt is not None:
            self._taken[reply.dispatcher][reply.job] = (reply.attempt, taken)
            self._flush.set()

    def forget(self, reply: Reply) -> None:
        if self._replies.get(reply.job) is reply:
            del self._replies[reply.job]
            self._closed[reply.job] = reply.model
            if len(self._closed) > CLOSED_MAX:
                del self._closed[next(iter(self._closed))]
        if reply.dispatcher is not None and reply.attempt is not None:
            self._received[reply.dispatcher][reply.job] = (reply.attempt, 1 << 53)

    async def _acknowledge(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # what came in small amounts is told then
                await asyncio.wait_for(self._flush.wait(), ACK_S)
            self._flush.clear()
            self._bytes = 0
            try:
                await self._flush_all()
            except BrokerError:
                await asyncio.sleep(ACK_S)  # all of it can be said again, or is asked for anew

    async def flush(self) -> None:
        """Tell now what was received, before the replica goes. Raises BrokerError."""
        await self._flush_all()

    async def _flush_all(self) -> None:
        dispatchers = {*self._received, *self._taken, *self._controls}
        for dispatcher in dispatchers:
            received = self._received.pop(dispatcher, {})
            taken = self._taken.pop(dispatcher, {})
            controls = self._controls.pop(dispatcher, [])
            if received or taken:
                ack = Ack(
                    self.replica,
                    [(j, a, s) for j, (a, s) in received.items()],
                    [(j, a, n) for j, (a, n) in taken.items()],
                )
                controls.append(ack)
            await self._broker.publish(keys.control(dispatcher), encode_controls(controls))
        for model, ended in list(self._ended.items()):
            jobs = list(ended)  # after an error they are told again: nobody else remembers them
            await Queue(self._broker, model).ack(jobs, self.replica)
            for job in jobs:
                ended.pop(job, None)
            if not ended:
                self._ended.pop(model, None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._strangers = 0
            now = self._now()
            self._heard = {d: t for d, t in self._heard.items() if now - t < HEARD_KEEP_S}
            if self._broker.up.is_set() and self.ready.is_set():
                await self._ping()
                if now - self._ping_heard > SILENCE_S:
                    log.warning("the subscription is silent: subscribing anew")
                    self._subscriber.drop()
            await self._silent(now)

    async def _ping(self) -> None:
        self._ping_sent += 1
        ping = encode_batch(self.replica, [encode_frame(Ping(self._ping_sent))])
        try:
            await self._broker.publish(self._channel, ping)
        except BrokerError as e:
            log.debug("ping: %s", e)

    async def _silent(self, now: float) -> None:
        """Look after the replies whose dispatcher is not heard any more."""
        for reply in list(self._replies.values()):
            if reply.dispatcher is None or reply.ended:
                continue
            silence = now - self._heard.get(reply.dispatcher, now)
            if silence > GIVE_UP_S:
                await self._decide(reply)
            elif silence > SILENCE_S and silence % SILENCE_S < 1.0:
                reply.ask(now)

    async def _decide(self, reply: Reply) -> None:
        """Its dispatcher is gone: the record tells how it ended, if it did."""
        record = ModelKeys(reply.model).record(reply.job)
        try:
            state, outcome = await self._broker.command("HMGET", record, "state", "outcome")
        except BrokerError:
            state = outcome = None
        if state in (b"done", b"orphaned", None):
            lost = Outcome.ORPHANED if outcome == b"orphaned" else Outcome.LOST
            reply.lose(lost, "the connection to the engine was lost")
            if state is not None:
                self._ended[reply.model][reply.job] = None
