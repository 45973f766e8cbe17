"""A dispatcher's side of replies: frames out, windows, copies kept until they are received.

Pub/sub has no flow control and loses what nobody hears, so both are made here. Each replica has an
outbox with one PUBLISH outstanding: frames gather meanwhile, so nothing waits when idle and
batches grow under load. A frame is kept until its gateway says that it has it, also after the end,
so that it can be sent again; and no more is sent than the windows allow.
"""

import asyncio
import logging
from collections import deque

from common.broker import Broker
from common.errors import BrokerError
from common.outcomes import Outcome
from common.wire import (
    Ack,
    Alive,
    End,
    Frame,
    Head,
    Resend,
    Usage,
    cut,
    encode_batch,
    encode_frame,
)

log = logging.getLogger("fairlane.publish")

REPLICA_WINDOW = 4 << 20
"""Bytes one replica may not have acknowledged as received."""
JOB_WINDOW = 1 << 20
"""Bytes one job's client may not have taken; the gateway's buffer for it."""
BATCH_BYTES_MAX = 1 << 20
"""The most that one PUBLISH carries (one frame may exceed it)."""
ENDED_KEEP_S = 600.0
"""An ended run whose replica never acknowledges it is forgotten after this."""
RUNS_MAX = 20_000
"""Most runs, ended ones included, that are kept; the oldest ended ones go first."""


class Outbox:
    """What is on its way to one replica."""

    def __init__(self, broker: Broker, sender: str, channel: str) -> None:
        self._broker = broker
        self._sender = sender
        self._channel = channel
        self._pending: list[bytes] = []
        self._pump: asyncio.Task[None] | None = None
        self.unreceived = 0
        self.runs: dict[str, Outgoing] = {}

    def put(self, frame: bytes) -> None:
        """Send a frame: now if nothing is outstanding, else with the next batch."""
        self._pending.append(frame)
        if self._pump is None:
            self._pump = asyncio.ensure_future(self._run())
            self._pump.add_done_callback(self._pumped)

    def _pumped(self, task: asyncio.Task[None]) -> None:
        self._pump = None
        if not task.cancelled() and task.exception() is not None:
            log.error("publishing failed", exc_info=task.exception())

    async def _run(self) -> None:
        while self._pending:
            try:
                await self._broker.publish(self._channel, self._take())
            except BrokerError:
                # The copies are kept: the gateway finds the gap and asks for them again.
                self._pending.clear()

    def _take(self) -> bytes:
        size, n = 0, 0
        for frame in self._pending:
            if n and size + len(frame) > BATCH_BYTES_MAX:
                break
            size += len(frame)
            n += 1
        batch, self._pending = self._pending[:n], self._pending[n:]
        return encode_batch(self._sender, batch)

    async def push(self) -> None:
        """Send what is pending without waiting for the outstanding PUBLISH, in order."""
        while self._pending:
            try:
                await self._broker.publish(self._channel, self._take())
            except BrokerError:
                self._pending.clear()

    def wake(self) -> None:
        """Let the runs go on whose windows have room again."""
        for run in self.runs.values():
            run.wake()

    async def close(self) -> None:
        """Stop sending."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)


class Outgoing:
    """The reply of one run."""

    def __init__(self, box: Outbox, sender: str, job: str, attempt: int) -> None:
        self._box = box
        self._sender = sender
        self.job = job
        self.attempt = attempt
        self.seq = 0
        """Number of the next frame."""
        self.granted = 0
        """Frames below this number may be sent: what only a script may publish waits for it."""
        self.kept: deque[tuple[int, bytes]] = deque()
        self.sent = 0
        """Bytes of data since the start."""
        self.taken = 0
        self.too_large = False
        """Never: nothing of it is kept beyond its windows."""
        self.ended_at: float | None = None
        self._waiter: asyncio.Future[None] | None = None

    def _keep(self, frame: Frame) -> bytes:
        encoded = encode_frame(frame)
        self.kept.append((self.seq, encoded))
        self._box.unreceived += len(encoded)
        self.seq += 1
        return encoded

    def _cut(self, data: bytes) -> list[bytes]:
        self.sent += len(data)
        return [self._keep(f) for f in cut(self.job, self.attempt, self.seq, data)]

    def first(
        self, status: int, headers: list[tuple[str, str]], stream: bool, data: bytes
    ) -> list[bytes]:
        """The frames of the head and the first data, for `start` (or for `settle`, when all fits):
        only a script that checks the run may publish them."""
        head = Head(self.job, self.attempt, self.seq, status, headers, stream)
        return [self._keep(head), *self._cut(data)]

    def data(self, data: bytes) -> bool:
        """Send whole events, or a piece of a body. Call `room` before making more. True."""
        frames = self._cut(data)
        self.grant()
        for frame in frames:
            self._box.put(frame)
        return True

    def grant(self) -> None:
        """A script has published all frames there are: they may be sent again."""
        self.granted = self.seq

    def end(self, outcome: Outcome, message: str, usage: Usage | None, now: float) -> bytes:
        """The end frame, for `settle`. Nothing may follow it."""
        self.ended_at = now
        return self._keep(End(self.job, self.attempt, self.seq, outcome, message, usage))

    def batch(self, frames: list[bytes]) -> bytes:
        """Frames as a message that a script publishes."""
        return encode_batch(self._sender, frames)

    def span(self, frames: int) -> None:
        """They go to a gateway: there is no log that they have numbers in."""

    async def mend(self) -> bool:
        """There is no log to fill up."""
        return False

    def discard(self) -> None:
        """The run ends without a word (lost, requeued): nothing of it is sent again."""
        if self._box.runs.get(self.job) is self:
            del self._box.runs[self.job]
        self.received(self.seq)
        self.ended_at = self.ended_at or 0.0

    async def flush(self) -> None:
        """Until all data of this run is on its way, so that an end cannot overtake it."""
        await self._box.push()

    def full(self) -> bool:
        """Whether a window is full."""
        return self.sent - self.taken >= JOB_WINDOW or self._box.unreceived >= REPLICA_WINDOW

    async def room(self) -> None:
        """Until both windows have room."""
        while self.full():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        """Let `room` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def received(self, seq: int) -> None:
        """Frames up to this one need not be kept."""
        while self.kept and self.kept[0][0] <= seq:
            self._box.unreceived -= len(self.kept.popleft()[1])

    def again(self, seq: int) -> None:
        """Send the frames from `seq` on again; if they are gone, say so: never a silent gap."""
        first = self.kept[0][0] if self.kept else self.seq
        if seq < first:
            lost = End(
                self.job, self.attempt, -1, Outcome.LOST, "part of the answer was lost", None
            )
            self._box.put(encode_frame(lost))
            return
        for number, frame in self.kept:
            if seq <= number < self.granted:
                self._box.put(frame)


