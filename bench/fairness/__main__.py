"""`python -m bench.fairness`: who waits and who gets what, direct and through Fairlane."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import msgspec
import uvloop

from bench.fairness.run import Place, all_sides
from bench.fairness.scenario import SLOTS, Scenario, Seen
from bench.fairness.shares import ingress, shares
from bench.fairness.svg import Column, picture
from bench.fairness.there import there
from bench.fairness.waits import flood, slice_of_trace
from bench.report import Part, table, write

OUT = Path(__file__).parents[1] / "out"
SCENARIOS: Mapping[str, Callable[..., Scenario]] = {
    "flood": flood, "slice": slice_of_trace, "shares": shares, "ingress": ingress,
}  # fmt: skip
"""Each takes the seed and the keywords `quick` and `slots`."""
BUSY = 0.7
"""A load average above it means that this machine is not idle."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Short and small: shows that it works, no more.")
@click.option("--scenario", "names", multiple=True, type=click.Choice(list(SCENARIOS)),
              help="This one; may be repeated.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the sizes.")
@click.option("--slots", default=SLOTS, show_default=True, type=click.IntRange(4, 1_000),
              help="Of the engine: floods and open requests are made for so many.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for the JSON and the pictures.")  # fmt: skip
@click.option("--target", metavar="URL", help="The OpenAI-compatible gateway that is there.")
@click.option("--direct", metavar="URL", default="", help="With --target: the engine behind it.")
@click.option("--model", default="sim", show_default=True, help="With --target: what to ask for.")
@click.option("--key", "keys", multiple=True,
              help="With --target: a user's key, the heavy user's first; repeated.")  # fmt: skip
@click.option("--exact", is_flag=True,
              help="With --target: ask for exact lengths (`ignore_eos`), as vLLM can.")  # fmt: skip
def main(
    quick: bool,
    names: tuple[str, ...],
    seed: int,
    slots: int,
    out: Path | None,
    target: str | None,
    direct: str,
    model: str,
    keys: tuple[str, ...],
    exact: bool,
) -> None:
    """Show what each user waits for and gets, with engine and Fairlane started for it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    started, load = time.time(), os.getloadavg()[0]
    if target is None:
        place, cores, redis = _own(load)
    else:
        try:
            place = there(target, direct, model=model, keys=keys, exact=exact)
        except ValueError as e:
            raise click.UsageError(str(e)) from None
        cores, redis = "servers elsewhere", ""
    chosen = [
        SCENARIOS[n](seed, quick=quick, slots=slots) for n in SCENARIOS if not names or n in names
    ]
    if target is not None:
        chosen = [s for s in chosen if not all(side.ours for side in s.sides)]
    folder = out or OUT / time.strftime("fairness-%Y%m%d-%H%M%S", time.localtime(started))
    done = [(scenario, uvloop.run(_shown(scenario, place))) for scenario in chosen]
    parts = [_part(scenario, runs) for scenario, runs in done]
    more = {
        "seed": seed,
        "slots": slots,
        "redis": redis,
        "runs": {s.name: msgspec.to_builtins(runs) for s, runs in done},
    }
    write(
        folder / "fairness.json", parts, cores=cores, quick=quick, started=started, load=load,
        more=more,
    )  # fmt: skip
    _draw(folder, done)
    took = time.time() - started
    click.echo(f"{len(parts)} scenarios in {took:.0f} s; written to {folder}")


def _own(load: float) -> tuple[Place, str, str]:
    """Where scenarios are run here, on which cores, and with which Redis."""
    try:
        from bench import fleet
        from bench.fairness.here import here
    except ModuleNotFoundError as e:
        sys.exit(f"bench: {e}: run it from a checkout with the development tools (make bench)")
    cores = fleet.choose_cores()
    fleet.pin(os.getpid(), cores.load)
    fleet.raise_file_limit()
    busy = ": other work is running, so the figures mean little" if load > BUSY else ""
    click.echo(f"{cores}; load average {load:.1f} at the start{busy}\n")
    return here(cores), str(cores), fleet.redis_version()


async def _shown(scenario: Scenario, place: Place) -> dict[str, Seen]:
    runs = await all_sides(scenario, place, lambda text: click.echo(f"  {text} …", err=True))
    click.echo(table([_part(scenario, runs)]))
    return runs


def _part(scenario: Scenario, runs: Mapping[str, Seen]) -> Part:
    failed = {side: seen.failed for side, seen in runs.items() if seen.failed}
    return Part(
        name=scenario.name, title=scenario.title, figures=scenario.figures(runs),
        notes=[*scenario.notes, f"without a good answer: {failed or 0}"],
    )  # fmt: skip


def _draw(folder: Path, done: Sequence[tuple[Scenario, Mapping[str, Seen]]]) -> None:
    """A picture of each scenario that has one, and one of flood and shares together."""
    columns: dict[str, list[Column]] = {
        s.name: s.columns(runs) for s, runs in done if s.columns is not None and runs
    }
    for name, drawn in columns.items():
        (folder / f"{name}.svg").write_text(picture(drawn))
    if {"flood", "shares"} <= columns.keys():
        (folder / "fairness.svg").write_text(picture([*columns["flood"], *columns["shares"]]))


if __name__ == "__main__":
    main(prog_name="python -m bench.fairness")
