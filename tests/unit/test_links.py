"""The connection to a real Redis: what costs it, and what does not."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from common.errors import BrokerDown, BrokerError, BrokerUncertain
from common.links import RedisLink
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes
TIMEOUT_S = 0.3


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


async def test_commands_given_as_the_connection_goes_fail_quietly(
    link: RedisLink, server: RedisServer
) -> None:
    loop = asyncio.get_running_loop()
    noise: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: noise.append(context))
    asked: list[asyncio.Task[object]] = []

    def failed() -> bool:  # asks once more in each turn
        asked.append(asyncio.create_task(link.execute(("PING",))))
        return any(t.done() and t.exception() for t in asked)

    await link.execute(("PING",))
    server.kill()
    try:
        while not failed():
            await asyncio.sleep(0)
        replies = await asyncio.gather(*asked, return_exceptions=True)
    finally:
        server.start()
    assert all(r == b"PONG" or isinstance(r, BrokerError) for r in replies)
    await wait_until(lambda: all(t.done() for t in asked))
    assert noise == []
