"""BAT-09: 50,000 lines of 200 MB, and one line too many."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batches import BatchFleet, chat_lines, ended
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes

LINES, TEXT = 50_000, " and" * 1_000
GROWTH_MAX = 150 << 20


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[BatchFleet]:
    with RedisServer() as server, BatchFleet(tmp_path, server, workers=1, gateways=1) as made:
        yield made


class Peak:
    """The most that each process held beyond what it held at first."""

    def __init__(self, fleet: BatchFleet) -> None:
        self._first = {r: r.rss() for r in (*fleet.gateways, *fleet.workers)}
        self.most = {r.name: 0 for r in self._first}

    async def watch(self) -> None:
        never = asyncio.Event()
        while True:
            for role, first in self._first.items():
                self.most[role.name] = max(self.most[role.name], role.rss() - first)
            try:
                await asyncio.wait_for(never.wait(), 0.1)
            except TimeoutError:
                continue


async def test_memory_does_not_grow_with_the_input(fleet: BatchFleet, tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(chat_lines(LINES, text=TEXT))
    assert path.stat().st_size >= 200_000_000
    peak = Peak(fleet)
    async with fleet.client() as client, asyncio.TaskGroup() as group:
        watching = group.create_task(peak.watch())
        with path.open("rb") as data:
            file = await client.files.create(file=data, purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def begun() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return counts is not None and counts.total == LINES and counts.completed >= 300

        await wait_until(begun, timeout=120, what="300 lines")
        await client.batches.cancel(batch.id)
        done = await ended(client, batch.id, 120, every_s=0.5)
        assert done.status == "cancelled"
        found: Counter[str] = Counter()
        for id, count in (
            (done.output_file_id, done.request_counts.completed),
            (done.error_file_id, done.request_counts.failed),
        ):
            lines = (await client.files.content(id)).text.splitlines()
            assert len(lines) == count
            found.update(json.loads(line)["custom_id"] for line in lines)
        assert found == Counter(f"r{n}" for n in range(LINES))
        watching.cancel()
    print({name: f"{most / 1e6:.0f} MB" for name, most in peak.most.items()})
    assert max(peak.most.values()) < GROWTH_MAX, peak.most


async def test_one_line_too_many(fleet: BatchFleet) -> None:
    async with fleet.client() as client:
        file = await client.files.create(file=chat_lines(LINES + 1), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = await ended(client, batch.id, 60)
        assert done.status == "failed"
        assert [e.code for e in done.errors.data] == ["too_many_tasks"]
