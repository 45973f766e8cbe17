"""The traces that come with the package: see traces/README.md for their sources and licences."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources

import msgspec

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
