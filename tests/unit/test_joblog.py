"""A job's answer, read from its log as a whole: the right one, and no more than is needed."""

import random
from collections.abc import Iterator

import pytest

from common import joblog
from common.broker import Broker
from common.joblog import Whole
from common.keys import ModelKeys
from common.outcomes import Outcome
from common.wire import Data, End, Head, encode_batch, encode_frame

JOB, KEYS = "j", ModelKeys("m")
Frame = Head | Data | End


async def append(broker: Broker, attempt: int, last: int, *frames: Frame) -> None:
    """One entry."""
    batch = encode_batch("d", [encode_frame(f) for f in frames])
    await broker.command("XADD", KEYS.log(JOB), f"{attempt}-{last}", "f", batch)
    await broker.command("PEXPIRE", KEYS.log(JOB), 60_000)


def end(attempt: int) -> End:
    return End(JOB, attempt, 0, Outcome.LOST, "why", None)


async def begin(broker: Broker, attempt: int, *sizes: int, status: int = 200) -> list[Frame]:
    """An attempt whose first entry is its head and whose others have so many bytes."""
    frames: list[Frame] = [Head(JOB, attempt, 0, status, [], True)]
    frames += [Data(JOB, attempt, i, b"%d" % attempt * n, False) for i, n in enumerate(sizes, 1)]
    for i, frame in enumerate(frames, 1):
        await append(broker, attempt, i, frame)
    return frames


class Read:
    """Counts the entries that are read."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries = 0
        self._command = broker.command
        monkeypatch.setattr(broker, "command", self._counted)

    async def _counted(self, *args: object) -> object:
        reply = await self._command(*args)  # type: ignore[arg-type]
        self.entries += len(reply) if args[0] in ("XRANGE", "XREVRANGE") else 0
        return reply


@pytest.mark.parametrize("heir", [False, True], ids=["its own end", "its heir's"])
async def test_no_more_is_read_than_is_asked_for(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, heir: bool
) -> None:
    """Of a long log, whose attempts before the last are long too."""
    await begin(broker, 1, *[10] * 300)
    await begin(broker, 2, *[10] * 300, status=201)
    await append(broker, 3 if heir else 2, 400, end(2))
    read = Read(broker, monkeypatch)
    for most, count, entries in ((0, 1, 6), (500, 10, 90), (2_999, 64, 400)):
        read.entries = 0
        found = await joblog.whole(broker, KEYS, JOB, most, count)
        assert found is not None and found.head is not None
        assert (found.head.status, found.body, found.end.message) == (201, None, "why")
        assert read.entries <= entries
    found = await joblog.whole(broker, KEYS, JOB, 3_000)
    assert found is not None and found.body == b"2" * 3_000


async def test_a_log_without_an_end_is_not_read_on(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(broker, 1, *[10] * 300)
    read = Read(broker, monkeypatch)
    assert await joblog.whole(broker, KEYS, JOB, 10_000, 8) is None
    assert read.entries <= 10
    assert await joblog.whole(broker, KEYS, "none", 10_000) is None


def said(frames: list[Frame], most: int) -> Whole:
    """By the words of the contract: of the attempt that ended."""
    *answer, over = frames
    assert isinstance(over, End)
    of = answer[-1].attempt if answer else 0
    mine = [f for f in answer if f.attempt == of]
    heads = [f for f in mine if isinstance(f, Head)]
    body = b"".join(f.data for f in mine if isinstance(f, Data))
    return Whole(heads[0] if heads else None, body if len(body) <= most else None, over)


def entries(rng: random.Random) -> Iterator[tuple[int, list[Frame]]]:
    """(attempt, frames) of the entries of any log."""
    attempts = range(1, rng.randint(1, 4))
    for attempt in attempts:
        answer: list[Frame] = [Head(JOB, attempt, 0, 200, [], False)]
        answer += [Data(JOB, attempt, i, b"x" * rng.randint(0, 4), False) for i in range(9)]
        answer = answer[: rng.randint(1, 9)]
        while answer:
            cut = rng.randint(1, 3)
            yield attempt, answer[:cut]
            answer = answer[cut:]
    yield len(attempts) + rng.randint(0, 1), [end(0)]


async def test_any_log_is_read_alike(broker: Broker) -> None:
    rng = random.Random(1)
    for _ in range(150):
        await broker.command("DEL", KEYS.log(JOB))
        frames: list[Frame] = []
        for n, (attempt, part) in enumerate(entries(rng), 1):
            await append(broker, attempt, n, *part)
            frames += part
        for most in (0, 5, 1_000):
            found = await joblog.whole(broker, KEYS, JOB, most, rng.randint(1, 12))
            assert found == said(frames, most), frames
