"""What a batch is made of is gone for good: what Redis knows of it, or its input. Virtual time."""

import pytest

from common import keys
from common.batch_state import About
from common.errors import StoreError
from gateway.files import content_path, record_path
from tests.flow.batch_world import BatchWorld, jsonl, request
from tests.flow.test_batches import engine
from tests.flow.world import world
from tests.support.wait import pass_time, wait_until

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


def delete(b: BatchWorld, about: About, what: str) -> None:
    """The whole input file; its content alone, which leaves its record; or most of that."""
    content = content_path(about.owner, about.input_file_id)
    if what == "file":
        del b.objects[record_path(about.owner, about.input_file_id)]
    if what == "most":
        b.objects[content] = b.objects[content][:10]
    else:
        del b.objects[content]


async def queued(b: BatchWorld, about: About) -> None:
    async def every() -> bool:
        state = await b.state(about)
        return state.total == state.cursor > 0

    await wait_until(every, timeout=20, what="all lines are on the queue")
    await pass_time(3)


@pytest.mark.parametrize("what", ["file", "content", "most"])
@pytest.mark.parametrize(
    ("how", "status"),
    [("goes on", "completed"), ("taken over", "failed"), ("cancelled", "cancelled"),
     ("expires", "failed")],
)  # fmt: skip
async def test_a_batch_ends_whose_input_was_deleted_when_all_was_queued(
    monkeypatch: pytest.MonkeyPatch, what: str, how: str, status: str
) -> None:
    """Lines are run to their end, by the worker that has read them; where one is to be read again
    it fails, with the results that are written down."""
    async with world(monkeypatch, {"e1": engine(max_num_seqs=2)}) as w:
        b = await BatchWorld(w).start()
        lines = jsonl(*(request(n, max_tokens=200) for n in range(12)))
        about = await b.create(lines, window_ms=30_000 if how == "expires" else 600_000)
        await queued(b, about)
        delete(b, about, what)
        if how == "taken over":
            await b.workers[0].kill()
            await b.add_worker()
        elif how == "cancelled":
            await b.batches.cancel(about.id)
        batch = await b.over(about, 100)
        assert batch["status"] == status
        if status == "failed":
            assert batch["errors"]["data"][0]["code"] == "input_file_not_found"
        done = len(b.results(about, batch)[0])
        assert done == batch["request_counts"]["completed"]
        assert done == 12 or how != "goes on"
        assert done or how == "taken over"
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=20, what="runs are over")
        assert await b.batches.active(10) == []


@pytest.mark.parametrize("what", ["file", "content", "most"])
async def test_a_batch_fails_whose_input_is_gone_before_it_was_read(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=0)
        about = await b.create(jsonl(request(1), request(2)))
        delete(b, about, what)
        await b.add_worker()
        batch = await b.over(about, 20)
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "input_file_not_found"


async def test_a_batch_expires_whose_input_could_not_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store was away until its window was over."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=0)
        about = await b.create(jsonl(request(1)), window_ms=60_000)
        files = (await b.add_worker()).tools.files

        async def away(*args: object) -> None:
            raise StoreError("away")

        monkeypatch.setattr(files, "find", away)
        await pass_time(50)
        assert (await b.state(about)).status == "validating"
        batch = await b.over(about, 20)
        assert (batch["status"], batch["request_counts"]["total"]) == ("expired", 0)
        assert batch["expired_at"] >= batch["expires_at"]
