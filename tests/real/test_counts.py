"""What is counted for clients that leave: places, charges, jobs at an engine."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.cost import pricing
from common.keys import ModelKeys
from common.settings import ModelSettings
from common.wire import Usage
from tests.support.fake_engine import HOST, Reply, chunk_event, player
from tests.support.live import Live, Lives
from tests.support.wait import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

T: dict[str, Any] = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**T, "stream": True}
EVENTS = [chunk_event(f"word{n} ") for n in range(10)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lives() -> AsyncIterator[Lives]:
    """Redis, the fake engine, and one gateway."""
    async with Lives() as made:
        yield made


async def goes_on(body: Any, reply: Reply) -> bool:
    """Ten events and then nothing, until the client is gone; JSON never comes."""
    await reply.begin("text/event-stream" if body.get("stream") else "application/json")
    for event in EVENTS if body.get("stream") else ():
        await reply.send(event)
    await reply.until_gone()
    return False


async def leave(live: Live, body: dict[str, Any], how: str, **when: int) -> None:
    """Ask, and go away `after_bytes` of the answer or `at_ms`."""
    actions = [{"disconnect": how, **when}]
    await player.do_request({"body_json": body}, HOST, live.port, 10, actions)


def in_flight(live: Live) -> float:
    return live.sample("fairlane_backend_inflight", model="m1")


async def test_cancelled_streams_give_their_places_back(lives: Lives) -> None:
    live = await lives.get()
    lives.engine.answer = goes_on
    async with live.dispatching():
        for n in range(50):
            await leave(live, STREAM, "rst" if n % 2 else "fin", after_bytes=1)
        lives.engine.answer = None
        response = await live.ask({"body_json": T}, 2.0)
        assert response["status"] == 200
        await live.at_rest()
        assert await live.broker.command("EXISTS", ModelKeys("m1").inflight) == 0
        await wait_until(lambda: in_flight(live) == 0, what="nothing in flight")


async def test_counts_are_those_of_the_engine_after_random_aborts(lives: Lives) -> None:
    live = await lives.get()
    lives.engine.answer = goes_on
    chance = random.Random(8)

    async def client() -> None:
        for _ in range(10):
            body = STREAM if chance.random() < 0.7 else T
            how = chance.choice(("fin", "rst"))
            await leave(live, body, how, at_ms=chance.randrange(150))

    async with live.dispatching():
        await asyncio.gather(*(client() for _ in range(20)))
        await live.at_rest()
        await wait_until(lambda: in_flight(live) == 0, what="nothing in flight")
        assert live.sample("fairlane_gateway_open", model="m1") == 0
        assert live.sample("fairlane_gateway_bodies_bytes") == 0
        staying = [asyncio.create_task(leave(live, STREAM, "fin", at_ms=3_000)) for _ in range(7)]
        await wait_until(lambda: lives.engine.answering() == 7 == in_flight(live))
        await asyncio.gather(*staying)


async def test_aborted_streams_are_charged_once_for_what_they_got(lives: Lives) -> None:
    live = await lives.get()
    lives.engine.answer = goes_on
    keys = ModelKeys("m1").classes["standard"]

    async def charged(jobs: int) -> float:
        ended = "fairlane_jobs_total"
        await wait_until(lambda: live.sample(ended, model="m1") == jobs, what=f"{jobs} ended")
        await live.at_rest()
        return float(await live.broker.command("HGET", keys.counter, "alice"))

    def tokens(kind: str) -> int:
        return int(live.sample("fairlane_tokens_total", model="m1", kind=kind))

    async with live.dispatching():
        await leave(live, STREAM, "fin", after_bytes=1)
        before, input_, output = await charged(1), tokens("input"), tokens("output")
        for n in range(20):
            await leave(live, STREAM, "rst" if n % 2 else "fin", after_bytes=len(b"".join(EVENTS)))
            # One by one: a user that comes back while an estimate is booked is lifted to it.
            raised = await charged(n + 2) - before
        usage = Usage(tokens("input") - input_, 0, tokens("output") - output)
    assert usage.input >= 20
    assert usage.output == 20 * len(EVENTS)
    assert raised == pytest.approx(pricing(ModelSettings()).real(usage, 0.0))
