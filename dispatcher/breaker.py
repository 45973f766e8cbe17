"""Whether a backend that refused is asked again: a circuit breaker for each backend.

A refusal is what says "not me, not now" before the first byte: a connection refused, 429, 503, a
draining engine's 500. What a client did wrong is an answer like any other. A backend that answers
is closed; a refusal opens it for a time that doubles; then one job is its trial.
"""

import math
from typing import Literal

BACKOFF_S = 0.5
"""How long a first refusal keeps a backend open; each refused trial doubles it."""
BACKOFF_MAX_S = 10.0
TRIAL_S = 6.0
"""A trial that was not refused for so long was accepted: a refusal comes at once or when connecting
times out, while a whole answer may take minutes to its first byte."""


class Breaker:
    """The state of one backend. Times are seconds on any clock that never falls."""

    def __init__(self) -> None:
        self._open_until = -math.inf
        self._backoff_s = 0.0
        """0: closed."""
        self._trial: str | None = None
        self._trial_at = 0.0

    def state(self, now: float) -> Literal["closed", "open", "half_open"]:
        """`open`: gets nothing. `half_open`: gets one job, or has it."""
        self._pass_trial(now)
        if not self._backoff_s:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def room(self, now: float, n: int) -> int:
        """How many of `n` jobs may be sent."""
        state = self.state(now)
        if state == "closed":
            return n
        return min(n, 1) if state == "half_open" and self._trial is None else 0

    def wait(self, now: float) -> float:
        """Seconds until an open backend may have a trial; 0 where it is not open."""
        return self._open_until - now if self.state(now) == "open" else 0.0

    def sent(self, now: float, job: str) -> None:
        """A job went there; to a half-open backend it is the trial."""
        if self._trial is None and self.state(now) == "half_open":
            self._trial, self._trial_at = job, now

    def refused(self, now: float, job: str) -> None:
        """It refused this job. Refusals of jobs sent before it opened change nothing more."""
        if self.state(now) == "closed":
            self._backoff_s = BACKOFF_S
        elif job == self._trial:
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        else:
            return
        self._trial = None
        self._open_until = now + self._backoff_s

    def answered(self, now: float, job: str) -> None:
        """The first byte of an answer to this job came, a client error's included."""
        self._pass_trial(now)
        if job == self._trial:
            self._close()

    def abandoned(self, now: float, job: str) -> None:
        """This job ended with neither, for it was cancelled: another may be the trial."""
        self._pass_trial(now)
        if job == self._trial:
            self._trial = None

    def _pass_trial(self, now: float) -> None:
        if self._trial is not None and now - self._trial_at >= TRIAL_S:
            self._close()

    def _close(self) -> None:
        self._backoff_s = 0.0
        self._trial = None
