"""How many jobs run at once in an engine that tells nothing, where answers do not stream.

Without metrics, configured slots or first bytes, all that is known of a job is when it was sent,
how many were in flight then, and when it ended with how many tokens. The level N is learned from
that: so many are taken for started, and one more is sent, so that it shows whether there is
another slot. An engine that serves in order of arrival computes an answer of o tokens in
t = w + s·o seconds: s is a step, w what passes before the first token.

Seeking, until jobs are seen to wait for the first time, as in TCP's slow start (Jacobson, 1988).
A job shows that as many run as were before it, and itself, when it did not wait, that is
t <= s·(o + TOLERANCE·ō); ō and s = Σt/Σo are of late, of jobs known not to have waited. So does
the order of arrival: when a job ends, all sent before it have started. N is (1 + SEEK) times the
most that was shown, and one. It ends when a job beyond that was slow, or DOUBTS·N in a row showed
nothing. Where answers tell no length it never ends, and only the order shows.

Then, over each window of N jobs or more that were sent since N last changed:

- Lengths differ: w is the intercept of the least squares fit of t by o. By Little's law (1961) of
  x in flight x·(w - FIRST_S)/t̄ wait; N goes half the way to (1 + GROW) times the others, and one.
  This is TCP Vegas (Brakmo and Peterson, 1995) with the least time of a round trip, which that
  has to remember, estimated from the window itself. Where no more than this margin wait, the
  growth doubles from window to window, up to SEEK.
- Lengths are alike: w cannot be told from s·o, so N climbs by steps. Tokens a second are x·ō/t̄,
  again by Little's law. A step up was good if their logarithm rose by more than GAIN times that of
  x, a step down if it fell by less. This seeks the greatest power, throughput^(1/GAIN - 1) / time
  (Kleinrock, 1979), which is where jobs begin to wait. Above it N rests for HOLD windows.
- Lengths are alike and times are not: nothing can be told. N steps down to what the order shows.

N does not grow where it does not limit. Pure: time is an argument, in seconds. Each event costs
O(1), and only sums are kept.
"""

import math

START = 4
"""N before anything is known."""
LEVEL_MAX = 256
"""N is never more: an engine that does not serve in order of arrival would let it grow."""
SEEK = 1 / 4
TOLERANCE = 0.1
SLOW = 0.3
"""A job was slow where it took so much longer than s times the greater of o and ō."""
DOUBTS = 1 / 4
MEMORY = 1 / 3
"""ō and s are of about so many jobs, in parts of N."""
WINDOW_MIN = 8
"""Jobs in a window, at least."""
ALIKE = 0.1
"""Lengths are alike where their standard deviation is no more than this part of their mean."""
UNEVEN = 0.3
"""Times are not where theirs is more than this part."""
FIRST_S = 0.05
"""Seconds until the first token of a job that does not wait: its way there and a step or two."""
GROW = 0.05
HALF = 1 / 2
LIMITED = 0.9
"""N limits where so many of it were in flight."""
GAIN = 1 / 4
STEP = 0.05
"""Of N, at least one."""
MOVED = 0.02
"""Levels that differ by less cannot be compared."""
HOLD = 4


class _Window:
    """Sums over jobs: o tokens, t seconds, x in flight when they were sent."""

    def __init__(self) -> None:
        self.n = 0
        """How many."""
        self._o = self._t = self._x = self._oo = self._ot = self._tt = 0.0

    def add(self, o: float, t: float, x: int) -> None:
        self.n += 1
        self._o += o
        self._t += t
        self._x += x
        self._oo += o * o
        self._ot += o * t
        self._tt += t * t

    @property
    def inflight(self) -> float:
        """Mean of x."""
        return self._x / self.n

    @property
    def rate(self) -> float:
        """Tokens a second, of all in flight together."""
        return self.inflight * self._o / max(self._t, 1e-9)

    @property
    def alike(self) -> bool:
        """Whether the lengths are."""
        return self.n * self._oo <= (1 + ALIKE**2) * self._o**2

    @property
    def uneven(self) -> bool:
        """Whether the times are."""
        return self.n * self._tt > (1 + UNEVEN**2) * self._t**2

    def waits(self) -> float:
        """w - FIRST_S as a part of the mean time, 0 to 1. The lengths must differ."""
        o, t = self._o / self.n, self._t / self.n
        s = (self._ot / self.n - o * t) / (self._oo / self.n - o * o)
        return min(1.0, max(0.0, t - max(0.0, s) * o - FIRST_S) / max(t, 1e-9))


