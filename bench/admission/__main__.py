"""`python -m bench.admission`: what waits and runs in engines, direct and through Fairlane."""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
import uvloop

from bench.admission.stage import Look, Play, Side, plays, run
from bench.fairness.svg import BLUE, ORANGE, Column, Mark, Panel, Series, picture, step
from bench.fleet import Cores, choose_cores, raise_file_limit
from bench.report import Figure, Part, percentile, table, write

OUT = Path(__file__).parents[1] / "out"
COLORS = (BLUE, ORANGE)
MEASURES = {
    "waiting": "Requests in the engine's own queue",
    "running": "Requests that run",
    "tpot_ms": "Time per output token, ms",
    "tokens_per_s": "Output tokens a second",
}
NAMES = tuple(p.name for p in plays(quick=True))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Short and small: shows that it works, no more.")
@click.option("--play", "names", multiple=True, type=click.Choice(NAMES),
              help="This one; may be repeated.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for the JSON and the pictures.")  # fmt: skip
def main(quick: bool, names: tuple[str, ...], out: Path | None) -> None:
    """Show what a step of load, a slow engine and a dead engine do, over time."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    started, load = time.time(), os.getloadavg()[0]
    raise_file_limit()
    cores = choose_cores()
    folder = out or OUT / time.strftime("admission-%Y%m%d-%H%M%S", time.localtime(started))
    done = []
    for play in plays(quick=quick):
        if not names or play.name in names:
            click.echo(f"{play.name}: {play.about}", err=True)
            done.append((play, uvloop.run(_sides(play, cores))))
    parts = [part(play, sides) for play, sides in done]
    write(
        folder / "admission.json", parts, cores=str(cores), quick=quick, started=started, load=load,
        more={"runs": {p.name: msgspec.to_builtins(sides) for p, sides in done}},
    )  # fmt: skip
    for play, sides in done:
        (folder / f"{play.name}.svg").write_text(drawn(play, sides))
    click.echo(table(parts))
    click.echo(f"written to {folder}")


async def _sides(play: Play, cores: Cores) -> list[Side]:
    return [await run(play, side, cores) for side in play.sides]


def part(play: Play, sides: Sequence[Side]) -> Part:
    """The figures of one play; a side's are of all its engines."""
    figures, notes = [], [play.about]
    for side in sides:
        every = [look for looks in side.looks for look in looks]
        tokens = [math.fsum(x) for x in zip(*_columns(side.looks, "tokens_per_s"), strict=False)]
        waiting = [x.waiting for x in every if not math.isnan(x.waiting)]
        tpot = [x.tpot_ms for x in every if not math.isnan(x.tpot_ms)]
        rows = [
            ("waiting in an engine, p95", "requests", percentile(waiting, 0.95)),
            ("first token, p50", "s", percentile(side.firsts, 0.5)),
            ("first token, p95", "s", percentile(side.firsts, 0.95)),
            ("time per output token, p95", "ms", percentile(tpot, 0.95)),
            ("output tokens", "1/s", statistics.mean(tokens) if tokens else math.nan),
        ]
        figures += [Figure(name=f"{side.name}: {n}", unit=u, value=v) for n, u, v in rows]
        notes += [f"{side.name}: {n} requests: {what}" for what, n in side.failed.items()]
    return Part(name=play.name, title=play.about, figures=figures, notes=notes)


def _columns(looks: Sequence[Sequence[Look]], name: str) -> list[list[float]]:
    return [[getattr(look, name) for look in seen] for seen in looks]


def drawn(play: Play, sides: Sequence[Side]) -> str:
    """The picture of one play: a column for each measure, a panel for each side."""
    return picture([_column(play, sides, name, title) for name, title in MEASURES.items()])


def _column(play: Play, sides: Sequence[Side], name: str, title: str) -> Column:
    every = [v for side in sides for seen in _columns(side.looks, name) for v in seen]
    most = max((v for v in every if not math.isnan(v)), default=0.0) or 1.0
    gap = step(most)
    target = play.tpot_ms if name == "tpot_ms" else None
    marks = [] if target is None else [Mark(target, f"tpot_ms = {target:g}")]
    panels = [
        Panel(
            side.name,
            [
                Series(f"engine {n + 1}", COLORS[n], [(x.at, getattr(x, name)) for x in seen], True)
                for n, seen in enumerate(side.looks)
            ],
            marks,
        )
        for side in sides
    ]
    return Column(
        title=title, x_label="seconds", x_max=play.lasts_s, y_min=0.0, y_max=1.05 * most,
        y_ticks=[(n * gap, f"{n * gap:g}") for n in range(math.floor(most / gap) + 1)],
        panels=panels,
    )  # fmt: skip


if __name__ == "__main__":
    main(prog_name="python -m bench.admission")
