"""The whole of Fairlane as processes: mixed load through three gateways, answers right to the byte.

Two dispatchers, two engines, two models, one Redis. Every answer is checked against what the
engine's settings and the request say it must be.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from sim.settings import EngineSettings
from tests.real.conftest import clean
from tests.support.load import Ask, Client, Got, Official, mixed, problem
from tests.support.processes import Fleet
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes

N = int(os.environ.get("FAIRLANE_TEST_N", "600"))
OPEN_MAX = 64
"""Requests open at once: more than the engines have slots, so that some always wait."""
USERS = ("alice", "bob", "carol", "dave")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with RedisServer() as server, Fleet(tmp_path_factory.mktemp("fleet"), server) as made:
        yield made
