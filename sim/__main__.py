"""`python -m sim`: compare policies of fairness, and admission with none, in virtual time."""

import click

from sim.admission.report import EXPERIMENTS
from sim.fairness import report
from sim.fairness.contest import compare
from sim.fairness.policies import POLICIES
from sim.fairness.scenarios import SCENARIOS


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--scenario", "names", multiple=True,
              type=click.Choice([*SCENARIOS, *EXPERIMENTS, "all"]),
              help="What to simulate; may be repeated. Without it: what there is.")  # fmt: skip
@click.option("--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)),
              help="Only these, and none; may be repeated.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="The first one.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1, 1_000),
              help="How many.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each scenario.")
def main(
    names: tuple[str, ...], policies: tuple[str, ...], seed: int, seeds: int, as_json: bool
) -> None:
    """Compare ways to share an LLM engine among users, on a model of the engine.

    The fair order, admission and turns are Fairlane's own. A seed gives the same figures again.
    """
    if not names:
        for known in SCENARIOS.values():
            click.echo(f"{known.name:15} {known.about}")
        for experiment in EXPERIMENTS.values():
            click.echo(f"{experiment.name:15} {experiment.about}")
        click.echo()
        for policy in POLICIES.values():
            click.echo(f"{policy.name:15} {policy.about}")
        return
    for name in (n for n in names if n in EXPERIMENTS):
        click.echo(f"{name}: {EXPERIMENTS[name].about} (seed {seed})")
        for line in EXPERIMENTS[name].lines(seed):
            click.echo(line)
    named = [SCENARIOS[n] for n in names if n in SCENARIOS]
    chosen = list(SCENARIOS.values()) if "all" in names else named
    used = range(seed, seed + seeds)
    for scenario in chosen:
        rows = compare(scenario, used, policies)
        show = report.as_json if as_json else report.table
        click.echo(show(scenario, used, rows) + ("" if as_json else "\n"))
    if chosen and not as_json:
        click.echo(report.legend(chosen))


if __name__ == "__main__":
    main(prog_name="python -m sim")
