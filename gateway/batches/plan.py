"""What is decided about a batch: which lines go on the queue and how, what becomes of each that
ended, and when results are written down. Pure: time is an argument.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from common.batch_output import answered
from common.keys import CLASSES
from common.outcomes import Outcome

ATTEMPT_MAX = 9
"""A line is put on the queue at most so often again, whatever the reasons."""
ESCALATED_LINES = 64
"""Most lines ahead in a class that others use too."""
WEIGHT_LEAST = 0.05
"""Of the key's weight, at the beginning of the escalation."""
WAIT_MS_LEAST = 1_000
ROUND_LINES = 256
"""Lines whose results are written down together, where there are so many."""
CHUNK_LINES = 256
"""Put on the queue at once."""
PART_BYTES = 8 << 20
"""A part is written once it has so many."""
SLICE, SLICE_MAX = 8, 64
"""Answers read at once of one batch: the first time, and at most."""
HOLD_S = (0.5, 30.0)
HOLD_SHARE = 1 / 500
"""Fewer are written down after this part of the batch's age, so that a slow batch of many days
has some thousand parts, and a short one is up to date."""

Verdict = Literal["output", "error", "failed", "again", "moved", "left"]


class Done:
    """Which lines have their result written down: a bitmap as Redis' SETBIT makes it."""

    def __init__(self, bits: bytes = b"") -> None:
        self._bits = bytearray(bits)
        self.count = sum(byte.bit_count() for byte in bits)

    def __contains__(self, line: int) -> bool:
        at = line >> 3
        return at < len(self._bits) and bool(self._bits[at] & (0x80 >> (line & 7)))

    def add(self, line: int) -> None:
        """Once more changes nothing."""
        if line in self:
            return
        at = line >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits)))
        self._bits[at] |= 0x80 >> (line & 7)
        self.count += 1

    def undone(self, start: int, end: int) -> Iterator[int]:
        """The others from `start` up to `end`."""
        return (line for line in range(start, end) if line not in self)


def job_id(batch: str, line: int, attempt: int) -> str:
    """The job of a line: the same whoever puts it on the queue, so that it is there once. `batch`:
    the random part of its id."""
    return f"{batch}-{line:x}-{attempt}"


def read_job_id(batch: str, job: str) -> tuple[int, int] | None:
    """(line, attempt); None where it is none of this batch's."""
    name, _, rest = job.partition("-")
    line, _, attempt = rest.partition("-")
    try:
        found = int(line, 16), int(attempt)
    except ValueError:
        return None
    return found if name == batch and job == job_id(batch, *found) else None


class Lane(msgspec.Struct, frozen=True):
    """How lines go on the queue just now."""

    cls: str
    weight: float
    wait_ms: int
    most: int
    """Lines ahead."""


def lane(
    now_ms: int, start_ms: int, end_ms: int, escalate_at: float, default: str, weight: float,
    most: int,
) -> Lane:  # fmt: skip
    """Of class batch; once `escalate_at` of the window is over, of the key's default class with a
    weight that rises to the key's. What waits in class batch then comes back by its deadline, and
    goes on so."""
    at_ms = start_ms + (end_ms - start_ms) * escalate_at
    cls = CLASSES[max(CLASSES.index(default), CLASSES.index("standard"))]
    if cls == "batch" or now_ms < at_ms or at_ms >= end_ms:
        until = end_ms if cls == "batch" else at_ms
        return Lane("batch", weight, max(WAIT_MS_LEAST, int(until - now_ms)), most)
    share = min(1.0, max(WEIGHT_LEAST, (now_ms - at_ms) / (end_ms - at_ms)))
    wait_ms = max(WAIT_MS_LEAST, end_ms - now_ms)
    return Lane(cls, weight * share, wait_ms, min(most, ESCALATED_LINES))


def verdict(
    outcome: Outcome, status: int | None, attempt: int, retries: int, *, stopping: bool
) -> Verdict:
    """What becomes of a line whose job has ended. `status`: of the engine's answer, None without
    one; `stopping`: the batch is given up, or its window is over.

    `output`, `error`: its answer goes into that file. `failed`: it had none, which goes into the
    error file. `again`: it is tried again. `moved`: the same, for it was never tried. `left`: what
    the batch leaves undone is written down at its end.
    """
    if outcome in (Outcome.FINISHED, Outcome.REFUSED) and status is not None:
        return "output" if answered(status) else "error"
    if outcome in (Outcome.CANCELLED, Outcome.DEADLINE, Outcome.GATEWAY_DEAD):
        if stopping:
            return "left"
        return "moved" if attempt < ATTEMPT_MAX else "failed"
    if stopping or attempt >= min(retries, ATTEMPT_MAX):
        return "failed"
    return "again"


def due(lines: int, held_s: float, age_s: float) -> bool:
    """Whether results are written down now: `lines` of them, the first `held_s` old."""
    if not lines:
        return False
    low, high = HOLD_S
    return lines >= ROUND_LINES or held_s >= min(high, max(low, age_s * HOLD_SHARE))


def next_slice(now: int, answers: int, size: int) -> int:
    """How many answers are read at once after `answers` had `size` bytes: as many as fill a part,
    up to twice those before."""
    fit = PART_BYTES * answers // size if size else SLICE_MAX
    return max(1, min(SLICE_MAX, now * 2, fit))


def room(lines: int, size: int, lines_max: int, bytes_max: int) -> tuple[int, int]:
    """(lines, bytes) that may be put on the queue beside those that are there; none while it is
    nearly full, so that many are put there at once. A line larger than all there may be goes
    alone."""
    left = max(0, lines_max - lines)
    if left < min(CHUNK_LINES, lines_max) // 4:
        return 0, 0
    return left, bytes_max if not lines else max(0, bytes_max - size)
