"""Batches with real processes: the official client's flow, and kill -9 in the middle of it."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.batches import BatchFleet, chat_lines, custom_ids, ended
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def batch_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchFleet]:
    folder = tmp_path_factory.mktemp("batches")
    config = {"appendfsync": "everysec"}
    with RedisServer(appendonly=True, config=config) as server, BatchFleet(folder, server) as fleet:
        yield fleet


def once(n: int) -> Counter[str]:
    return Counter(f"r{i}" for i in range(n))


async def test_the_documented_flow(batch_fleet: BatchFleet) -> None:
    """Upload at one gateway, create at the other, poll both, download, list, cancel."""
    batch_fleet.heal()
    async with (
        batch_fleet.client(0) as a, batch_fleet.client(1) as b, batch_fleet.client(0, "bob") as bob,
    ):  # fmt: skip
        file = await a.files.create(file=("in.jsonl", chat_lines(100)), purpose="batch")
        batch = await b.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = await ended(a, batch.id, 60)
        assert done.status == "completed", done
        assert await custom_ids(b, done.output_file_id) == once(100)
        assert done.error_file_id is None
        assert batch.id in [x.id async for x in b.batches.list()]
        assert [x async for x in bob.batches.list()] == []

        slow = await a.files.create(file=chat_lines(60, output=2_000), purpose="batch")
        batch = await a.batches.create(
            input_file_id=slow.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await wait_until(lambda: batch_fleet.running() != [], timeout=20, what="it runs")
        assert (await b.batches.cancel(batch.id)).status == "cancelling"
        done = await ended(b, batch.id, 12)
        assert done.status == "cancelled"
        found = await custom_ids(a, done.output_file_id) + await custom_ids(a, done.error_file_id)
        assert found == once(60)
        await wait_until(lambda: batch_fleet.running() == [], timeout=5, what="nothing runs")


async def test_a_worker_a_dispatcher_and_a_gateway_are_killed(batch_fleet: BatchFleet) -> None:
    """500 lines of two owners; whichever worker has the most in hand dies, the leader too."""
    batch_fleet.heal()
    async with batch_fleet.client(0) as alice, batch_fleet.client(1, "bob") as bob:
        clients = [alice, bob]
        batches = []
        for client in clients:
            file = await client.files.create(file=chat_lines(250, output=60), purpose="batch")
            batches.append(
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
            )

        async def counted() -> bool:
            found = [await c.batches.retrieve(b.id) for c, b in zip(clients, batches, strict=True)]
            return all(f.request_counts and f.request_counts.completed >= 10 for f in found)

        await wait_until(counted, timeout=60, what="ten lines of each")
        busy = max(batch_fleet.workers, key=lambda r: r.metric("fairlane_batches_running"))
        busy.kill()
        leads = batch_fleet.leader("m1")
        assert leads is not None
        leads.kill()
        batch_fleet.gateways[1].kill()  # batches are not its own
    async with batch_fleet.client(0) as alice, batch_fleet.client(0, "bob") as bob:
        clients = [alice, bob]
        results = await asyncio.gather(
            *(ended(c, b.id, 120) for c, b in zip(clients, batches, strict=True))
        )
        for client, done in zip(clients, results, strict=True):
            assert done.status == "completed", done
            assert await custom_ids(client, done.output_file_id) == once(250)
            assert done.error_file_id is None


async def test_redis_is_killed(batch_fleet: BatchFleet) -> None:
    """With appendonly: at most the last second is lost, and what was lost is done again."""
    batch_fleet.heal()
    async with batch_fleet.client(0) as client:
        file = await client.files.create(file=chat_lines(300, output=60), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def counted() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return counts is not None and counts.completed >= 20

        await wait_until(counted, timeout=60, what="twenty lines")
        batch_fleet.server.kill()
        batch_fleet.server.start()
        await wait_until(lambda: batch_fleet.gateways[0].status("/readyz") == 200, timeout=20)
        done = await ended(client, batch.id, 120, may_fall=True)
        assert done.status == "completed", done
        assert await custom_ids(client, done.output_file_id) == once(300)
