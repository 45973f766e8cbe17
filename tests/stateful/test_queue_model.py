"""The verbs do what the model says, on the embedded broker and on a real Redis."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from common.keys import Policy
from tests.stateful.machine import QueueMachine
from tests.stateful.stores import Store
from tests.support.redis_server import RedisServer

EXAMPLES, STEPS = 12, 40
"""Hypothesis stays near what it has tried, so several short runs see more than a long one."""


@pytest.mark.parametrize(("policy", "runs"), [("weighted", 6), ("strict", 2)])
def test_the_verbs_follow_the_model(redis_server: RedisServer, policy: Policy, runs: int) -> None:
    with Store(None, policy=policy) as fake, Store(redis_server.url, policy=policy) as real:
        used = policy

        class Machine(QueueMachine):
            stores = (fake, real)
            policy = used

        for _ in range(runs):
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
