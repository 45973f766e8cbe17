"""The connection to a real Redis: what costs it, and what does not."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import uvloop

from common.errors import BrokerDown, BrokerError, BrokerUncertain
from common.links import RedisLink
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes
TIMEOUT_S = 0.3


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as own:
        yield own


@pytest.fixture
async def link(server: RedisServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(server.url, timeout_s=TIMEOUT_S)
    await link.connect()
    serving = asyncio.create_task(link.serve())
    yield link
    await link.close()
    await serving


async def test_a_process_that_stood_still_keeps_its_connection(link: RedisLink) -> None:
    for _ in range(3):
        asked = asyncio.create_task(link.execute(("PING",)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # written
        # Nothing runs meanwhile, as in a process that gets no processor.
        stand_still = asyncio.get_running_loop().time() + 2 * TIMEOUT_S
        while time.monotonic() < stand_still:
            pass
        assert await asked == b"PONG"
        assert await link.execute(("ECHO", "x")) == b"x"


async def test_a_silent_redis_costs_the_connection(link: RedisLink, server: RedisServer) -> None:
    began = asyncio.get_running_loop().time()
    server.pause()
    try:
        with pytest.raises(BrokerUncertain):
            await link.execute(("PING",))
    finally:
        server.resume()
    assert asyncio.get_running_loop().time() - began < 2 * TIMEOUT_S + 0.5
    with pytest.raises(BrokerDown):
        await link.execute(("PING",))


async def _ask_until_it_goes(link: RedisLink, server: RedisServer) -> list[object]:
    """A command in each turn of the loop, until the server is gone; what the loop complains of."""
    noise: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    await link.connect()
    serving = asyncio.create_task(link.serve())
    asked: list[asyncio.Task[object]] = []

    async def ask() -> None:
        while not serving.done():
            asked.append(asyncio.create_task(link.execute(("PING",))))
            await asyncio.sleep(0)

    asking = asyncio.create_task(ask())
    server.pause()  # so that commands wait for their replies as it goes
    before = len(asked)
    await wait_until(lambda: len(asked) > before + 10)
    await asyncio.to_thread(server.kill)
    await asking
    replies = await asyncio.gather(*asked, return_exceptions=True)
    await serving
    assert any(isinstance(r, BrokerError) for r in replies)
    assert all(r == b"PONG" or isinstance(r, BrokerError) for r in replies)
    return noise


def test_commands_given_as_the_connection_goes_fail_quietly(server: RedisServer) -> None:
    """On uvloop, as in production: its closed transports raise where asyncio's do not."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        link = RedisLink(server.url, timeout_s=TIMEOUT_S, pending_max=20_000)
        assert runner.run(_ask_until_it_goes(link, server)) == []
