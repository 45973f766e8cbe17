"""The whole of Fairlane as processes under mixed load, and the death of a leader in its midst.

Every answer is checked against what the engines' settings and the request say that it must be.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from common.keys import ModelKeys
from tests.support.load import (
    PATHS,
    Ask,
    Client,
    Got,
    Official,
    broken_off,
    chats,
    mixed,
    problem,
)
from tests.support.processes import Fleet, Role
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes

N = int(os.environ.get("FAIRLANE_TEST_N", "600"))
OPEN_MAX = 64
"""Requests open at once: more than the engines have slots, so that some always wait."""
USERS = ("alice", "bob", "carol", "dave")
SAMPLE = 12
GROWTH, GROWTH_BYTES = 0.2, 10 << 20
TAKEOVER_S = 3.0


@contextlib.asynccontextmanager
async def clients(fleet: Fleet) -> AsyncIterator[tuple[list[Client], list[Official]]]:
    """A raw and an official client of each gateway."""
    raw = [Client(g.url) for g in fleet.gateways]
    official = [Official(g.url) for g in fleet.gateways]
    try:
        yield raw, official
    finally:
        for client in (*raw, *official):
            await client.close()


async def test_mixed_load_through_every_gateway(fleet: Fleet) -> None:
    asks = mixed(N, fleet.engine, USERS, seed=1)
    choices = sum(len(ask.call(fleet.engine).choices) for ask in asks)
    before = _finished(fleet)
    gate = asyncio.Semaphore(OPEN_MAX)
    answers: list[tuple[Ask, Got]] = []

    async with clients(fleet) as (raw, official):

        async def one(i: int, ask: Ask) -> str:
            async with gate:
                if i % 2:
                    return await official[i // 2 % len(official)].problem(ask, fleet.engine)
                got = await raw[i // 2 % len(raw)].send(ask)
                answers.append((ask, got))
                return problem(ask, got, fleet.engine)

        async def part(first: int, last: int) -> dict[str, int]:
            todo = range(first, last)
            found = await asyncio.gather(*(one(i, asks[i]) for i in todo))
            wrong = [(asks[i], text) for i, text in zip(todo, found, strict=True) if text]
            assert not wrong, f"{len(wrong)} of {len(found)} answers are wrong: {wrong[:5]}"
            return {role.name: role.rss() for role in fleet.roles}

        early = await part(0, N // 2)
        late = await part(N // 2, N)

    await wait_until(lambda: not fleet.leftovers(), timeout=15, what="only permanent keys")
    grown = {name: (early[name] >> 20, late[name] >> 20) for name in early
             if late[name] > early[name] * (1 + GROWTH) + GROWTH_BYTES}  # fmt: skip
    assert not grown, f"memory in MiB after the first and the second half: {grown}"
    assert _finished(fleet) - before == choices, "each sequence was computed exactly once"
    await _compare_with_an_engine(fleet, answers)


def _finished(fleet: Fleet) -> float:
    """Sequences that the engines have computed to their end, and those given up on the way."""
    return sum(e.metric("vllm:request_success") for e in fleet.engines)


async def _compare_with_an_engine(fleet: Fleet, answers: list[tuple[Ask, Got]]) -> None:
    """The same bytes as an engine that is asked directly, under the id that it was given."""
    single = [(a, g) for a, g in answers if a.body.get("n", 1) == 1]
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for i, (ask, got) in enumerate(single[:: max(1, len(single) // SAMPLE)]):
            response = await client.post(
                fleet.engines[i % len(fleet.engines)].url + PATHS[ask.kind],
                content=ask.engine_body(),
                headers={"content-type": "application/json", "x-request-id": got.job},
            )
            wanted = _timeless(response.content)
            if ask.stream and not ask.wants_usage:  # which the gateway asked for, for itself
                wanted = re.sub(rb'data: [^\n]*"choices":\[\],"usage"[^\n]*\n\n', b"", wanted)
            assert _timeless(got.events) == wanted
            assert got.headers["content-type"] == response.headers["content-type"]


def _timeless(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b"", body)


async def test_a_leader_is_killed(fleet: Fleet) -> None:
    asks = [
        ask
        for i in range(12)
        for model in fleet.models
        for ask in (
            *chats(1, model, 150, user="alice", tag=f"k{i}"),
            *chats(1, model, 150, user="bob", tag=f"k{i}"),
            *chats(1, model, 60, stream=False, user="carol", tag=f"k{i}"),
        )
    ]
    async with clients(fleet) as (raw, _):
        open_ = [
            asyncio.create_task(raw[i % len(raw)].send(ask)) for i, ask in enumerate(asks)
        ]
        model = fleet.models[0]
        leader = await wait_until(lambda: _busy_leader(fleet, model), timeout=15)
        killed_ms = fleet.now_ms()
        leader.kill()
        dead = leader.id
        held = {r.job: r.started for r in fleet.running() if r.owner == dead}
        assert any(held.values()) and fleet.waiting()
        await wait_until(lambda: _popped_by_another(fleet, model, dead, killed_ms), timeout=20)
        took_s = (fleet.now_ms() - killed_ms) / 1000
        answers = await asyncio.gather(*open_)

    assert took_s < TAKEOVER_S
    cut = {g.job for g in answers if g.errors}
    for ask, got in zip(asks, answers, strict=True):
        check = broken_off if got.job in cut else problem
        assert not (text := check(ask, got, fleet.engine)), text
    # One whose last bytes were on their way already is whole; all else it ran is cut.
    whole = {g.job for g in answers} - cut
    started = {job for job, was_started in held.items() if was_started}
    assert cut <= started
    assert len(started & whole) <= 2
    assert held.keys() - started <= whole
    await wait_until(lambda: not fleet.leftovers(), timeout=15, what="only permanent keys")


def _busy_leader(fleet: Fleet, model: str) -> Role | None:
    """The leader of a model once it has streams under way, and jobs wait."""
    leader = fleet.leader(model)
    mine = [r for r in fleet.running() if leader and r.owner == leader.id and r.started]
    return leader if len(mine) >= 6 and fleet.waiting() >= 12 else None


def _popped_by_another(fleet: Fleet, model: str, dead: str, since_ms: int) -> bool:
    return any(r.owner != dead and r.sent_ms > since_ms for r in fleet.running(model))
