"""The lines of the batches, sent to the engines themselves and as the files of three owners."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from time import monotonic

import aiohttp
import openai

from tests.support.batches import ended

MODEL = "m1"
OWNERS = ("alice", "bob", "carol")
INPUT, OUTPUT = (16, 400), (8, 72)
"""Words in and tokens out of a line, both drawn evenly."""
WARM_S = 3.0
END_S = 3_600.0
EXTRA = 3
"""Requests that wait in each engine that is fed directly, so that no slot is ever free."""


def requests(lines: int, seed: int) -> Iterator[dict[str, object]]:
    """Bodies of mixed sizes."""
    random = Random(seed)
    for n in range(lines):
        text = f"{seed}-{n}" + " and" * random.randint(*INPUT)
        yield {
            "model": MODEL, "max_tokens": random.randint(*OUTPUT), "ignore_eos": True,
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip


def write_input(path: Path, lines: int, seed: int) -> None:
    """An input file."""
    with path.open("wb") as out:
        for n, request in enumerate(requests(lines, seed)):
            line = {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions"}
            out.write(json.dumps(line | {"body": request}).encode() + b"\n")


async def direct(urls: Sequence[str], slots: int, seconds: float) -> float:
    """Lines a second that the engines themselves answer, all slots full."""
    counted, begin = 0, monotonic() + WARM_S
    end = begin + seconds
    rest = requests(1 << 30, 99)

    async def one(url: str, session: aiohttp.ClientSession) -> None:
        nonlocal counted
        while monotonic() < end:
            async with session.post(url + "/v1/chat/completions", json=next(rest)) as answer:
                await answer.read()
            counted += begin <= monotonic() < end

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for url in urls:
            for _ in range(slots + EXTRA):
                group.create_task(one(url, session))
    return counted / seconds


class Batch:
    """One owner's file, run through a client of a gateway."""

    def __init__(self, client: openai.AsyncOpenAI, path: Path, lines: int) -> None:
        self._client = client
        self._path = path
        self._lines = lines
        self._id = ""

    async def create(self) -> None:
        """Upload the file and begin."""
        with self._path.open("rb") as data:
            file = await self._client.files.create(file=data, purpose="batch")
        made = await self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        self._id = made.id

    async def done(self) -> int:
        """Lines that are over."""
        counts = (await self._client.batches.retrieve(self._id)).request_counts
        return 0 if counts is None else counts.completed + counts.failed

    async def finish(self, *, may_fall: bool = False) -> int:
        """Wait for its end and read its files; when its last line was over, in seconds since the
        epoch. Raises AssertionError where a line is not in them exactly once. `may_fall`: its
        counts may, by what a Redis lost that was killed."""
        done = await ended(self._client, self._id, END_S, every_s=1.0, may_fall=may_fall)
        assert done.status == "completed" and not done.error_file_id, done
        ids = Counter[str]()
        files = self._client.files.with_streaming_response
        async with files.content(done.output_file_id) as answer:
            async for line in answer.iter_lines():
                ids[json.loads(line)["custom_id"]] += 1
        assert ids == Counter(f"r{n}" for n in range(self._lines)), "each line once"
        return int(done.finalizing_at)
