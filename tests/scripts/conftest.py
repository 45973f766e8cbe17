"""The scene of a script's test."""

import pytest

from common.broker import Broker
from tests.scripts.scene import Scene


@pytest.fixture
def scene(broker: Broker) -> Scene:
    return Scene(broker)
