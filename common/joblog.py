"""Reading the logs of durable jobs, while they grow and afterwards, by any number of readers.

Nobody is sent anything: a message on the model's live channel says that a job's log has grown, and
each reader takes what is new from its own place. So a slow one holds nothing up and costs nothing,
and one that comes late, or again, finds the same bytes.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from common.broker import Broker, Subscriber
from common.keys import ModelKeys
from common.links import Message
from common.wire import Data, End, Head, decode_batch

READ_MAX = 64
"""Most entries of a log that are read at once."""
POLL_S = 1.0
"""A log is looked at this often even where nothing is heard of it: messages can be lost."""
FOLLOWERS_MAX = 10_000
"""Most readers of one process that wait."""


class Entry(msgspec.Struct, frozen=True):
    """What one entry of a log holds."""

    id: str
    """Its place: `<attempt>-<number>`. Another attempt begins the answer anew."""
    attempt: int
    frames: list[Head | Data | End]

    @property
    def ends(self) -> bool:
        """Whether it is the log's last."""
        return any(type(f) is End for f in self.frames)


class TooManyFollowersError(Exception):
    """FOLLOWERS_MAX readers wait already."""


async def read(
    broker: Broker, keys: ModelKeys, job: str, after: str = "", count: int = READ_MAX
) -> list[Entry]:
    """At most `count` entries behind the one whose id is `after`, or from the first on. Raises
    BrokerError; WireError where an entry is of another version."""
    start = f"({after}" if after else "-"
    reply = await broker.command("XRANGE", keys.log(job), start, "+", "COUNT", count)
    return [_entry(id, fields) for id, fields in reply]


async def last(broker: Broker, keys: ModelKeys, job: str) -> Entry | None:
    """The newest entry, None where there is none. Raises as `read`."""
    reply = await broker.command("XREVRANGE", keys.log(job), "+", "-", "COUNT", 1)
    return _entry(*reply[0]) if reply else None


class Whole(msgspec.Struct, frozen=True):
    """A whole answer: of the attempt that ended."""

    head: Head | None
    """None: no engine answered."""
    body: bytes | None
    """None: it is larger than was asked for."""
    end: End


async def whole(
    broker: Broker, keys: ModelKeys, job: str, most: int, count: int = READ_MAX
) -> Whole | None:
    """What a job ended with, of at most `most` bytes, read `count` entries at a time; None while
    its log does not say. Of a longer log no more is read than its ends and, of the attempt that
    ended, `most` bytes and `count` entries. Raises as `read`."""
    head: Head | None = None
    parts: list[bytes] = []
    attempt, size, after = 0, 0, ""
    ended: tuple[End, int] | None = None
    while entries := await read(broker, keys, job, after, count):
        after = entries[-1].id
        for entry in entries:
            for frame in entry.frames:
                if type(frame) is End:
                    return Whole(head, b"".join(parts) if size <= most else None, frame)
                if entry.attempt != attempt:
                    attempt, head, parts, size = entry.attempt, None, [], 0
                if type(frame) is Head:
                    head = frame
                elif type(frame) is Data:
                    size += len(frame.data)
                    if size > most:
                        parts.clear()
                    else:
                        parts.append(frame.data)
        ended = ended or await _ended(broker, keys, job)
        if ended is None:
            return None
        end, of = ended
        if attempt == of and size > most:
            return Whole(head, None, end)
        if attempt < of:
            after = f"{of}-0"
    return None


async def _ended(broker: Broker, keys: ModelKeys, job: str) -> tuple[End, int] | None:
    """The end, and the attempt whose answer it ends: the end alone may stand under another, of who
    inherited it. None while there is none. Raises as `read`."""
    reply = await broker.command("XREVRANGE", keys.log(job), "+", "-", "COUNT", 2)
    entries = [_entry(*r) for r in reply]
    ends = [f for e in entries[:1] for f in e.frames if type(f) is End]
    said = (e.attempt for e in entries if any(type(f) is not End for f in e.frames))
    return (ends[0], next(said, 0)) if ends else None


def _entry(id: bytes, fields: Sequence[bytes]) -> Entry:
    batch = decode_batch(fields[1])
    frames = [f for f in batch.frames if isinstance(f, Head | Data | End)]
    name = id.decode()
    return Entry(name, int(name.partition("-")[0]), frames)


class Live:
    """Hears of logs that grow. `run` must run."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._waiting: defaultdict[tuple[str, str], set[asyncio.Event]] = defaultdict(set)
        """(channel, job) -> its readers."""
        self._readers = 0
        self._subscriber: Subscriber | None = None
        self._wanted = asyncio.Event()
        self._channels: dict[str, None] = {}

    async def run(self) -> None:
        """Subscribe to the models whose jobs are followed, until cancelled."""
        await self._wanted.wait()
        self._subscriber = Subscriber(
            self._broker, tuple(self._channels), self._deliver, self._wake_all
        )
        await self._subscriber.run()

    @contextlib.contextmanager
    def watching(self, keys: ModelKeys, job: str) -> Iterator[asyncio.Event]:
        """An event that is set when the job's log may have grown; its reader clears it. Raises
        TooManyFollowersError."""
        if self._readers >= FOLLOWERS_MAX:
            raise TooManyFollowersError
        self._readers += 1
        event, place = asyncio.Event(), (keys.live, job)
        self._waiting[place].add(event)
        self._subscribe(keys.live)
        try:
            yield event
        finally:
            self._readers -= 1
            self._waiting[place].discard(event)
            if not self._waiting[place]:
                del self._waiting[place]

    async def follow(
        self, keys: ModelKeys, job: str, after: str = "", count: int = READ_MAX
    ) -> AsyncIterator[list[Entry]]:
        """A job's entries behind `after`, as they come, to the last one; an empty list whenever
        there was nothing new for POLL_S, so that the caller can look whether the job still is.
        Raises as `read`, and TooManyFollowersError. While Redis is down it is the caller's to try
        again from the last place it has."""
        with self.watching(keys, job) as grown:
            while True:
                grown.clear()
                entries = await read(self._broker, keys, job, after, count)
                if entries:
                    after = entries[-1].id
                    yield entries
                    if entries[-1].ends:
                        return
                    continue
                try:
                    async with asyncio.timeout(POLL_S):
                        await grown.wait()
                except TimeoutError:
                    yield []

    def _subscribe(self, channel: str) -> None:
        if channel in self._channels:
            return
        self._channels[channel] = None
        self._wanted.set()
        if self._subscriber is not None:
            self._subscriber.add(channel)

    def _deliver(self, message: Message) -> None:
        place = message[0].decode(), message[1].decode("ascii", "replace")
        for event in self._waiting.get(place, ()):
            event.set()

    def _wake_all(self) -> None:
        for events in self._waiting.values():
            for event in events:
                event.set()
