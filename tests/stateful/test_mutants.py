"""The state machine notices each seeded bug: it would notice one like it in a change."""

from importlib import resources

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from common.errors import BrokerRefused
from common.scripts import VERBS, Script, parse
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


def source(name: str) -> str:
    return (resources.files("common.lua") / f"{name}.lua").read_text(encoding="utf-8")


def planted(mutant: Mutant) -> dict[str, Script]:
    """The verb with the bug; or all verbs, where the bug is in a library."""
    text = source(mutant.verb)
    assert text.count(mutant.before) == 1, "the seeded bug has no place in the script any more"
    text = text.replace(mutant.before, mutant.after)
    if mutant.verb.startswith("lib/"):
        given = {mutant.verb.removeprefix("lib/"): text}
        return {verb: parse(verb, source(verb), given) for verb in VERBS}
    return {mutant.verb: parse(mutant.verb, text)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_machine_catches(mutant: Mutant) -> None:
    with Store(None, planted(mutant)) as mutated:

        class Machine(QueueMachine):
            stores = (mutated,)

        with pytest.raises((AssertionError, BrokerRefused)):
            for number in SEEDS:
                run_state_machine_as_test(seed(number)(Machine), settings=SETTINGS)


def test_each_verb_that_changes_state_has_a_mutant() -> None:
    none_of_a_models = {"heartbeat", "describe", *(v for v in VERBS if v.startswith("batch_"))}
    assert set(VERBS) - {m.verb for m in MUTANTS} <= none_of_a_models
