"""A full Redis takes no new jobs; all that it has go on, end, and make room again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.broker import Broker, open_link
from common.errors import BrokerRefused
from common.scripts import VERBS
from tests.scripts.scene import Scene
from tests.scripts.test_malformed import CALLS, two_batches
from tests.support.redis_server import RedisServer


@pytest.fixture
async def own() -> AsyncIterator[Scene]:
    """A Redis whose memory the test may fill."""
    with RedisServer() as server:
        broker = Broker(open_link(server.url))
        task = asyncio.create_task(broker.run())
        try:
            async with asyncio.timeout(5):
                await broker.up.wait()
            yield Scene(broker)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.processes
async def test_only_what_comes_anew_is_refused_and_writes_nothing(own: Scene) -> None:
    for verb in VERBS:
        await own.broker.command("CONFIG", "SET", "maxmemory", 0)
        await own.broker.command("FLUSHALL")
        own.term = 0
        run = await own.running()
        await own.enqueue("k")
        await two_batches(own)
        before = await own.dump()
        await own.broker.command("CONFIG", "SET", "maxmemory", 1_000)
        if verb in ("enqueue", "describe", "batch_create"):
            with pytest.raises(BrokerRefused, match="OOM"):
                await CALLS[verb](own, run)
            assert await own.dump() == before
        else:
            await CALLS[verb](own, run)


@pytest.mark.processes
async def test_the_queue_drains(own: Scene) -> None:
    for n in range(4):
        await own.enqueue(f"j{n}", body=b"x" * 100_000)
    await own.lead()
    await own.broker.command("CONFIG", "SET", "maxmemory", 1_000)
    for lease in await own.pop(4):
        assert await own.queue.lead("renew", "d1-host-aa", term=own.term, now_ms=own.now)
        word = await own.queue.start(lease.job, "d1-host-aa", lease.attempt, own.channel, b"x")
        assert word == "started"
        assert await own.settle(lease, cost=2_000.0, learn=10) == "settled"
        assert await own.queue.ack([lease.job], lease.replica) == 1
    assert [k for k in await own.dump() if not own.keys.permanent(k)] == []
