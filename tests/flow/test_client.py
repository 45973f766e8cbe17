"""Programs that put work on the queue and read its answers, straight over Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.client import Client
from common.client_types import (
    JobFailedError,
    QueueFullError,
    Request,
    RequestError,
    UnknownJobError,
)
from common.errors import BrokerError, ConfigError
from sim.settings import EngineSettings
from tests.flow.world import Process, World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime
ENGINES = {"e1": EngineSettings(model="m1", max_num_seqs=4, step_ms=20, seed=1)}
CHAT = "/v1/chat/completions"


def asks(output: int = 20, text: str = "hello", **more: object) -> dict[str, object]:
    return {
        "model": "m1", "messages": [{"role": "user", "content": text}], "max_tokens": output,
        "ignore_eos": True, **more,
    }  # fmt: skip


@asynccontextmanager
async def client_of(w: World, **more: object) -> AsyncIterator[Client]:
    """A program of its own: with its own way to the broker."""
    process = Process(w.server, None)
    process.start(process.broker.run())
    w.gateways.append((process, None))  # type: ignore[arg-type]
    async with Client("redis://unused", broker=process.broker, **more) as client:  # type: ignore[arg-type]
        yield client


async def test_a_producer_and_a_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, ENGINES) as w:
        async with client_of(w, user="producer", cls="batch") as producer:
            requests = [Request(body=asks(5, f"n{n}"), sink="done") for n in range(150)]
            jobs = [job async for job in producer.submit_many(requests)]
        async with client_of(w) as consumer:
            taken: list[str] = []
            while len(taken) < 150:
                taken += await consumer.ended("m1", "done") or [*await _later()]
            assert sorted(taken) == sorted(jobs)
            for job in jobs[:3]:
                found = await consumer.result(job)
                assert json.loads(found.body)["usage"]["completion_tokens"] == 5
                assert (await consumer.status(job)).about.user == "producer"


async def _later() -> list[str]:
    await pass_time(0.1)
    return []


async def test_a_stream_is_followed_again_from_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, ENGINES) as w, client_of(w) as one, client_of(w) as two:
        job = await one.submit(CHAT, asks(200, stream=True))
        first, last = b"", ""
        async for piece in one.stream(job):
            first, last = first + piece.data, piece.id
            if len(first) > 5_000:
                break
        rest = b"".join([p.data async for p in two.stream(job, after=last)])
        assert first + rest == b"".join([p.data async for p in one.stream(job)])
        assert rest.endswith(b"data: [DONE]\n\n") and first


async def test_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, ENGINES) as w, client_of(w) as c:
        job = await c.submit(CHAT, asks(4_000))
        await wait_until(lambda: w.engines["e1"].running() == 1, timeout=20, what="it runs")
        assert await c.cancel(job)
        with pytest.raises(JobFailedError, match="is cancelled"):
            await c.result(job)
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=20, what="it stops")
        assert not await c.cancel(job)


async def test_a_job_waits_as_long_as_one_of_the_api(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody holds a connection for it, so that its class says nothing of its patience."""
    config = tmp_path / "fairlane.toml"
    config.write_text("[gateway]\nwait_interactive_s = 5\njob_wait_s = 7200\n")
    async with (
        world(monkeypatch, ENGINES) as w,
        client_of(w) as c,
        client_of(w, config=config) as configured,
    ):
        for client, waits in [(c, 86_400), (configured, 7_200)]:
            for cls in ("interactive", "standard", "batch"):
                job = await client.submit(CHAT, asks(), cls=cls)
                assert (await client.status(job)).about.wait_ms == waits * 1_000
        job = await c.submit(CHAT, asks(), wait_s=3)
        assert (await c.status(job)).about.wait_ms == 3_000


async def test_one_key_is_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, ENGINES) as w, client_of(w) as c:
        job = await c.submit(CHAT, asks(), idempotency_key="a")
        assert await c.submit(CHAT, asks(), idempotency_key="a") == job
        assert await c.submit(CHAT, asks(), idempotency_key="a", user="else") != job
        with pytest.raises(RequestError, match="another request"):
            await c.submit(CHAT, asks(21), idempotency_key="a")


async def test_redis_is_away_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, ENGINES) as w, client_of(w) as c:
        job = await c.submit(CHAT, asks(300))
        waiting = asyncio.ensure_future(c.result(job))
        await pass_time(1.0)
        w.server.connected = False
        for process, _ in [*w.dispatchers, *w.gateways]:
            await process.broker.link.close()
        late = asyncio.ensure_future(c.submit(CHAT, asks(), idempotency_key="k"))
        await pass_time(5.0)
        assert not waiting.done() and not late.done()
        w.server.connected = True
        assert (await waiting).status == 200
        assert (await c.result(await late)).status == 200


async def test_redis_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, ENGINES) as w:
        w.server.connected = False
        with pytest.raises(BrokerError, match="does not answer"):
            async with client_of(w):
                raise AssertionError("it must not come to this")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"path": "/v1/nothing"}, "path"), ({"cls": "urgent"}, "cls"),
        ({"user": "u" * 300}, "user"),
        ({"ttl_s": 10**9}, "ttl_s"), ({"body": b"{"}, None), ({"body": b'{"model":"x"}'}, "model"),
        ({"body": b'{"model":"m1"}'}, "messages"), ({"sink": "a b"}, "sink"),
    ],
)  # fmt: skip
async def test_what_cannot_be_queued(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, object], param: str | None
) -> None:
    async with world(monkeypatch, ENGINES) as w, client_of(w) as c:
        with pytest.raises(RequestError) as caught:
            await c.submit(Request(**{"body": asks(), **more}))  # type: ignore[arg-type]
        assert caught.value.answer.param == param
        assert caught.value.answer.status in (400, 404)


async def test_a_full_queue_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": ENGINES["e1"]}) as w, client_of(w) as c:
        with pytest.raises(QueueFullError, match="for this user"):
            for _ in range(300):
                await c.submit(CHAT, asks(100_000))


async def test_unknown_jobs_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, ENGINES) as w, client_of(w) as c:
        with pytest.raises(UnknownJobError):
            await c.status("0" * 32)
        with pytest.raises(ConfigError, match="urgent"):
            Client("redis://unused", cls="urgent")
