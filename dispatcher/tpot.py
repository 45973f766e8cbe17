"""Time per output token of one engine, as the streams of own jobs show it. Time is an argument.

An engine computes one token of each of its sequences in one step, so the gaps between the chunks
of any stream tell how long its steps are. They are means over a window: one gap is one step, with
whatever prompts were computed in it. No chunks is not slow: it is nothing known. A chunk need not
be one token (deltas merge under load, speculative decoding gives several): how many it is, is
learned from the usage of streams that ended.

The engine's own histogram is the check. It counts everybody's tokens at their source, but comes
with the metrics: by a poll, and often by seconds, too late to steer by. The gaps are there at once,
but see own streams alone, and the network to them. So the gaps steer; where the two stay apart
for long, what is different is not the load, and the histogram counts (a slow network cannot be
cured by running less, and tokens that were never sent make chunks look like many).
"""

import math
from collections import deque

BUCKET_S = 0.25
BUCKETS = 8
WINDOW_S = BUCKET_S * BUCKETS
"""The mean is of this time, the bucket that is being filled included."""
CHUNKS_MIN = 20
"""Of fewer there is no mean, unless they are FEW_MIN whose gaps are FEW_S together: few streams of
a slow engine."""
FEW_MIN = 4
FEW_S = 1.0
HELD_UP_S = 1.0
"""After its client held a stream up, what gathered meanwhile is read within this time."""
LEARN = 0.9
"""What streams told of tokens a chunk counts so much less with each that follows."""
APART = 2.0
"""Gaps and histogram are apart when one is more than this times the other."""
APART_S = 10.0
"""Longer than metrics are late: then it is no change of load that only one has seen."""
TOKENS_MIN = 20
"""Of fewer a histogram has no mean."""
HISTORY_MAX = 256
"""Most readings of a histogram kept."""


class Tpot:
    """Mean gap between chunks over the last WINDOW_S. Holds BUCKETS sums, however many chunks."""

    def __init__(self) -> None:
        self._gaps = [0.0] * BUCKETS
        self._chunks = [0] * BUCKETS
        self._newest = -BUCKETS
        self._told = 0.0
        """Tokens that usages told, and the chunks that they came in."""
        self._told_in = 0.0

    def learn(self, tokens: int, chunks: int) -> None:
        """A stream that ended had so many tokens in so many chunks."""
        if tokens > 0 and chunks > 0:
            self._told = LEARN * self._told + tokens
            self._told_in = LEARN * self._told_in + chunks

    @property
    def tokens_a_chunk(self) -> float:
        """As learned; 1 where too little is known."""
        return self._told / self._told_in if self._told_in >= CHUNKS_MIN else 1.0

    def add(self, now: float, gap: float, chunks: int) -> None:
        """So many chunks were read at once, `gap` seconds after the one before them."""
        self._forget(now)
        at = self._newest % BUCKETS
        self._gaps[at] += gap
        self._chunks[at] += chunks

    def mean(self, now: float) -> float | None:
        """Seconds a token; None where too few chunks came of late."""
        gap = self.gap(now)
        return None if gap is None else gap / self.tokens_a_chunk

    def gap(self, now: float) -> float | None:
        """Seconds a chunk: about a step of the engine."""
        self._forget(now)
        chunks, gaps = sum(self._chunks), sum(self._gaps)
        if chunks < CHUNKS_MIN and (chunks < FEW_MIN or gaps < FEW_S):
            return None
        return gaps / chunks

    def _forget(self, now: float) -> None:
        newest = math.floor(now / BUCKET_S)
        for n in range(max(self._newest, newest - BUCKETS) + 1, newest + 1):
            self._gaps[n % BUCKETS], self._chunks[n % BUCKETS] = 0.0, 0
        self._newest = max(self._newest, newest)


class Chunks:
    """The chunks of one stream: which of its gaps are the engine's."""

    __slots__ = ("_chunks", "_from", "_last", "_tpot")

    def __init__(self, tpot: Tpot) -> None:
        self._tpot = tpot
        self._last: float | None = None
        self._from = -math.inf
        self._chunks = 0

    def came(self, now: float, chunks: int) -> None:
        """So many were read at once. The time to the first is no gap."""
        self._chunks += chunks
        if self._last is not None and now >= self._from:
            self._tpot.add(now, now - self._last, chunks)
        self._last = now

    def held_up(self, now: float) -> None:
        """Its client took nothing for a while, and nothing was read until now."""
        self._last, self._from = None, now + HELD_UP_S

    def over(self, tokens: int) -> None:
        """The stream is whole and had so many tokens, as the engine counts."""
        self._tpot.learn(tokens, self._chunks)


class Histogram:
    """Mean time per output token between readings of an engine's histogram."""

    def __init__(self, width: float = WINDOW_S) -> None:
        self._width = width
        self._read: deque[tuple[float, float, int]] = deque(maxlen=HISTORY_MAX)

    def read(self, now: float, seconds: float, count: int) -> None:
        """Sum and count since the engine's start; where one fell, it was started anew."""
        if self._read and (seconds < self._read[-1][1] or count < self._read[-1][2]):
            self._read.clear()
        self._read.append((now, seconds, count))
        while len(self._read) > 2 and self._read[1][0] <= now - self._width:
            self._read.popleft()

    def mean(self) -> float | None:
        """Seconds, over about the window before the last reading; None where too few are known."""
        if not self._read:
            return None
        (_, before, first), (_, after, last) = self._read[0], self._read[-1]
        return (after - before) / (last - first) if last - first >= TOKENS_MIN else None


class Signal:
    """What admission takes for the time per output token, of own gaps and the engine's word."""

    def __init__(self) -> None:
        self.gaps = Tpot()
        self.histogram = Histogram()
        self._apart_since: float | None = None

    def seconds(self, now: float, *, fresh: bool) -> float | None:
        """`fresh`: the histogram was read a short while ago. None: nothing is known."""
        gaps = self.gaps.mean(now)
        told = self.histogram.mean() if fresh else None
        if gaps is None or told is None or told / APART <= gaps <= told * APART:
            self._apart_since = None
            return told if gaps is None else gaps
        if self._apart_since is None:
            self._apart_since = now
        return told if now - self._apart_since >= APART_S else gaps
