"""Whether a backend is sent jobs: a circuit breaker for each backend, fed by what becomes of jobs.

A refusal is what says "not me, not now" before the first byte: a connection refused, 429, 503, a
draining engine's 500. It opens at once, for a time that doubles. A failure is a job that got no
byte for too long, or whose stream broke: FAILURES_MAX in a row open it, and so does the caller who
knows that the engine is dead (`trip`). What a client did wrong is an answer like any other.

After its time an open backend is half-open: one job is its trial. A byte of its answer closes it.
A backend that had *refused* is also closed by taking a trial for TRIAL_S without refusing it; one
that was *silent* takes whatever it is sent, so only an answer shows that it lives.
"""

import math
from typing import Literal

State = Literal["closed", "open", "half_open"]

BACKOFF_S = 0.5
"""How long a first refusal keeps a backend open; each refused trial doubles it."""
BACKOFF_MAX_S = 10.0
TRIAL_S = 6.0
"""A trial that was not refused for so long was accepted: a refusal comes at once or when connecting
times out, while a whole answer may take minutes to its first byte."""
FAILURES_MAX = 3
"""So many failures without any byte between them open it."""
TRIPPED_S = 10.0
"""As BACKOFF_S, of one that is known to be dead: polls tell sooner when a port is there again, and
the trial of a silent one costs a client a long wait."""
TRIPPED_MAX_S = 60.0
"""As BACKOFF_MAX_S, of a silent one."""


class Breaker:
    """The state of one backend. Times are seconds on any clock that never falls."""

    def __init__(self) -> None:
        self._open_until = -math.inf
        self._backoff_s = 0.0
        """0: closed."""
        self.silent = False
        """What opened it was silence; only an answer closes it."""
        self._failures = 0
        self.trial: str | None = None
        """The one job that a half-open backend has."""
        self.trial_at = 0.0
        self.closed_at = -math.inf
        """When it was last closed again."""

    def state(self, now: float) -> State:
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
        return min(n, 1) if state == "half_open" and self.trial is None else 0

    def wait(self, now: float) -> float:
        """Seconds until an open backend may have a trial; 0 where it is not open."""
        return self._open_until - now if self.state(now) == "open" else 0.0

    def sent(self, now: float, job: str) -> None:
        """A job went there; to a half-open backend it is the trial."""
        if self.trial is None and self.state(now) == "half_open":
            self.trial, self.trial_at = job, now

    def refused(self, now: float, job: str) -> None:
        """It refused this job. Refusals of jobs sent before it opened change nothing more."""
        if self.state(now) == "closed":
            self._open(now, BACKOFF_S)
        elif job == self.trial:
            self._reopen(now)

    def failed(self, now: float, job: str) -> None:
        """It took this job and gave no byte in time, or broke off."""
        if self.state(now) == "closed":
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                self.trip(now, silent=True)
        elif job == self.trial:
            self._reopen(now)

    def forgive(self) -> None:
        """Bytes of some answer came since the last failure."""
        self._failures = 0

    def trip(self, now: float, *, silent: bool) -> None:
        """The caller knows that a closed one does not serve: its port is gone, or its engine is
        dead behind it (`silent`)."""
        if self.state(now) == "closed":
            self.silent = silent
            self._open(now, TRIPPED_S)

    def retry(self, now: float) -> None:
        """Its port is there again: a trial need wait no longer."""
        self._open_until = min(self._open_until, now)

    def answered(self, now: float, job: str) -> None:
        """The first byte of an answer to this job came, a client error's included."""
        self._pass_trial(now)
        self._failures = 0
        if job == self.trial:
            self._close(now)

    def abandoned(self, now: float, job: str) -> None:
        """This job ended with neither, for it was cancelled: another may be the trial."""
        self._pass_trial(now)
        if job == self.trial:
            self.trial = None

    def _pass_trial(self, now: float) -> None:
        if self.trial is not None and not self.silent and now - self.trial_at >= TRIAL_S:
            self._close(now)

    def _reopen(self, now: float) -> None:
        most = TRIPPED_MAX_S if self.silent else BACKOFF_MAX_S
        self._open(now, min(2 * self._backoff_s, most))

    def _open(self, now: float, backoff_s: float) -> None:
        self._backoff_s = backoff_s
        self._open_until = now + backoff_s
        self.trial = None

    def _close(self, now: float) -> None:
        self.closed_at = now
        self._backoff_s = 0.0
        self._failures = 0
        self.silent = False
        self.trial = None
