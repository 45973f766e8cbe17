"""A worker that dies at any point of its turns: at each command to Redis and each call of the
store, before it or after it. Whoever goes on, each line is in the files once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common import batches
from gateway.batches import finish, turns
from gateway.batches.plan import job_id
from tests.flow.batch_world import BatchWorld, Worker, jsonl, request
from tests.flow.test_batches import engine, ids
from tests.flow.world import world
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime

CALLS = ("put", "write", "get", "size", "delete", "list")
STEP = 8
"""Points between two of one test: they are several, so that they can be run side by side."""
STEPS_MAX = 400
"""No turn of these batches has so many points."""


class Bomb:
    """Stops a worker for good at its n-th point."""

    def __init__(self, worker: Worker, at: int) -> None:
        self._at = at
        self.points = 0
        self.gone = asyncio.Event()
        link, store = worker.process.broker.link, worker.store
        link.execute = self._around(link.execute)  # type: ignore[method-assign]
        for name in CALLS:
            setattr(store, name, self._around(getattr(store, name)))

    def _around(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **more: Any) -> Any:
            await self._point()
            result = await call(*args, **more)
            await self._point()
            return result

        return wrapped

    async def _point(self) -> None:
        self.points += 1
        if self.points >= self._at:
            self.gone.set()
            await asyncio.Event().wait()


async def _run(
    monkeypatch: pytest.MonkeyPatch, at: int, cancel: bool = False
) -> tuple[int, BatchWorld, Any, dict[str, Any]]:
    """A batch whose first worker dies at its point `at`; the points there were."""
    monkeypatch.setattr(batches, "LEASE_MS", 2_000)  # a shorter time of nothing
    monkeypatch.setattr(turns, "RENEW_S", 0.5)
    async with world(monkeypatch, {"e1": engine(step_ms=100)}) as w:
        b = await BatchWorld(w, ahead_lines=4).start(workers=0)
        lines = [request(n, max_tokens=4_000 if cancel and n > 5 else 4) for n in range(9)]
        lines[3]["body"]["max_tokens"] = -1
        about = await b.create(jsonl(*lines))
        first = Worker(b, "first")
        await _started(first)
        bomb = Bomb(first, at)
        first.process.start(_ticks(first))
        over = asyncio.ensure_future(b.over(about))
        gone = asyncio.ensure_future(bomb.gone.wait())
        if cancel:
            await pass_time(2)
            await b.batches.cancel(about.id)
        await asyncio.wait((over, gone), return_when=asyncio.FIRST_COMPLETED)
        await first.kill()
        gone.cancel()
        await b.add_worker()
        batch = await over
        await pass_time(0.5)
        if await b.left():  # its lease was given a last time with the end
            await pass_time(4)
        assert await b.left() == []
        _check(b, about, batch, cancel)
        return bomb.points, b, about, batch


async def _started(worker: Worker) -> None:
    worker.process.start(worker.process.broker.run())
    await worker.process.broker.up.wait()
    await worker.tools.models.refresh()


async def _ticks(worker: Worker) -> None:
    while True:
        await worker.tick()
        await pass_time(0.25)


def _check(b: BatchWorld, about: Any, batch: dict[str, Any], cancel: bool) -> None:
    output, errors = b.results(about, batch)
    counts = batch["request_counts"]
    assert (len(output), len(errors)) == (counts["completed"], counts["failed"])
    if cancel:
        assert batch["status"] == "cancelled"
        assert sorted(output + errors) == (ids(*range(9)) if counts["total"] else [])
    else:
        assert batch["status"] == "completed"
        assert (output, errors) == (ids(0, 1, 2, 4, 5, 6, 7, 8), ids(3))
    files = [n for n in b.objects if n.endswith(".json")]
    assert len(files) == 1 + bool(output) + bool(errors), "no file twice"


@pytest.mark.parametrize("shard", range(STEP // 2))
@pytest.mark.parametrize("cancel", [False, True], ids=["to its end", "cancelled"])
async def test_at_every_second_point(
    monkeypatch: pytest.MonkeyPatch, cancel: bool, shard: int
) -> None:
    """After one command and before the next are one point."""
    at = 1 + shard * 2 + cancel
    while at < STEPS_MAX:
        try:
            points, *_ = await _run(monkeypatch, at, cancel)
        except BaseException as e:
            e.add_note(f"died at point {at}")
            raise
        if points < at:
            break
        at += STEP
    assert 60 < at < STEPS_MAX


async def test_all_is_written_down_and_two_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first between its last results and the jobs' end, the second as the batch is to end: the
    third finds jobs of lines that it need not read."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=0)
        about = await b.create(jsonl(*(request(n) for n in range(5))))
        ending = asyncio.Event()

        async def hang(*_: Any) -> None:
            ending.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(finish, "finish", hang)
            worker = await b.add_worker()
            await asyncio.wait_for(ending.wait(), 30)
            await worker.kill()
        sink = worker.tools.queues.of("m1").keys.ended(about.sink)
        await b.broker.command("RPUSH", sink, *(job_id(about.hex, n, 0) for n in range(5)))
        await b.add_worker()
        batch = await b.over(about, 60)
        assert batch["status"] == "completed" and b.results(about, batch) == (ids(*range(5)), [])
        assert await b.left() == []