class Blind:
    """N of one backend."""

    def __init__(self) -> None:
        self._level = float(START)
        self._since = -math.inf
        """When it last changed."""
        self._seeking = True
        self._ordered = 0
        """The most that were ever shown to run at once by the order of arrival."""
        self._shown = 0
        """The same, or by a job that did not wait."""
        self._doubts = 0
        self._tokens = self._seconds = self._jobs = 0.0
        """Of late, of jobs that did not wait."""
        self._window = _Window()
        self._grow = GROW
        self._before: tuple[float, float] | None = None
        """Logarithms of the last window's x and tokens a second."""
        self._up = False
        self._hold = HOLD

    @property
    def level(self) -> int:
        """N, from 1 to LEVEL_MAX."""
        return int(self._level)

    def ran(self, n: int) -> None:
        """So many are known to have run at once."""
        self._ordered = max(self._ordered, n)
        if self._seeking and n > self._shown:
            self._show(n)

    def ended(
        self, now: float, sent_at: float, inflight: int, place: int, tokens: float | None
    ) -> None:
        """A job ended well.

        `inflight`: jobs in flight when it was sent, itself among them. `place`: those of them that
        the engine had to run before it or with it, itself too; fewer where others had just ended.
        `tokens`: of its answer; None: not told.
        """
        t = now - sent_at
        if not tokens or t < 0:
            return
        if self._seeking:
            self._seek(now, place, tokens, t)
        elif sent_at >= self._since:
            self._window.add(tokens, t, inflight)
            if self._window.n >= max(WINDOW_MIN, self._level):
                self._decide(now)

    def _show(self, n: int) -> None:
        self._shown, self._doubts = n, 0
        self._level = min(float(LEVEL_MAX), max(self._level, (1 + SEEK) * n + 1))

    def _seek(self, now: float, place: int, o: float, t: float) -> None:
        mean = self._tokens / self._jobs if self._jobs else o
        s = self._seconds / self._tokens if self._jobs else t / o
        if place > self._shown and t <= s * (o + TOLERANCE * mean):
            self._show(place)
        if place <= self._shown:
            keep = 1 - 1 / max(2.0, MEMORY * self._level)
            self._tokens = keep * self._tokens + o
            self._seconds = keep * self._seconds + t
            self._jobs = keep * self._jobs + 1
            return
        self._doubts += 1
        if t > s * (o + SLOW * max(o, mean)) or self._doubts > DOUBTS * self._level:
            self._seeking = False
            self._set(now, (1 + GROW) * self._shown + 1)

    def _decide(self, now: float) -> None:
        window, self._window = self._window, _Window()
        limited = window.inflight >= LIMITED * self._level
        if not window.alike:
            self._fit(now, window, limited)
        elif window.uneven:
            self._set(now, min(self._level, max(self._level - self._step(), self._ordered)))
        elif limited:
            self._climb(now, window)

    def _fit(self, now: float, window: _Window, limited: bool) -> None:
        x = window.inflight
        waiting = x * window.waits()
        few = waiting <= 1 + GROW * x
        if few and not limited:
            return
        self._grow = min(SEEK, 2 * self._grow) if few else GROW
        level = (1 + self._grow) * (x - waiting) + 1
        if limited or level < self._level:
            self._set(now, self._level + HALF * (level - self._level))

    def _climb(self, now: float, window: _Window) -> None:
        here = math.log(window.inflight), math.log(max(window.rate, 1e-9))
        before, self._before = self._before or here, here
        if self._hold:
            self._hold -= 1
            return
        moved = here[0] - before[0]
        if abs(moved) > MOVED and here[1] - before[1] <= GAIN * moved:
            self._up = not self._up
            if not self._up:
                self._hold = HOLD
                return
        level = self._level
        self._set(now, level + (self._step() if self._up else -self._step()))
        if self._level == level:  # it is the least or the greatest
            self._up, self._hold = not self._up, HOLD

    def _step(self) -> float:
        return max(1.0, STEP * self._level)

    def _set(self, now: float, level: float) -> None:
        level = min(float(LEVEL_MAX), max(1.0, level))
        if level != self._level:
            self._level, self._since = level, now
