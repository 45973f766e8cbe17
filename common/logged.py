"""A dispatcher's side of a durable job: its frames into the job's log, in order and without gaps.

Such a job has no gateway and no windows: frames gather while one `append` is under way, and the
relay waits once LOG_AHEAD bytes of them do. The newest LOG_KEPT bytes are kept: a Redis that was
restarted may have lost the end of a log, and it is filled up again before anything is added.

Owner of a frame: this process, until `start`, `append` or `settle` has put it into the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from common.errors import BrokerError
from common.outcomes import Outcome
from common.queue import Queue, Span
from common.wire import FRAME_BYTES_MAX, End, Frame, Head, Usage, cut, encode_batch, encode_frame

log = logging.getLogger("fairlane.publish")

ENTRY_BYTES_MAX = FRAME_BYTES_MAX
"""The most that one entry of a log carries (one frame may exceed it)."""
LOG_AHEAD = 1 << 20
"""Bytes that may wait to be put into one log."""
LOG_KEPT = 1 << 20
"""Bytes of the newest frames that are kept after they were."""
LOG_BYTES_MAX = 64 << 20
"""The most that one answer may have: all of it is held in Redis."""
AGAIN_S = (0.05, 0.1, 0.2, 0.5)
"""An `append` that Redis did not take is repeated after these times, the last one again and again,
until the run is stopped: its lease runs out meanwhile."""


class Logged:
    """The answer of one run of a durable job; to its relay what `Outgoing` is."""

    def __init__(self, queue: Queue, owner: str, job: str, attempt: int) -> None:
        self._queue = queue
        self._owner = owner
        self.job = job
        self.attempt = attempt
        self.seq = 0
        """Number of the next frame."""
        self.over: Callable[[Outcome], None] = lambda outcome: None
        """Told why nothing more can be put into the log."""
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        """The next frame to be put into the log."""
        self._limit = 0
        """Frames from here on are for a script that checks more, or not made yet."""
        self._had = 0
        """Frames below this may be in the log, in entries cut as they were then."""
        self._done = 0
        """Frames below this were in it once."""
        self._ahead = 0
        self._bytes = 0
        self.too_large = False
        """More than LOG_BYTES_MAX came: it is not to be had, from no engine."""
        self._closed = False
        self._moved = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    def first(
        self, status: int, headers: list[tuple[str, str]], stream: bool, data: bytes
    ) -> list[bytes]:
        """The frames of the head and the first data, for `start` or `settle`."""
        head = Head(self.job, self.attempt, self.seq, status, headers, stream)
        self._bytes += len(data)
        return [self._keep(head), *self._cut(data)]

    def data(self, data: bytes) -> bool:
        """Put whole events, or a piece of a body, into the log. Call `room` before making more.
        False: it is more than may be kept, and the run is over."""
        self._ahead += sum(map(len, self._cut(data)))
        self._bytes += len(data)
        self._limit = self.seq
        if self._bytes > LOG_BYTES_MAX and not self.too_large:
            self.too_large = True
            self._stop(Outcome.FAILED)
        self._pour()
        return not self.too_large

    def end(self, outcome: Outcome, message: str, usage: Usage | None, now: float) -> bytes:
        """The end frame, for `settle`. Nothing may follow it."""
        return self._keep(End(self.job, self.attempt, self.seq, outcome, message, usage))

    def batch(self, frames: list[bytes]) -> bytes:
        """Frames as an entry of the log."""
        return encode_batch(self._owner, frames)

    def span(self, frames: int) -> Span:
        """The numbers of the newest frames that were made."""
        return self.seq - frames, self.seq - 1

    def grant(self) -> None:
        """A script has put all frames there are into the log."""
        self._next = self._limit = self._had = self._done = self.seq
        self._trim()

    def full(self) -> bool:
        """Whether too much waits to be put into the log."""
        return self._ahead >= LOG_AHEAD and not self._closed

    async def room(self) -> None:
        """Until less does."""
        while self.full():
            self._moved.clear()
            await self._moved.wait()

    async def flush(self) -> None:
        """Until all data is in the log, or nothing more can be put there."""
        while self._next < self._limit and not self._closed:
            self._pour()
            self._moved.clear()
            await self._moved.wait()

    async def mend(self) -> bool:
        """Fill up the end of a log that Redis has lost; False: it lost more than is kept."""
        if self._closed or not self._kept or self._kept[0][0] >= self._limit:
            return False
        self._next = self._kept[0][0]
        await self.flush()
        return not self._closed

    def discard(self) -> None:
        """The run ends without a word."""
        self._closed = True
        self._kept.clear()
        self._moved.set()
        if self._pump is not None:
            self._pump.cancel()

    def _keep(self, frame: Frame) -> bytes:
        encoded = encode_frame(frame)
        self._kept.append((self.seq, encoded))
        self._kept_bytes += len(encoded)
        self.seq += 1
        return encoded

    def _cut(self, data: bytes) -> list[bytes]:
        return [self._keep(f) for f in cut(self.job, self.attempt, self.seq, data)]

    def _trim(self) -> None:
        while self._kept_bytes > LOG_KEPT and self._kept and self._kept[0][0] < self._next:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _stop(self, why: Outcome) -> None:
        self._closed = True
        self._moved.set()
        self.over(why)

    def _pour(self) -> None:
        if self._pump is None and not self._closed:
            self._pump = asyncio.ensure_future(self._run())
            self._pump.add_done_callback(self._poured)

    def _poured(self, task: asyncio.Task[None]) -> None:
        self._pump = None
        self._moved.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("appending failed", exc_info=task.exception())
            self._stop(Outcome.TRIES)

    def _take(self) -> list[bytes]:
        """The next frames: one by one where some may be in the log already, for an entry is there
        as a whole or not at all."""
        at, size, frames = self._next - self._kept[0][0], 0, list[bytes]()
        for i in range(at, at + self._limit - self._next):
            frame = self._kept[i][1]
            if frames and (size + len(frame) > ENTRY_BYTES_MAX or self._next < self._had):
                break
            frames.append(frame)
            size += len(frame)
        return frames

    def _appended(self, frames: list[bytes]) -> None:
        if self._next >= self._done:
            self._ahead -= sum(map(len, frames))
        self._next += len(frames)
        self._done = max(self._done, self._next)
        self._had = max(self._had, self._next)
        self._trim()
        self._moved.set()

    async def _run(self) -> None:
        failed = 0
        while self._next < self._limit and not self._closed:
            frames, first = self._take(), self._next
            span = (first, first + len(frames) - 1)
            try:
                word = await self._queue.append(
                    self.job, self._owner, self.attempt, self.batch(frames), span
                )
            except BrokerError as e:
                log.debug("append to the log of %s: %s", self.job, e)
                word = "unknown"
                self._had = max(self._had, span[1] + 1)  # this entry may be there all the same
            if word == "appended":
                failed = 0
                self._appended(frames)
            elif word == "gap":
                if first == self._kept[0][0]:
                    self._stop(Outcome.TRIES)
                else:
                    self._next = self._kept[0][0]
            elif word == "unknown":  # the run is told to Redis again with its next renewal
                await asyncio.sleep(AGAIN_S[min(failed, len(AGAIN_S) - 1)])
                failed += 1
            else:
                self._stop(Outcome.CANCELLED if word == "cancelled" else Outcome.LOST)
