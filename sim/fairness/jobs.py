"""What comes in a simulation, and what became of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

import msgspec

from common.cost import Terms

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service is counted in weighted tokens, as `fairness = "tokens"` charges them."""


class Arrival(msgspec.Struct, frozen=True):
    """One request of a workload. `output` is its exact length, which nobody knows beforehand."""

    at: float
    """Seconds from the start."""
    user: str
    input: int
    output: int
    cls: str = "standard"
    weight: float = 1.0
    most: int = 1_024
    """The most output tokens the client allows."""
    streams: bool = True
    """Whether its first token is seen before its last."""
    blocks: tuple[int, ...] = ()
    """Of its prompt, `prefixes.BLOCK_TOKENS` each, where engines keep what they have computed:
    prompts with equal blocks, from the first on, begin alike."""

    @property
    def work(self) -> float:
        """Weighted tokens of it all."""
        return INPUT_WEIGHT * self.input + OUTPUT_WEIGHT * self.output


class Job:
    """An arrival on its way. Times are seconds; None: not yet."""

    __slots__ = (
        "arrival",
        "cached",
        "ended",
        "engine",
        "first",
        "id",
        "request",
        "seen",
        "sent",
        "yields",
    )

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.id = str(number)
        self.arrival = arrival
        self.engine = -1
        self.cached = 0
        """Tokens of its prompt that the engine had computed before."""
        self.request = 0
        self.yields = 0
        """How often it was taken out of an engine."""
        self.sent: float | None = None
        self.first: float | None = None
        """Its first token left the engine."""
        self.seen: float | None = None
        """Its first token reached the client."""
        self.ended: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """The state at one instant."""

    at: float
    served: dict[str, float]
    """Weighted tokens that each user has got so far; input counts when its first token comes."""
    waiting: int
    """Requests in the engines' own queues."""
    inflight: int
    """Requests in the engines."""


class Result(msgspec.Struct, frozen=True):
    """One run. Samples are in order of time."""

    jobs: list[Job]
    samples: list[Sample]
    ended: float

    def ttfts(self, users: frozenset[str], since: float = 0.0) -> list[float]:
        """Seconds to the first token of these users' jobs that came from `since` on; of one that
        had none when the run ended, the time it had waited: it is at least that."""
        return [
            (self.ended if j.seen is None else j.seen) - j.arrival.at
            for j in self.jobs
            if j.arrival.user in users and since <= j.arrival.at <= self.ended
        ]

    def served(self, since: float, until: float, users: Collection[str] | None = None) -> float:
        """Weighted tokens that the users (None: all) got between two instants, as sampled."""
        first, last = self.sample(since).served, self.sample(until).served
        names = last if users is None else users
        return sum(last.get(u, 0.0) - first.get(u, 0.0) for u in names)

    def sample(self, at: float) -> Sample:
        """The last sample up to this time."""
        return self.samples[bisect_right(self.samples, at + 1e-9, key=lambda s: s.at) - 1]

    def busy_until(self) -> float:
        """The last sample at which requests waited in an engine."""
        return max((s.at for s in self.samples if s.waiting), default=0.0)


class Entry(msgspec.Struct, kw_only=True):
    """A job in the order. `user` is a path as `common.keys.path` makes it."""

    id: str
    user: str
    cls: str
    terms: Terms
    weight: float = 1.0
    """Divides what it costs."""
    arrival: int = 0
    charged: float = 0.0
    passed: int = 0
    """How often a job of its user that came later went before it."""
    inflight: int = 0
    """Jobs of its user (its key's, where sub-users) that ran when it was popped."""
