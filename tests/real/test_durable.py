"""Durable jobs while dispatchers, an engine and Redis are killed: none lost, each answered once."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.client import Client
from common.client_types import Piece, Request
from common.durable import Result
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes
DONE_S = 90
JOBS = 60


def requests(fleet: Fleet, tag: str) -> list[Request]:
    """Whole answers and streams of both models, in two classes."""
    return [
        Request(
            body={
                "model": fleet.models[n % 2], "stream": n % 3 == 0, "ignore_eos": True,
                "messages": [{"role": "user", "content": f"{tag} {n}"}], "max_tokens": 60 + n,
            },
            user=("alice", "bob")[n % 2], cls=("batch", "standard")[n // 2 % 2], sink=f"s-{tag}",
        )
        for n in range(JOBS)
    ]  # fmt: skip


@asynccontextmanager
async def submitted(fleet: Fleet, tag: str) -> AsyncIterator[tuple[Client, list[str]]]:
    """All of them, some of which run."""
    async with Client(fleet.server.url) as client:
        jobs = [job async for job in client.submit_many(requests(fleet, tag))]
        await wait_until(
            lambda: len(fleet.running()) >= 8 and fleet.waiting() >= 8, timeout=20, what="they run"
        )
        yield client, jobs
        fleet.heal()
    with fleet.redis() as redis:
        redis.flushall()  # what is kept of them for a day


def whole(n: int, result: Result) -> bool:
    """Whether an answer has all tokens that were asked for."""
    if n % 3:
        return bool(json.loads(result.body)["usage"]["completion_tokens"] == 60 + n)
    events = [e for e in result.body.split(b"\n\n") if e.startswith(b"data: {")]
    texts = [c for e in events for c in json.loads(e[6:])["choices"]]
    return result.body.endswith(b"data: [DONE]\n\n") and texts[-1]["finish_reason"] == "length"


async def answered(client: Client, jobs: list[str], fleet: Fleet, tag: str) -> None:
    """Each has its whole answer, and its sink told of each once."""
    async with asyncio.timeout(DONE_S):
        results = await asyncio.gather(*map(client.result, jobs))
    bad = [
        (n, r.outcome, r.status, r.message)
        for n, r in enumerate(results)
        if r.status != 200 or not whole(n, r)
    ]
    assert not bad
    told = [job for m in fleet.models for job in await client.ended(m, f"s-{tag}", most=1_000)]
    assert sorted(told) == sorted(jobs)


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_dispatchers_die(fleet: Fleet, how: str) -> None:
    async with submitted(fleet, how) as (client, jobs):
        for model in fleet.models:
            leader = fleet.leader(model)
            assert leader is not None
            if leader.alive():
                leader.kill() if how == "kill" else leader.stop()
        fleet.heal()
        await answered(client, jobs, fleet, how)


async def test_an_engine_dies(fleet: Fleet) -> None:
    async with submitted(fleet, "engine") as (client, jobs):
        fleet.engines[0].kill()
        await answered(client, jobs, fleet, "engine")


async def test_redis_dies(fleet: Fleet) -> None:
    async with submitted(fleet, "redis") as (client, jobs):
        fleet.server.kill()
        await asyncio.to_thread(fleet.server.start)
        await answered(client, jobs, fleet, "redis")


async def test_a_stream_is_followed_through_all_of_it(fleet: Fleet) -> None:
    """Two readers, one of which leaves and comes back where it was, get the same bytes."""
    async with Client(fleet.server.url) as client, Client(fleet.server.url) as other:
        body = {
            "model": fleet.models[0], "stream": True, "ignore_eos": True, "max_tokens": 400,
            "messages": [{"role": "user", "content": "a long story"}],
        }  # fmt: skip
        job = await client.submit(Request(body=body))
        one = asyncio.ensure_future(_pieces(client, job))
        two: list[Piece] = []
        async for piece in other.stream(job):
            two.append(piece)
            if len(two) == 20:
                break
        fleet.server.kill()
        await asyncio.to_thread(fleet.server.start)
        two += await _pieces(other, job, two[-1].id)
        assert _last(await one) == _last(two) == (await client.result(job)).body
    with fleet.redis() as redis:
        redis.flushall()


async def _pieces(client: Client, job: str, after: str = "") -> list[Piece]:
    return [piece async for piece in client.stream(job, after=after)]


def _last(pieces: list[Piece]) -> bytes:
    """What the last attempt said."""
    return b"".join(p.data for p in pieces if p.attempt == pieces[-1].attempt)
