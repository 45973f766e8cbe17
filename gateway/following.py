"""A durable job's answer on its way to one of any number of readers, over raw ASGI.

A reader takes from the job's log at its own pace, and waits for what is new there; so none holds up
another, and none needs the gateway that another one has. While there is nothing it gets comments.
Where Redis is away it gets these too, for OUTAGE_S.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from common.durable import About, Status
from common.errors import BrokerError, WireError
from common.intake.answers import RETRY_S_MIN, Headers, Refusal, unavailable
from common.joblog import Entry, TooManyFollowersError
from gateway.client import Client
from gateway.durables import Durables
from gateway.events import Cutter, Event
from gateway.stream import STUCK_S

log = logging.getLogger("fairlane.gateway")

OUTAGE_S = 120.0
"""A stream is kept open without Redis for so long; then it is interrupted, and may be resumed."""
AGAIN_S = 0.5
"""A log that could not be read is looked at again after this."""
LOOK_S = 5.0
"""A job whose log is silent is looked at this often: its record may be gone."""

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Telling(Protocol):
    """How the events of a job are told to a reader."""

    cutter: Cutter

    def begun(self) -> bytes:
        """What comes before the first event."""

    def event(self, event: Event) -> bytes:
        """An event as the reader gets it; nothing where it gets none."""

    def over(self, status: Status) -> bytes:
        """What comes after the last, by how the job has ended."""

    def interrupted(self) -> bytes:
        """What comes last where the stream ends and the answer does not."""


class _Gone(Exception):
    """The reader has left, or the gateway ends."""


class Follow:
    """All readers of one gateway."""

    def __init__(self, durables: Durables, comment_every_s: float) -> None:
        self._durables = durables
        self._every_s = comment_every_s
        self._shut = asyncio.Event()
        self.open = 0
        """Readers there are."""

    def shut_down(self) -> None:
        """Interrupt all of them."""
        self._shut.set()

    async def serve(self, client: Client, about: About, telling: Telling) -> None:
        """Tell a reader a job's answer from where its cutter stands to the end. Where this returns
        with the reader's answer not complete the connection must be cut. Raises Refusal."""
        if self._shut.is_set():
            raise Refusal(unavailable(RETRY_S_MIN, close=True))
        self.open += 1
        try:
            await client.start(200, [*_HEADERS, (b"x-fairlane-job", about.id.encode())])
            client.watch(lambda: None)
            await _Reader(self._durables, client, about, telling, self._every_s, self._shut).run()
        finally:
            self.open -= 1
            await client.unwatch()


class _Reader:
    """One of them."""

    def __init__(
        self, durables: Durables, client: Client, about: About, telling: Telling, every_s: float,
        shut: asyncio.Event,
    ) -> None:  # fmt: skip
        self._durables = durables
        self._client = client
        self._about = about
        self._telling = telling
        self._every_s = every_s
        self._shut = shut
        self._loop = asyncio.get_running_loop()
        self._comment_at = self._look_at = self._loop.time()
        self._over = False

    async def run(self) -> None:
        try:
            await self._write(self._telling.begun())
            last = await self._follow()
        except (_Gone, TimeoutError):
            return
        with contextlib.suppress(_Gone, TimeoutError):
            await self._write(last, more=False)

    async def _follow(self) -> bytes:
        """Until there is nothing more to tell; what is to be told last."""
        lost_at: float | None = None
        while True:
            try:
                async with contextlib.aclosing(self._entries()) as batches:  # type: ignore[type-var]
                    async for entries in batches:
                        lost_at = None
                        await self._tell(entries)
                        if self._shut.is_set():
                            return self._telling.interrupted()
                        if self._telling.cutter.end is not None or await self._silent(entries):
                            status = await self._durables.jobs.status(self._about)
                            return self._telling.over(status)
            except BrokerError as e:
                log.debug("the log of %s: %s", self._about.id, e)
            except (TooManyFollowersError, WireError) as e:
                log.warning("cannot follow %s: %s", self._about.id, type(e).__name__)
                return self._telling.interrupted()
            lost_at = self._loop.time() if lost_at is None else lost_at
            if self._shut.is_set() or self._loop.time() - lost_at > OUTAGE_S:
                return self._telling.interrupted()
            await self._comment(placed=False)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._shut.wait()

    def _entries(self) -> AsyncIterator[list[Entry]]:
        k = self._durables.queues.of(self._about.model).keys
        return self._durables.live.follow(k, self._about.id, self._telling.cutter.after)

    async def _tell(self, entries: list[Entry]) -> None:
        events = (e for entry in entries for e in self._telling.cutter.take(entry))
        data = b"".join(map(self._telling.event, events))
        if data:
            await self._write(data)
        elif not entries:
            await self._comment(placed=True)

    async def _silent(self, entries: list[Entry]) -> bool:
        """Whether the job has ended although its log does not say so: it is gone, or the reader
        had the end before."""
        now = self._loop.time()
        if entries or now < self._look_at:
            return False
        if self._over:
            return True
        self._over = (await self._durables.jobs.status(self._about)).over
        self._look_at = now if self._over else now + LOOK_S  # its end may have come just now
        return False

    async def _comment(self, *, placed: bool) -> None:
        if self._client.gone:
            raise _Gone
        if self._loop.time() < self._comment_at:
            return
        standings = await self._durables.standings([self._about]) if placed else {}
        standing = standings.get(self._about.id)
        text = b": waiting\n\n"
        if standing is not None and standing.place is not None:
            text = b": queued position=%d" % standing.place
            if standing.eta_s is not None:
                text += b" eta=%d" % max(1, round(standing.eta_s))
            text += b"\n\n"
        await self._write(text)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """Raises _Gone where the reader left, TimeoutError where it takes nothing for STUCK_S."""
        if self._client.gone:
            raise _Gone
        if data or not more:
            async with asyncio.timeout(STUCK_S):
                await self._client.write(data, more)
            self._comment_at = self._loop.time() + self._every_s
