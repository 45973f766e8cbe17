"""What stands before the engines without a gateway: nothing, engine priorities, or rate limits."""

from __future__ import annotations

import random

from sim.fairness.jobs import Job
from sim.fairness.world import World


class Direct:
    """Clients ask the engine with the fewest requests, at once. The baseline of everything."""

    hop = 0.0

    def __init__(self, world: World) -> None:
        self._world = world
        self._inflight = [0] * len(world.engines)

    def arrive(self, now: float, job: Job) -> None:
        """Send it."""
        self._send(now, job, 0)

    def _send(self, now: float, job: Job, priority: int) -> None:
        engine = self._choose()
        self._inflight[engine] += 1
        self._world.send(now, job, engine, self.hop, priority)

    def _choose(self) -> int:
        return min(range(len(self._inflight)), key=self._inflight.__getitem__)

    def first(self, now: float, job: Job) -> None:
        """Of no interest."""

    def end(self, now: float, job: Job) -> None:
        """One less."""
        self._inflight[job.engine] -= 1


class Scattered(Direct):
    """Clients ask any engine."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rng = random.Random(1)

    def _choose(self) -> int:
        return self._rng.randrange(len(self._inflight))


class EnginePriority(Direct):
    """A request's priority is how many its user has in flight, up to 3; the engine does the rest.

    The source article's idea, without a limit on the engine's queue.
    """

    PENALTY_MAX = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._users: dict[str, int] = {}

    def arrive(self, now: float, job: Job) -> None:
        """Send it with a penalty."""
        n = self._users.get(job.arrival.user, 0)
        self._users[job.arrival.user] = n + 1
        self._send(now, job, min(self.PENALTY_MAX, n))

    def end(self, now: float, job: Job) -> None:
        """One less, of this user too."""
        super().end(now, job)
        self._users[job.arrival.user] -= 1


class RateLimit(Direct):
    """Each user may send so many requests a second, after a burst; others ask again just in time.

    A token bucket, and clients that obey its `Retry-After` exactly.
    """

    def __init__(self, world: World, per_second: float, burst: int) -> None:
        super().__init__(world)
        self._gap = 1 / per_second
        self._credit = (burst - 1) * self._gap
        self._full: dict[str, float] = {}
        """When each user's bucket would be full again."""

    def arrive(self, now: float, job: Job) -> None:
        """Send it now, or when its user's bucket allows."""
        full = self._full.get(job.arrival.user, now)
        at = max(now, full - self._credit)
        self._full[job.arrival.user] = max(full, at) + self._gap
        self._world.at(at, lambda time: self._send(time, job, 0))
