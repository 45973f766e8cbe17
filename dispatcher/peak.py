"""The greatest value of a step function over a moving window. Time is an argument."""

from collections import deque
from collections.abc import Sequence


class Peak:
    """The greatest value of a step function over the last `width` seconds.

    Keeps falling values only, so never more than the greatest value it was given.
    """

    def __init__(self, width: float) -> None:
        self._width = width
        self._value = 0
        self.beside: Sequence[Peak] = ()
        """Of the other models that the same engine serves."""
        self._past: deque[tuple[float, int]] = deque()
        """(until, value), each value lower than the one before: only these can still matter."""

    def set(self, now: float, value: int) -> None:
        """The function has this value from now on; times must not fall."""
        if value < self._value:
            while self._past and self._past[-1][1] <= self._value:
                self._past.pop()
            self._past.append((now, self._value))
        self._value = value
        self._expire(now)

    def peak(self, now: float) -> int:
        """The greatest value at any time from `now - width` to `now`."""
        self._expire(now)
        return max(self._value, self._past[0][1]) if self._past else self._value

    def all(self, now: float) -> int:
        """No less than the greatest value of this and those beside it together."""
        return self.peak(now) + sum(other.peak(now) for other in self.beside)

    def _expire(self, now: float) -> None:
        while self._past and self._past[0][0] < now - self._width:
            self._past.popleft()
