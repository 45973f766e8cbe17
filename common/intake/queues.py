"""The queues of all models, each with the policy that its settings name."""

from common.broker import Broker
from common.intake.policy import Policies
from common.queue import Queue

KEPT_MAX = 1_000
"""Most queues kept; that of a model beyond is made anew for each call."""


class Queues:
    """One `Queue` a model, for whoever of a gateway calls a verb."""

    def __init__(self, broker: Broker, policies: Policies) -> None:
        self._broker = broker
        self._policies = policies
        self._kept: dict[str, Queue] = {}

    def of(self, model: str) -> Queue:
        """The verbs of a model, by its own name."""
        queue = self._kept.get(model)
        if queue is None:
            queue = Queue(self._broker, model, self._policies.of(model).order)
            if len(self._kept) < KEPT_MAX:
                self._kept[model] = queue
        return queue
