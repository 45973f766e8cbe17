"""The table and the JSON of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from sim.fairness.contest import Row, Scenario

_COLUMNS: dict[str, tuple[str, str, str]] = {
    "p50": ("p50 s", ".3f", "time to a light user's first token, of all seeds' jobs"),
    "p95": ("p95 s", ".3f", ""),
    "p99": ("p99 s", ".3f", ""),
    "alone": ("x alone", ".1f", "p95 by the light users' p95 with nobody else there"),
    "alone99": ("p99 x alone", ".1f", "the same of p99"),
    "better": ("x better", ".1f", "p95 without gateway by this one's"),
    "tokens": ("tokens", ".1%", "weighted tokens (input + 2 output) that the engine gave, relative "
               "to no gateway"),
    "even": ("even", ".2f", "Jain's index over users of the speed at which their jobs were done"),
    "behind": ("behind", ".0f", "most weighted tokens that a user was ever behind the max-min fair "
               "division of what the engine gave"),
    "ratio": ("ratio", ".2f", "service of the first user by that of the second, mean of windows"),
    "ratio_min": ("least", ".2f", ""),
    "ratio_max": ("most", ".2f", ""),
    "jain": ("Jain", ".3f", "index of the two services, least of all windows"),
    "share": ("share", ".1%", "the first user's share of both services, most of all windows"),
    "rest": ("of the rest", ".1%", "batch's service by the capacity that the others left"),
    "hits": ("cached", ".1%", "share of the input that engines had computed before"),
    "uneven": ("uneven", ".3f", "most weighted tokens that an engine computed, by the mean of all"),
    "idle": ("when idle", ".1%", "batch's service by the capacity when nobody else asks"),
}  # fmt: skip


def table(scenario: Scenario, seeds: Sequence[int], rows: Sequence[Row]) -> str:
    """For people: a title, a line for each policy, and what the columns are."""
    head = ["policy", *(_COLUMNS[c][0] for c in scenario.columns)]
    lines = [[row.policy, *(_cell(row, c) for c in scenario.columns)] for row in rows]
    widths = [max(len(line[n]) for line in [head, *lines]) for n in range(len(head))]
    text = [f"{scenario.name}: {scenario.about} ({_seeds(seeds)})"]
    for line in [head, *lines]:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells))
    return "\n".join(text)


def legend(scenarios: Sequence[Scenario]) -> str:
    """What the columns of these scenarios' tables are."""
    shown = dict.fromkeys(c for s in scenarios for c in s.columns)
    return "\n".join(f"{_COLUMNS[c][0]}: {_COLUMNS[c][2]}" for c in shown if _COLUMNS[c][2])


def as_json(scenario: Scenario, seeds: Sequence[int], rows: Sequence[Row]) -> str:
    """For machines, one line: everything of each row; null where the scenario does not ask."""
    told = {"scenario": scenario.name, "seeds": list(seeds), "policies": list(rows)}
    return msgspec.json.encode(told).decode()


def _cell(row: Row, column: str) -> str:
    value = getattr(row, column)
    return "-" if math.isnan(value) else format(value, _COLUMNS[column][1])


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
