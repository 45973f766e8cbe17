"""The whole of Fairlane as processes under mixed load: every answer right, nothing left behind.

Every answer is checked against what the engines' settings and the request say that it must be.
"""

import asyncio
import os
import re

import httpx
import pytest

from tests.support.fleet import Fleet
from tests.support.load import PATHS, Ask, Got, Official, clients, mixed, problem

pytestmark = pytest.mark.processes

N = int(os.environ.get("FAIRLANE_TEST_N", "600"))
OPEN_MAX = 64
"""Requests open at once: more than the engines have slots, so that some always wait."""
USERS = ("alice", "bob", "carol", "dave")
SAMPLE = 12
GROWTH, GROWTH_BYTES = 0.2, 10 << 20


async def test_mixed_load_through_every_gateway(fleet: Fleet) -> None:
    asks = mixed(N, fleet.engine, USERS, seed=1)
    before, given_back = _finished(fleet), _given_back(fleet)
    official = [Official(g.url) for g in fleet.gateways]
    answers: list[tuple[Ask, Got]] = []
    gate = asyncio.Semaphore(OPEN_MAX)

    async with clients(fleet) as raw:

        async def one(i: int) -> str:
            ask, turn = asks[i], i // 2
            async with gate:
                if i % 2:
                    return await official[turn % len(official)].problem(ask, fleet.engine)
                got = await raw[turn % len(raw)].send(ask)
                answers.append((ask, got))
                return problem(ask, got, fleet.engine)

        async def part(first: int, last: int) -> dict[str, int]:
            """Memory of each process after these requests, all of which are answered right."""
            found = await asyncio.gather(*map(one, range(first, last)))
            wrong = [(asks[first + i], text) for i, text in enumerate(found) if text]
            assert not wrong, f"{len(wrong)} of {len(found)} answers are wrong: {wrong[:4]}"
            return {role.name: role.rss() for role in fleet.roles}

        early = await part(0, N // 2)
        late = await part(N // 2, N)
        for client in official:
            await client.close()

    await fleet.settle()
    grown = {
        name: (early[name] >> 20, late[name] >> 20)
        for name in early
        if late[name] > early[name] * (1 + GROWTH) + GROWTH_BYTES
    }
    assert not grown, f"memory in MiB after the first and the second half: {grown}"
    sequences = sum(len(ask.call(fleet.engine).choices) for ask in asks)
    again = _given_back(fleet) - given_back
    computed = _finished(fleet) - before - sequences
    assert 0 <= computed <= again, "each was computed once, but for batch that made room"
    await _compare_with_an_engine(fleet, answers)


def _finished(fleet: Fleet) -> float:
    """Sequences that the engines have computed to their end, and those given up on the way."""
    return sum(e.metric("vllm:request_success") for e in fleet.engines)


def _given_back(fleet: Fleet) -> float:
    """Runs that went back to the queue: what the engine had of them it gives up."""
    return sum(d.metric("fairlane_requeued") for d in fleet.dispatchers)


async def _compare_with_an_engine(fleet: Fleet, answers: list[tuple[Ask, Got]]) -> None:
    """The same bytes as from an engine that is asked directly, under the id that it was given."""
    single = [(a, g) for a, g in answers if a.body.get("n", 1) == 1]
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for i, (ask, got) in enumerate(single[:: max(1, len(single) // SAMPLE)]):
            response = await client.post(
                fleet.engines[i % len(fleet.engines)].url + PATHS[ask.kind],
                content=ask.engine_body(),
                headers={"content-type": "application/json", "x-request-id": got.job},
            )
            wanted = _timeless(response.content)
            if ask.stream and not ask.wants_usage:  # which the gateway asks for, for itself
                wanted = re.sub(rb'data: [^\n]*"choices":\[\],"usage"[^\n]*\n\n', b"", wanted)
            assert _timeless(got.events) == wanted
            assert got.headers["content-type"] == response.headers["content-type"]


def _timeless(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b"", body)
