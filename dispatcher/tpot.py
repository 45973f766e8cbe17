"""Time per output token of one engine, as the streams of own jobs show it. Time is an argument.

An engine computes one token of each of its sequences in one step, so the gaps between the chunks
of any stream tell how long its steps are. They are means over a window: one gap is one step, with
whatever prompts were computed in it. No chunks is not slow: it is nothing known.
"""

import math

BUCKET_S = 0.25
BUCKETS = 8
WINDOW_S = BUCKET_S * BUCKETS
"""The mean is of this time, the bucket that is being filled included."""
CHUNKS_MIN = 20
"""Of fewer there is no mean."""
HELD_UP_S = 1.0
"""After its client held a stream up, what gathered meanwhile is read within this time."""


class Tpot:
    """Mean gap between chunks over the last WINDOW_S. Holds BUCKETS sums, however many chunks."""

    def __init__(self) -> None:
        self._gaps = [0.0] * BUCKETS
        self._chunks = [0] * BUCKETS
        self._newest = -BUCKETS

    def add(self, now: float, gap: float, chunks: int) -> None:
        """So many chunks were read at once, `gap` seconds after the one before them."""
        self._forget(now)
        at = self._newest % BUCKETS
        self._gaps[at] += gap
        self._chunks[at] += chunks

    def mean(self, now: float) -> float | None:
        """Seconds; None where too few chunks came of late."""
        self._forget(now)
        chunks = sum(self._chunks)
        return sum(self._gaps) / chunks if chunks >= CHUNKS_MIN else None

    def _forget(self, now: float) -> None:
        newest = math.floor(now / BUCKET_S)
        for n in range(max(self._newest, newest - BUCKETS) + 1, newest + 1):
            self._gaps[n % BUCKETS], self._chunks[n % BUCKETS] = 0.0, 0
        self._newest = max(self._newest, newest)


class Chunks:
    """The chunks of one stream: which of its gaps are the engine's."""

    __slots__ = ("_from", "_last", "_tpot")

    def __init__(self, tpot: Tpot) -> None:
        self._tpot = tpot
        self._last: float | None = None
        self._from = -math.inf

    def came(self, now: float, chunks: int) -> None:
        """So many were read at once. The time to the first is no gap."""
        if self._last is not None and now >= self._from:
            self._tpot.add(now, now - self._last, chunks)
        self._last = now

    def held_up(self, now: float) -> None:
        """Its client took nothing for a while, and nothing was read until now."""
        self._last, self._from = None, now + HELD_UP_S
