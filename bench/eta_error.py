"""How true the times were that waiting streams were told. Pure."""

import re
import statistics
from collections.abc import Iterable, Sequence

import msgspec

_COMMENT = re.compile(rb"^: queued position=(\d+)(?: eta=(\d+))?$", re.M)
REAL_S_MIN = 1.0
"""Times are told in whole seconds: an error is relative to no less."""


class Told(msgspec.Struct, frozen=True):
    """One comment of a waiting stream."""

    at: float
    """When it was read, in seconds."""
    position: int
    eta_s: int | None
    """None where no time was told."""


def told(reads: Iterable[tuple[float, bytes]]) -> list[Told]:
    """The comments in what was read of a stream: (when, bytes), each of whole lines."""
    return [
        Told(at, int(position), int(eta) if eta else None)
        for at, data in reads
        for position, eta in _COMMENT.findall(data)
    ]


def errors(comments: Sequence[Told], turn_at: float) -> list[float]:
    """|told - real| / real of each comment that told a time, given when the job's turn came."""
    return [
        abs(c.eta_s - (turn_at - c.at)) / max(turn_at - c.at, REAL_S_MIN)
        for c in comments
        if c.eta_s is not None
    ]


def median(of: Sequence[float]) -> float:
    """The median error; NaN of none."""
    return statistics.median(of) if of else float("nan")
