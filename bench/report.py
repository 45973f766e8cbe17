"""Figures, what is asked of them, and how they are shown."""

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

Verdict = Literal["met", "stretch", "missed", ""]


class Budget(msgspec.Struct, frozen=True):
    """What is asked of a figure."""

    must: float
    stretch: float | None = None
    more_is_better: bool = False

    def verdict(self, value: float) -> Verdict:
        """How a figure stands; nan is missed."""
        if self.stretch is not None and self._holds(value, self.stretch):
            return "stretch"
        return "met" if self._holds(value, self.must) else "missed"

    def _holds(self, value: float, limit: float) -> bool:
        return value >= limit if self.more_is_better else value <= limit


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. `value` is what the budget judges, in `unit`."""

    name: str
    unit: str
    value: float
    direct: float | None = None
    """The same without Fairlane, in the same run."""
    through: float | None = None
    """And with it; for a difference, what it is the difference of."""
    budget: Budget | None = None

    @property
    def ratio(self) -> float | None:
        """With Fairlane over without."""
        if self.direct is None or self.through is None or not self.direct:
            return None
        return self.through / self.direct


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one part, and what must be known to read them."""

    name: str
    title: str
    figures: list[Figure]
    notes: list[str] = []


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def number(value: float | None) -> str:
    """Three digits that matter; whole numbers above a thousand."""
    if value is None:
        return ""
    if math.isnan(value):
        return "none"
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


HEADINGS = ("", "direct", "Fairlane", "ratio", "figure", "unit", "must", "stretch", "")


def table(parts: Sequence[Part]) -> str:
    """The report for people."""
    lines: list[str] = []
    for part in parts:
        rows = [HEADINGS, *(_row(f) for f in part.figures)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
        lines += [f"{part.name}: {part.title}"]
        for row in rows:
            cells = [
                cell.ljust(w) if i in (0, 5, 8) else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append(("  " + "  ".join(cells)).rstrip())
        lines += [f"  {note}" for note in part.notes] + [""]
    return "\n".join(lines)


def _row(f: Figure) -> tuple[str, ...]:
    ratio = "" if f.ratio is None else f"×{number(f.ratio)}"
    budget = f.budget
    must, stretch, verdict = "", "", ""
    if budget is not None:
        sign = "≥ " if budget.more_is_better else "≤ "
        must = sign + number(budget.must)
        stretch = "" if budget.stretch is None else sign + number(budget.stretch)
        verdict = budget.verdict(f.value)
    return (
        f.name, number(f.direct), number(f.through), ratio, number(f.value), f.unit, must, stretch,
        verdict,
    )  # fmt: skip


def write(
    path: Path, parts: Sequence[Part], *, cores: str, quick: bool, started: float, load: float,
    more: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """The same as JSON; `started` is Unix seconds, `load` the load average then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "started": started,
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "fairlane": version("fairlane"),
        "cores": cores,
        "load": load,
        "quick": quick,
        "parts": [
            {
                **msgspec.to_builtins(part),
                "figures": [
                    {
                        **msgspec.to_builtins(f),
                        "ratio": f.ratio,
                        "verdict": f.budget.verdict(f.value) if f.budget else "",
                    }
                    for f in part.figures
                ],
            }
            for part in parts
        ],
        **(more or {}),
    }
    path.write_text(json.dumps(data, indent=2) + "\n")
