"""What counts at a backend of the jobs that other dispatchers run."""

import pytest

from common.broker import Broker
from common.cost import Terms
from common.jobs import Limits, NewJob
from common.queue import Queue
from common.settings import BackendSettings, DispatcherSettings
from dispatcher.backend import Backend
from dispatcher.census import SILENT_RENEWALS, Census
from dispatcher.runs import Runs

ME, OTHER = "dispatcher-a-1", "dispatcher-b-2"
LIMITS = Limits(100, 1 << 20, 100, 1 << 20, 100, 1 << 20)
SETTINGS = DispatcherSettings()


def job(number: int) -> NewJob:
    return NewJob(
        id=f"{number:032x}", user="alice", cls="standard", wait_ms=60_000,
        terms=Terms(10.0, 2.0, 0.0, 100), weight=1.0, replica="gateway-a-1", meta=b"m", body=b"{}",
    )  # fmt: skip


async def run_by(queue: Queue, owner: str, number: int, url: str, lease_ms: int) -> None:
    """A job that `owner` runs at a backend and has not begun, with so much of its lease left."""
    assert (await queue.enqueue(job(number), LIMITS)).word == "queued"
    term = (await queue.lead("take", owner)).term
    popped = await queue.pop(["standard"], [url], owner, term, lease_ms=lease_ms)
    assert len(popped.leases) == 1


@pytest.mark.jobs_inside
async def test_a_job_counts_while_its_lease_is_renewed(broker: Broker) -> None:
    queue, backend = Queue(broker, "m"), Backend(BackendSettings(url="http://gpu1:8000"))
    census = Census(queue, ME, Runs(broker, ME, SETTINGS), SETTINGS)
    renewed = SETTINGS.job_lease_ms - int(SETTINGS.job_renew_ms * SILENT_RENEWALS)
    await run_by(queue, OTHER, 1, backend.url, SETTINGS.job_lease_ms)
    await run_by(queue, OTHER, 2, backend.url, renewed - 100)

    assert await census.take([backend], None) == {"interactive": 0, "standard": 0, "batch": 0}
    counts = backend.load.counts(0)
    assert (counts.inflight, counts.unstarted) == (1, 1)
    assert census.others == {job(1).id, job(2).id}, "both may be renewed yet"

    await broker.command("ZADD", queue.keys.running, 1, job(1).id)
    await census.take([backend], None)
    assert backend.load.counts(1).inflight == 0

    await broker.command("ZADD", queue.keys.running, 1 << 52, job(2).id)
    await census.take([backend], None)
    assert backend.load.counts(2).inflight == 1
