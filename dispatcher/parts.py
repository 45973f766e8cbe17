"""What all models of one dispatcher process share."""

from collections.abc import Callable

import msgspec

from common.broker import Broker
from common.metrics import DispatcherMetrics
from common.publish import Publisher
from common.settings import DispatcherSettings
from dispatcher.relay import Relay
from dispatcher.runs import Runs


class Parts(msgspec.Struct, frozen=True):
    """What all models of one dispatcher process share."""

    broker: Broker
    owner: str
    settings: DispatcherSettings
    runs: Runs
    relay: Relay
    publisher: Publisher
    metrics: DispatcherMetrics
    known: Callable[[str], bool]
    """Whether `fl:models` has held this model for a while."""
