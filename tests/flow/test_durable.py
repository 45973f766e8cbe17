"""Durable jobs: run like any other, and none is lost whoever dies."""

import asyncio
import json

import msgspec
import pytest

from common import keys
from common.durable import About
from common.errors import BrokerError
from common.outcomes import Outcome
from sim.settings import EngineSettings
from tests.flow.durables import Durables
from tests.flow.world import LIMITS, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime


def engine(**more: object) -> EngineSettings:
    return EngineSettings(model="m1", max_num_seqs=4, step_ms=20, seed=1, **more)  # type: ignore[arg-type]


async def test_a_job_is_run_and_its_answer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=7, sink="s1"))
        status = await d.ended(about)
        assert (status.state, status.outcome) == ("completed", Outcome.FINISHED), status.message
        assert status.usage is not None and status.usage.output == 7
        assert status.started_ms is not None and status.ended_ms is not None
        result = await d.durable.result(about)
        assert result is not None and result.status == 200 and not result.stream
        assert json.loads(result.body)["usage"]["completion_tokens"] == 7
        k = d.queue_of("m1").keys
        assert await d.broker.command("LRANGE", k.ended("s1"), 0, -1) == [about.id.encode()]
        left = {n for n in await w.keys() if not k.permanent(n)}
        assert left == {
            k.record(about.id), k.log(about.id), k.ended("s1"), keys.JOBS + about.id,
            keys.JOBS_OF + "u",
        }  # fmt: skip
        assert await d.queue_of("m1").forget([about.id]) == 1
        assert not {k.record(about.id), k.log(about.id)} & await w.keys()


async def test_every_reader_gets_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        d, other = await Durables(w).start(), await Durables(w).start()
        about = await d.submit(d.job(output=300, stream=True, cls="standard"), stream=True)
        early = asyncio.ensure_future(d.stream(about))
        slow = asyncio.ensure_future(other.stream(about, every_s=0.5))
        await d.ended(about)
        late = await other.stream(about)
        assert late == await early == await slow
        assert late[0].endswith(b"data: [DONE]\n\n") and late[0].count(b"\n\n") >= 300


async def test_a_job_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        d = await Durables(w).start()
        new = d.job()
        about = await d.submit(new, digest="a")
        again = await d.submit(new, digest="a")
        assert again == about
        other = msgspec.structs.replace(about, digest="b")
        word, _ = await d.durable.submit(new, other, LIMITS)
        assert word == "conflict"
        await d.ended(about)
        await d.submit(new, digest="a")
        assert (await d.durable.status(about)).state == "completed", "it is not run again"


async def test_cancelled_while_it_waits_and_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        d = await Durables(w).start()
        runs = [await d.submit(d.job(output=4_000, sink="s1")) for _ in range(4)]
        waits = await d.submit(d.job(output=4_000, sink="s1"))
        await wait_until(lambda: w.engines["e1"].running() >= 3, timeout=20, what="they run")
        assert await d.durable.cancel(waits) == "cancelled"
        assert await d.durable.cancel(runs[0]) == "flagged"
        for about in (waits, runs[0]):
            assert (await d.ended(about)).state == "cancelled"
        assert await d.durable.cancel(waits) == "ended"
        ended = await d.broker.command("LRANGE", d.queue_of("m1").keys.ended("s1"), 0, -1)
        assert set(ended) == {waits.id.encode(), runs[0].id.encode()}


async def test_a_job_that_waits_too_long_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        d = await Durables(w).start()
        for _ in range(6):
            await d.submit(d.job(output=4_000))
        late = await d.submit(d.job(wait_ms=2_000))
        assert (await d.ended(late)).state == "expired"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dispatcher_dies_with_it(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async with world(monkeypatch, {"e1": engine()}, dispatchers=2) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=500, stream=stream), stream=stream)
        reading = asyncio.ensure_future(d.stream(about))
        await wait_until(lambda: w.engines["e1"].running() == 1, timeout=20, what="it runs")
        await _grown(d, about, 20 * stream)
        leads = w.leader()
        process = next(p for p, one in w.dispatchers if one is leads)
        await process.kill()
        status = await d.ended(about)
        assert (status.state, status.tries) == ("completed", 1)
        assert status.usage is not None and status.usage.output == 500
        found = await reading
        assert len(found) == 1 + stream, "a stream begins anew in the log"
        if stream:
            assert found[-1].count(b'"content"') >= 500 > found[0].count(b'"content"')


async def test_a_backend_dies_in_the_middle_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine(), "e2": engine()}) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=500, stream=True), stream=True)
        engines = w.engines.values()
        await wait_until(lambda: any(e.running() for e in engines), timeout=20, what="it runs")
        dies = next(e for e in engines if e.running())
        await _grown(d, about, 20)
        dies.kill()
        status = await d.ended(about)
        assert (status.state, status.tries) == ("completed", 1)


async def test_redis_is_away_while_it_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        d = await Durables(w).start()
        about = await d.submit(d.job(output=500, stream=True), stream=True)
        reading = asyncio.ensure_future(_patient(d, about))
        await wait_until(lambda: w.engines["e1"].running() == 1, timeout=20, what="it runs")
        w.server.connected = False
        for process, _ in [*w.dispatchers, *w.gateways]:
            await process.broker.link.close()
        await pass_time(1.5)
        w.server.connected = True
        await d.broker.up.wait()
        assert (await d.ended(about)).state == "completed"
        assert (await reading).count(b'"content"') >= 500


async def _patient(d: Durables, about: About) -> bytes:
    while True:
        try:
            return (await d.stream(about))[-1]
        except BrokerError:
            await pass_time(0.1)


async def _grown(d: Durables, about: About, entries: int) -> None:
    """Until the job's log has so many."""
    key = d.queue_of("m1").keys.log(about.id)
    while await d.broker.command("XLEN", key) < entries:
        await pass_time(0.05)