class Publisher:
    """All replies of one dispatcher process."""

    def __init__(self, broker: Broker, sender: str) -> None:
        self._broker = broker
        self._sender = sender
        self._boxes: dict[str, Outbox] = {}

    def open(self, job: str, attempt: int, replica: str, channel: str) -> Outgoing:
        """The reply of a new run."""
        box = self._boxes.get(replica)
        if box is None:
            box = self._boxes[replica] = Outbox(self._broker, self._sender, channel)
        run = Outgoing(box, self._sender, job, attempt)
        box.runs[job] = run
        return run

    def acknowledge(self, ack: Ack) -> None:
        """Drop what a replica has; open the windows its clients have emptied."""
        box = self._boxes.get(ack.replica)
        if box is None:
            return
        for job, attempt, seq in ack.received:
            run = box.runs.get(job)
            if run is not None and run.attempt == attempt:
                run.received(seq)
                if run.ended_at is not None and not run.kept:
                    del box.runs[job]
        for job, attempt, taken in ack.taken:
            run = box.runs.get(job)
            if run is not None and run.attempt == attempt:
                run.taken = max(run.taken, taken)
        box.wake()

    def resend(self, request: Resend) -> None:
        """A replica misses frames."""
        box = self._boxes.get(request.replica)
        run = box.runs.get(request.job) if box is not None else None
        if box is None or run is None or run.attempt != request.attempt:
            if box is not None:
                text = "part of the answer was lost"
                gone = End(request.job, request.attempt, -1, Outcome.LOST, text, None)
                box.put(encode_frame(gone))
            return
        run.again(request.seq)

    def alive(self, now: float) -> None:
        """Tell each replica what runs for it; forget what nobody will ever ask for."""
        for replica, box in list(self._boxes.items()):
            for job, run in list(box.runs.items()):
                if run.ended_at is not None and now - run.ended_at > ENDED_KEEP_S:
                    run.received(run.seq)
                    del box.runs[job]
            self._limit(box)
            if not box.runs:
                if box._pump is None:
                    del self._boxes[replica]
                continue
            jobs = [(j, r.attempt, r.granted - 1) for j, r in box.runs.items() if r.granted]
            if jobs:
                box.put(encode_frame(Alive(jobs)))

    def _limit(self, box: Outbox) -> None:
        excess = len(box.runs) - RUNS_MAX
        if excess > 0:
            ended = [j for j, r in box.runs.items() if r.ended_at is not None]
            for job in ended[:excess]:
                box.runs[job].received(box.runs[job].seq)
                del box.runs[job]

    def open_runs(self) -> int:
        """Runs that have frames a replica has not acknowledged, or have not ended."""
        return sum(len(b.runs) for b in self._boxes.values())

    async def close(self) -> None:
        """Stop sending."""
        for box in self._boxes.values():
            await box.close()
