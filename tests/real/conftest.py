"""One fleet of real processes for all tests here; each finds it whole."""

from collections.abc import Iterator

import pytest

from tests.support.fleet import Fleet
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def _fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = {"appendfsync": "everysec"}  # what is answered survives the end of the process
    folder = tmp_path_factory.mktemp("fleet")
    with RedisServer(appendonly=True, config=config) as server, Fleet(folder, server) as fleet:
        yield fleet


@pytest.fixture
def fleet(_fleet: Fleet) -> Iterator[Fleet]:
    """3 gateways, 2 dispatchers, 2 engines, 2 models, all ready, and no job from before."""
    _fleet.heal()
    assert _fleet.leftovers(expiring=True) == []
    yield _fleet
    print(_fleet.logs())
    _fleet.server.resume()
    with _fleet.redis() as client:
        if _fleet.leftovers(expiring=True):
            client.flushall()  # a test that fails must not fail the next one
        elif kept := _fleet.leftovers():
            client.delete(*kept)
