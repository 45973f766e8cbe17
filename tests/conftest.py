"""Fixtures that many tests share: a real Redis, and a broker on it and on the embedded one."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import fakeredis
import pytest

from common.broker import Broker, open_link
from common.keys import ModelKeys
from tests.support.redis_server import RedisServer

MARKERS = ("jobs_inside: ends with jobs waiting or running, so keys that stay are no leak",)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    # Else looptime, asking for the loop of a test without one, makes one that nobody closes.
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One real Redis for the whole run; tests that stop or pause one start their own."""
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["fake", "real"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """A broker that is up, on an empty server; afterwards no key may be left that stays for ever.

    Mark a test `jobs_inside` that ends with jobs waiting or running.
    """
    if request.param == "fake":
        link = open_link(None, server=fakeredis.FakeServer())
    else:
        link = open_link(request.getfixturevalue("redis_server").url)
    made = Broker(link)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(5):
            await made.up.wait()
        await made.command("FLUSHALL")
        yield made
        if not request.node.get_closest_marker("jobs_inside"):
            assert await leaked_keys(made) == [], "keys that nothing will ever remove"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def leaked_keys(broker: Broker) -> list[str]:
    """Keys that neither may stay for ever nor expire."""
    keys = ModelKeys("m")
    found = []
    for raw in await broker.command("KEYS", "*"):
        key = raw.decode()
        of_any_model = keys.prefix + key.partition("}:")[2] if "}:" in key else key
        stays = keys.permanent(of_any_model)
        if not stays and int(await broker.command("PTTL", key)) < 0:
            found.append(key)
    return sorted(found)
