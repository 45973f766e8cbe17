"""The verbs do what the model says, on the embedded broker and on a real Redis."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import QueueMachine
from tests.stateful.stores import Store
from tests.support.redis_server import RedisServer


def test_the_verbs_follow_the_model(redis_server: RedisServer) -> None:
    with Store(None) as fake, Store(redis_server.url) as real:

        class Machine(QueueMachine):
            stores = (fake, real)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=80,
                stateful_step_count=40,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
