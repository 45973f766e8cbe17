"""How one backend is: whether it gets jobs, whether its port is there, whether its engine lives.

What becomes of the dispatcher's own jobs counts first (`dispatcher.breaker`); polls of its metrics
page add what those cannot tell. A page that is slow, missing or broken takes no backend out of use;
a port that took no connection for MISSES_MAX polls in a row does, unless bytes came from it of
late. Pages say that all is well while the engine behind them is dead: so one that has jobs, and
produced no token for STALL_S, is out of use whatever its pages say.

After each of these, and after a restart, a backend starts slowly: at first RAMP_START jobs may be
there without a first byte, twice as many each second, and one more for each first byte.
"""

import math

from dispatcher.breaker import Breaker
from dispatcher.engines.facts import EngineFacts

MISSES_MAX = 3
"""So many polls in a row without a connection make it unreachable: a busy one may miss some."""
HEARD_S = 10.0
"""A backend that gave a byte of an answer within this time is there, whatever polls say."""
STALL_S = 60.0
"""A backend that has jobs produces a token within this time."""
RAMP_S = 10.0
RAMP_START = 2
FAILED_MAX = 1_000
"""Most jobs remembered that failed there; the oldest are forgotten."""


class Health:
    """Of one backend. Times are seconds on any clock that never falls."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        self.reachable: bool | None = None
        """Whether its port takes connections; None: not tried yet."""
        self.restarted_at = -math.inf
        """When its engine was last seen to have begun anew: what it had before is lost."""
        self.heard_at = -math.inf
        """When the last byte of an answer came."""
        self._misses = 0
        self._missed_since = 0.0
        self._generated: int | None = None
        self._generated_at = -math.inf
        """When the engine's count of tokens last changed."""
        self._failed_at = -math.inf
        self._failed: dict[str, None] = {}
        self._ramp = Ramp()

    def failed_here(self, job: str) -> bool:
        """Whether this job failed there or was refused: it had better go elsewhere."""
        return job in self._failed

    def room(self, now: float, n: int) -> int:
        """Of the `n` jobs that a closed breaker lets through: how far a slow start has come."""
        return self._slow_start().room(now, n)

    def sent(self, now: float, job: str) -> None:
        """A job goes there."""
        self.breaker.sent(now, job)
        self._slow_start().sent(now, job)

    def answered(self, now: float, job: str) -> None:
        """The first byte of an answer to this job."""
        self.heard_at = now
        self._failed.pop(job, None)
        self._slow_start().answered(job)
        self.breaker.answered(now, job)
        self.connected(now)

    def refused(self, now: float, job: str) -> None:
        """It refused a job before the first byte."""
        self._remember(job)
        self.breaker.refused(now, job)

    def failed(self, now: float, job: str) -> None:
        """It gave no byte of a job's answer in time, or broke it off."""
        self._remember(job)
        if self.heard_at > self._failed_at:
            self.breaker.forgive()
        self._failed_at = now
        self.breaker.failed(now, job)

    def broke(self, now: float, job: str, *, before: bool) -> None:
        """The connection broke before the first byte. `before`: so it had with this job before,
        and one request must not close one backend after the other to everybody."""
        self._remember(job)
        if not before:
            self.breaker.refused(now, job)

    def ended(self, now: float, job: str) -> None:
        """It does not have this job any more, for whatever reason."""
        self._ramp.ended(job)
        self.breaker.abandoned(now, job)

    def polled(self, now: float, facts: EngineFacts, asked_at: float) -> None:
        """Its metrics page was read, which was asked for at `asked_at`."""
        self.connected(now)
        before, self._generated = self._generated, facts.generated
        if facts.generated is None or before is None or facts.generated == before:
            return
        self._generated_at = now
        if facts.generated < before:
            self.restarted_at = now
        elif self.breaker.trial is not None and self.breaker.trial_at < asked_at:
            self.breaker.answered(now, self.breaker.trial)  # its engine computes again

    def reached(self, now: float, connected: bool) -> None:
        """Whether a poll was connected."""
        if connected:
            self.connected(now)
        else:
            self.missed(now)

    def connected(self, now: float) -> None:
        """Its port took a connection."""
        if self._misses >= MISSES_MAX:
            self.breaker.retry(now)
            if self.heard_at < self._missed_since:
                self.restarted_at = now
        self._misses = 0
        self.reachable = True

    def missed(self, now: float) -> None:
        """A poll was not connected."""
        if not self._misses:
            self._missed_since = now
        self._misses += 1
        if self.reachable is None:
            self.reachable = False
        if self._misses >= MISSES_MAX and now - self.heard_at >= HEARD_S:
            self.reachable = False
            self.breaker.trip(now, silent=False)

    def stalled(
        self, now: float, since: float, facts: EngineFacts | None, *, streams: bool
    ) -> bool:
        """Whether nothing was produced for STALL_S though it has had jobs `since`.

        `facts`: where they are fresh. A backend that neither streams nor counts its tokens may be
        busy with whole answers, unless it says itself that it runs nothing.
        """
        counts = facts is not None and facts.generated is not None
        idle = facts is not None and facts.running == 0 and not facts.waiting
        produced = max(since, self.heard_at, self._generated_at)
        return (streams or counts or idle) and now - produced >= STALL_S

    def _slow_start(self) -> "Ramp":
        """The ramp since the last of what it is for."""
        since = max(self.restarted_at, self.breaker.closed_at)
        if since > self._ramp.since:
            self._ramp = Ramp(since)
        return self._ramp

    def _remember(self, job: str) -> None:
        self._failed[job] = None
        if len(self._failed) > FAILED_MAX:
            del self._failed[next(iter(self._failed))]


class Ramp:
    """A slow start that began at `since`. Holds a name for each job that has not answered."""

    def __init__(self, since: float = -math.inf) -> None:
        self.since = since
        self._unanswered: set[str] = set()
        self._answered = 0

    def room(self, now: float, n: int) -> int:
        """How many of `n` jobs may be sent."""
        past = now - self.since
        if past >= RAMP_S:
            return n
        most = (RAMP_START << int(past)) + self._answered
        return max(0, min(n, most - len(self._unanswered)))

    def sent(self, now: float, job: str) -> None:
        """A job goes there."""
        if now - self.since < RAMP_S:
            self._unanswered.add(job)

    def answered(self, job: str) -> None:
        """Its first byte came."""
        if job in self._unanswered:
            self._unanswered.discard(job)
            self._answered += 1

    def ended(self, job: str) -> None:
        """It ended, with or without one."""
        self._unanswered.discard(job)
