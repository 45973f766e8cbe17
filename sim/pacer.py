"""Engine time on top of an event loop's time, and the one timer that drives an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LAG_MAX_S = 0.25
"""A process that falls further behind its clock loses the time, it does not catch up."""


class Pacer:
    """Calls `tick(now)` at the time it is armed for.

    Engine time is the loop's time less what freezes and stalls have taken; it never falls.
    """

    def __init__(self, tick: Callable[[float], None]) -> None:
        self._tick = tick
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._lost = 0.0
        self._latest = float("-inf")
        self._frozen_at: float | None = None

    @property
    def frozen(self) -> bool:
        """True between `freeze` and `thaw`."""
        return self._frozen_at is not None

    def attach(self) -> bool:
        """Take the running loop; True the first time."""
        if self._loop is not None:
            return False
        self._loop = asyncio.get_running_loop()
        return True

    def now(self) -> float:
        """Engine time, seconds."""
        at = self._clock() if self._frozen_at is None else self._frozen_at
        self._latest = max(self._latest, at - self._lost)
        return self._latest

    def arm(self, due: float | None) -> None:
        """Set the timer to an engine time, None for never; nothing fires while frozen."""
        if self._frozen_at is not None:
            due = None
        if self._timer is not None:
            if due == self._due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None and self._loop is not None:
            self._due = due
            self._timer = self._loop.call_at(due + self._lost, self._fire)

    def later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """A timer of its own, in the loop's time. Only after `attach`."""
        if self._loop is None:
            raise RuntimeError("no loop yet")
        return self._loop.call_later(seconds, call)

    def freeze(self) -> None:
        """Stop engine time."""
        if self._frozen_at is None:
            self._frozen_at = self._clock()
            self.arm(None)

    def thaw(self) -> None:
        """Let engine time go on where it stopped; the caller arms the timer again."""
        if self._frozen_at is not None:
            self._lost += self._clock() - self._frozen_at
            self._frozen_at = None

    def _clock(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def _fire(self) -> None:
        self._timer = None
        lag = self._clock() - self._lost - self._due
        if lag > LAG_MAX_S:
            self._lost += lag
        # Loops may call a timer a little early, by their clock's resolution.
        self._latest = max(self.now(), self._due)
        self._tick(self._latest)
