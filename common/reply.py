"""One reply at its gateway: its frames put in order, kept until its reader takes them."""

import asyncio
from typing import Protocol

from common.outcomes import Outcome
from common.wire import Cancel, Data, End, Head, Resend

AGAIN_S = 1.0
"""The same gap is asked about no more often."""


class Line(Protocol):
    """What a reply needs of the follower it belongs to."""

    replica: str
    window: int

    def send(self, dispatcher: str, control: Cancel | Resend) -> None:
        """Say something to a dispatcher."""

    def stop(self, dispatcher: str, job: str, attempt: int) -> None:
        """Let a dispatcher stop a run that nobody follows."""

    def tell_taken(self, reply: "Reply", taken: int) -> None:
        """Acknowledge what the client has taken."""

    def forget(self, reply: "Reply") -> None:
        """Its reader goes away."""


class Reply:
    """The answer to one job, as its client's handler reads it."""

    def __init__(self, line: Line, job: str, model: str) -> None:
        self._line = line
        self.job = job
        self.model = model
        self.attempt: int | None = None
        """Of the run that is followed; None: nothing came yet."""
        self.dispatcher: str | None = None
        self.forwarded = False
        """Set by the reader as soon as it means to write what `next` returned."""
        self.ended = False
        self.next_seq = 0
        """Number of the frame that is to come."""
        self._frames: list[Head | Data | End] = []
        self._waiter: asyncio.Future[None] | None = None
        self.asked_at = float("-inf")
        self.bytes_taken = 0
        self._told = 0

    async def next(self) -> list[Head | Data | End]:
        """The frames that came since the last call; waits for at least one. Nothing is lost when
        this is cancelled. After an End nothing more comes."""
        while not self._frames:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        frames, self._frames = self._frames, []
        return frames

    def taken(self, n: int) -> None:
        """The client has taken `n` bytes of data: its window opens by as much."""
        self.bytes_taken += n
        if self.bytes_taken - self._told >= self._line.window // 4:
            self._told = self.bytes_taken
            self._line.tell_taken(self, self.bytes_taken)

    def close(self) -> None:
        """The reader goes away."""
        self._line.forget(self)

    def lose(self, outcome: Outcome, message: str) -> None:
        """End it here, because its end will not come."""
        if not self.ended:
            self._add(End(self.job, self.attempt or 0, -1, outcome, message, None))

    def _add(self, frame: Head | Data | End) -> None:
        self._frames.append(frame)
        if isinstance(frame, End):
            self.ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pin(self, dispatcher: str, attempt: int) -> None:
        """Follow this run from its first frame on; only while nothing was forwarded."""
        self.attempt, self.dispatcher = attempt, dispatcher
        self.next_seq, self.bytes_taken, self._told = 0, 0, 0
        self._frames.clear()

    def accept(self, sender: str, frame: Head | Data | End, now: float) -> None:
        """Take a frame if it is the next of the run that is followed; ask where some are missing.
        A frame of another run is dropped, and that run stopped, once a byte was forwarded."""
        if self.ended:
            return
        if isinstance(frame, End) and frame.seq < 0:
            if self.attempt is None or frame.attempt >= self.attempt:
                self._add(frame)
            return
        if self.attempt != frame.attempt:
            if self.attempt is not None and (self.forwarded or frame.attempt < self.attempt):
                self._line.stop(sender, self.job, frame.attempt)
                return
            self.pin(sender, frame.attempt)
        if frame.seq == self.next_seq:
            self.next_seq += 1
            self._add(frame)
        elif frame.seq > self.next_seq:
            self.ask(now)

    def ask(self, now: float) -> None:
        """Ask for what is missing."""
        if self.attempt is None or self.dispatcher is None or now - self.asked_at < AGAIN_S:
            return
        self.asked_at = now
        request = Resend(self._line.replica, self.job, self.attempt, self.next_seq)
        self._line.send(self.dispatcher, request)
