"""`python -m bench`: every figure of Fairlane in one run, beside the same without it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import click
import uvloop

from bench.client import Target
from bench.contest import Plan
from bench.load import Goal
from bench.report import Part, table, write
from bench.target import against

OUT = Path(__file__).with_name("out")
NAMES = ("latency", "short", "streams", "memory", "flood", "verbs", "scrape")
BUSY = 0.7
"""A load average above it means that this machine is not idle."""
PART_S = 900.0
"""No part takes longer, whatever happens in it."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Short and small: shows that it works, no more.")
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="This part; may be repeated.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the JSON.")
@click.option("--target", metavar="URL", help="Flood the OpenAI-compatible server that is there.")
@click.option("--direct", metavar="URL", default="", help="With --target: its engine, as well.")
@click.option("--model", default="sim", show_default=True, help="With --target: what to ask for.")
@click.option("--key", default="", help="With --target: key of the user who floods.")
@click.option("--light-key", default="", help="With --target: key of the light user.")
@click.option("--requests", default=250, show_default=True, type=click.IntRange(1, 10_000),
              help="With --target: size of the flood.")  # fmt: skip
def main(
    quick: bool,
    only: tuple[str, ...],
    out: Path | None,
    target: str | None,
    direct: str,
    model: str,
    key: str,
    light_key: str,
    requests: int,
) -> None:
    """Measure Fairlane on this machine, with a Redis, engines and load of its own."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    started, load = time.time(), os.getloadavg()[0]
    if target is not None:
        try:
            goals = [Goal(Target.of(target), key), Goal(Target.of(target), light_key or key)]
        except ValueError as e:
            raise click.UsageError(str(e)) from None
        plan = Plan(
            model=model, heavy=goals[0], light=goals[1], requests=requests, exact=False,
            users=not light_key,
        )  # fmt: skip
        parts, cores = [_run(lambda: against(target, direct, plan))], "a server elsewhere"
        click.echo(table(parts))
    else:
        parts, cores = here(only or NAMES, quick)
    name = time.strftime("%Y%m%d-%H%M%S.json", time.localtime(started))
    path = out or OUT / name
    write(path, parts, cores=cores, quick=quick, started=started, load=load)
    click.echo(f"{len(parts)} parts in {time.time() - started:.0f} s; written to {path}")


def here(only: Sequence[str], quick: bool) -> tuple[list[Part], str]:
    """The parts on this machine, each shown when it is done; and on which cores."""
    try:
        from bench import fleet
        from bench.parts import PARTS
    except ModuleNotFoundError as e:
        sys.exit(f"bench: {e}: run it from a checkout with the development tools (make bench)")
    assert tuple(PARTS) == NAMES
    cores = fleet.choose_cores()
    fleet.pin(os.getpid(), cores.load)
    if (files := fleet.raise_file_limit()) < fleet.FILES_WANTED:
        click.echo(f"bench: only {files} open files are allowed; part `memory` may need more")
    load = os.getloadavg()[0]
    busy = ": other work is running, so the figures mean little" if load > BUSY else ""
    click.echo(f"{cores}; load average {load:.1f} at the start{busy}\n")
    parts = []
    for name in NAMES:
        if name in only:
            parts.append(_run(lambda name=name: PARTS[name](cores, quick=quick)))  # type: ignore[misc]
            click.echo(table(parts[-1:]))
    return parts, str(cores)


def _run(part: Callable[[], Coroutine[Any, Any, Part]]) -> Part:
    async def limited() -> Part:
        async with asyncio.timeout(PART_S):
            return await part()

    return uvloop.run(limited())


if __name__ == "__main__":
    main()
