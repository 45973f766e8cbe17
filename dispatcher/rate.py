"""How often something happened of late. Time is an argument."""

from collections import deque

WINDOW_S = 60.0
COUNTED_MAX = 60_000


class Rate:
    """Events a second over the last `window_s`; of more than COUNTED_MAX the newest count.

    Where none came for a whole window before the first of those that count, what has passed since
    it is the time they are taken over, but no less than `least_s`: so many at once are no rate.
    """

    def __init__(self, window_s: float = WINDOW_S, least_s: float | None = None) -> None:
        """`least_s` None: always the whole window."""
        self._window_s = window_s
        self._least_s = window_s if least_s is None else least_s
        self._at: deque[float] = deque(maxlen=COUNTED_MAX)
        self._since = 0.0

    def count(self, now: float) -> None:
        """It happened once more."""
        self._forget(now)
        if not self._at:
            self._since = now
        self._at.append(now)

    def per_second(self, now: float) -> float:
        """0 when it did not happen."""
        self._forget(now)
        return len(self._at) / min(self._window_s, max(self._least_s, now - self._since))

    def _forget(self, now: float) -> None:
        while self._at and self._at[0] < now - self._window_s:
            self._at.popleft()
