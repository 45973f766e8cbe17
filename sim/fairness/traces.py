"""The traces that come with the package: see traces/README.md for their sources and licences."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from importlib import resources

import msgspec

BLOCK_TOKENS = 512
"""Of Mooncake's traces."""
SLICES = 5
SLICE_S = 300.0
"""Of the Azure trace."""


class Row(msgspec.Struct, frozen=True):
    """One request of a trace."""

    at: float
    input: int
    output: int
    user: str = ""
    fcfs_s: float = 0.0
    """Measured time to its first token, first in first out; only of the arena trace."""
    vtc_s: float = 0.0
    """The same with the Virtual Token Counter in the engine."""
    blocks: tuple[int, ...] = ()
    """Of its prompt, 512 tokens each: those of equal number, and all before them, are equal. Only
    of Mooncake's traces."""


def _lines(name: str) -> Iterator[dict[str, str]]:
    with (resources.files("sim.fairness") / "traces" / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def azure(number: int) -> list[Row]:
    """Slice 0 to 4 of the conversation trace, 300 s long."""
    return [
        Row(float(r["at"]), int(r["input"]), int(r["output"]))
        for r in _lines("azure-conv.csv")
        if r["slice"] == str(number)
    ]


def servegen() -> list[Row]:
    """Half an hour of clients of ServeGen's m-large."""
    return [
        Row(float(r["at"]), int(r["input"]), int(r["output"]), r["user"])
        for r in _lines("servegen-m-large.csv")
    ]


def arena() -> list[Row]:
    """600 s of the Chatbot Arena as the VTC artifact has it."""
    return [
        Row(float(r["at"]), int(r["input"]), int(r["output"]), r["user"], float(r["fcfs_s"]),
            float(r["vtc_s"]))
        for r in _lines("vtc-arena.csv")
    ]  # fmt: skip


def mooncake(name: str, crowd: int) -> list[Row]:
    """Mooncake's `conversation` or `synthetic` trace. Its users are its sessions: requests that
    share more than `crowd` blocks. Those of one instant (the first trace has one every 3 s) are
    spread out evenly until the next."""
    rows: list[Row] = []
    new = 0
    for n, r in enumerate(_lines(f"mooncake-{name}.csv")):
        size = -(-int(r["input"]) // BLOCK_TOKENS)
        like = rows[int(r["like"])] if r["like"] else None
        same = int(r["same"] or 0)
        blocks = (*(like.blocks[:same] if like else ()), *range(new, new + size - same))
        new += size - same
        user = like.user if like and same > crowd else f"s{n}"
        at, tokens = int(r["at_ms"]) / 1000, (int(r["input"]), int(r["output"]))
        rows.append(Row(at, *tokens, user, blocks=blocks))
    return _spread(rows)


def _spread(rows: list[Row]) -> list[Row]:
    """Rows of one time evenly over the time until the next."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda r: r.at)]
    ends = [*(group[0].at for group in groups[1:]), rows[-1].at]
    return [
        msgspec.structs.replace(row, at=row.at + (end - row.at) * n / len(group))
        for group, end in zip(groups, ends, strict=True)
        for n, row in enumerate(group)
    ]
