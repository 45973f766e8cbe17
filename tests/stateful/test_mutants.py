"""The state machine notices each seeded bug: it would notice one like it in a change."""

from importlib import resources

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from common.errors import BrokerRefused
from common.scripts import VERBS, parse
from tests.stateful.machine import QueueMachine
from tests.stateful.mutants import MUTANTS, Mutant
from tests.stateful.stores import Store

SEEDS = range(40)
EXAMPLES = 12
"""Of each seed: Hypothesis stays near what it has tried, so many short runs find more."""


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


def source(verb: str) -> str:
    return (resources.files("common.lua") / f"{verb}.lua").read_text(encoding="utf-8")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_machine_catches(mutant: Mutant) -> None:
    text = source(mutant.verb)
    assert text.count(mutant.before) == 1, "the seeded bug has no place in the script any more"
    script = parse(mutant.verb, text.replace(mutant.before, mutant.after))
    with Store(None, {mutant.verb: script}) as mutated:

        class Machine(QueueMachine):
            stores = (mutated,)

        with pytest.raises((AssertionError, BrokerRefused)):
            for number in SEEDS:
                run_state_machine_as_test(seed(number)(Machine), settings=SETTINGS)


def test_each_verb_that_changes_state_has_a_mutant() -> None:
    assert set(VERBS) - {m.verb for m in MUTANTS} <= {"heartbeat"}
