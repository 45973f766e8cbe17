"""What a batch is made of is gone for good: what Redis knows of it, or its input. Virtual time."""

import pytest

from common import keys
from tests.flow.batch_world import BatchWorld, jsonl, request
from tests.flow.test_batches import engine
from tests.flow.world import world
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime


async def test_what_expired_before_any_worker_came_counts_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=0)
        about, other = [await b.create(jsonl(request(1))) for _ in range(2)]
        await b.broker.command("DEL", keys.BATCH + about.id)
        await b.add_worker()
        assert (await b.over(other))["status"] == "completed"
        await pass_time(1)
        assert await b.batches.active(10) == []
