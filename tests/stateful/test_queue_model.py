"""The verbs do what the model says, on the embedded broker and on a real Redis."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import QueueMachine
from tests.stateful.stores import Store
from tests.support.redis_server import RedisServer

RUNS, EXAMPLES, STEPS = 7, 12, 40
"""Hypothesis stays near what it has tried, so several short runs see more than a long one."""


def test_the_verbs_follow_the_model(redis_server: RedisServer) -> None:
    with Store(None) as fake, Store(redis_server.url) as real:

        class Machine(QueueMachine):
            stores = (fake, real)

        for _ in range(RUNS):
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=EXAMPLES,
                    stateful_step_count=STEPS,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
