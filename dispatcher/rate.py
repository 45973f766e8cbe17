"""How often something happened of late. Time is an argument."""

from collections import deque

WINDOW_S = 60.0
COUNTED_MAX = 60_000


class Rate:
    """Events a second over the last `window_s`; of more than COUNTED_MAX the newest count."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._at: deque[float] = deque(maxlen=COUNTED_MAX)

    def count(self, now: float) -> None:
        """It happened once more."""
        self._at.append(now)

    def per_second(self, now: float) -> float:
        """0 when it did not happen."""
        while self._at and self._at[0] < now - self._window_s:
            self._at.popleft()
        return len(self._at) / self._window_s
