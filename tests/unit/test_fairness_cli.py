"""`python -m sim`: what there is, a table, a line of JSON."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sim.__main__ import main
from sim.admission.report import EXPERIMENTS
from sim.fairness import report, traces
from sim.fairness.policies import POLICIES
from sim.fairness.scenarios import SCENARIOS


def told(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_without_a_scenario_it_says_what_there_is() -> None:
    lines = [line.split()[0] for line in told().splitlines() if line]
    assert lines == [*SCENARIOS, *EXPERIMENTS, *POLICIES]


def test_a_table_has_a_line_for_each_policy_and_explains_its_columns() -> None:
    text = told("--scenario", "flood", "--policy", "fair", "--seed", "3")
    title, head, direct, fair, *rest = text.splitlines()
    assert title.startswith("flood: A asks") and title.endswith("(seed 3)")
    assert head.split()[:3] == ["policy", "p50", "s"]
    assert direct.split()[0] == "direct" and fair.split()[0] == "fair"
    assert "100.0%" in direct
    assert any(line.startswith("x better: ") for line in rest)


def test_json_has_everything_and_the_same_figures() -> None:
    row = ("--scenario", "flood", "--policy", "fair", "--seeds", "2", "--json")
    found = json.loads(told(*row))
    assert found["scenario"] == "flood" and found["seeds"] == [0, 1]
    assert [p["policy"] for p in found["policies"]] == ["direct", "fair"]
    assert found["policies"][1]["better"] > 10
    assert found["policies"][1]["share"] is None
    assert told(*row) == told(*row)


@pytest.mark.parametrize("bad", [("--scenario", "x"), ("--policy", "x"), ("--seeds", "0")])
def test_what_is_unknown_is_refused(bad: tuple[str, str]) -> None:
    assert CliRunner().invoke(main, bad).exit_code == 2


def test_every_scenario_names_policies_and_columns_that_there_are() -> None:
    for scenario in SCENARIOS.values():
        assert set(scenario.policies) <= set(POLICIES)
        assert report.legend([scenario])
        case = scenario.make(1)
        times = [a.at for a in case.arrivals]
        assert times == sorted(times)
        assert case.light & {a.user for a in case.arrivals}


def test_the_traces_come_with_the_package() -> None:
    assert [len(traces.azure(n)) for n in range(traces.SLICES)] == [1445, 1510, 2124, 1839, 1255]
    assert len(traces.servegen()) == 3_604
    assert len(traces.arena()) == 1_500
    assert len(traces.mooncake("conversation", 1)) == 6_000
    assert len(traces.mooncake("synthetic", 0)) == 3_993
    folder = Path(traces.__file__).with_name("traces")
    assert sum(f.stat().st_size for f in folder.iterdir()) < 500_000
    named = (folder / "README.md").read_text()
    assert all(f.name in named for f in folder.glob("*.csv"))
