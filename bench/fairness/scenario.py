"""What a scenario is, and what is seen of a run of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bench.crowd import Ask, Sample, made
from bench.fairness.svg import Column
from bench.report import Figure, percentile
from bench.setup import Setup
from sim.settings import EngineSettings

SLOTS = 32
FULL_STEP_MS = 37.8
"""A step of the engine of `sim.fairness.cases.GEN` with all slots taken."""
PREFILL_TOKENS_PER_S = 8_000.0
DIRECT, THROUGH = "direct", "Fairlane"


def engine(speed: float, slots: int = SLOTS) -> EngineSettings:
    """An engine limited by its slots, with 32 so many times as fast as 850 tokens a second."""
    given = EngineSettings(max_num_seqs=slots)
    step_ms = FULL_STEP_MS / speed - SLOTS * given.per_seq_us / 1e3
    return EngineSettings(
        max_num_seqs=slots, step_ms=max(0.1, step_ms),
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S * speed,
    )  # fmt: skip


class Source(msgspec.Struct, frozen=True):
    """Requests of one user; `at_once`: it keeps so many open until there are no more."""

    user: str
    asks: Sequence[Ask]
    at_once: int | None = None


class Workload(msgspec.Struct, frozen=True):
    """What is asked in one run, which then ends: connections are cut."""

    sources: Sequence[Source]
    until_s: float
    """The end at the latest, in seconds."""
    until_begun: Sequence[str] = ()
    """The end also where every request of these users has its first token."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One way that a scenario's requests go."""

    name: str
    workload: Workload
    setup: Setup | None = None
    """Of Fairlane; None: to the engine itself."""
    ours: bool = False
    """Only where Fairlane is set up here: it asks for settings of its own."""
    lopsided: str = ""
    """All requests of this user go through the first gateway; all others by turns."""


class Request(msgspec.Struct, frozen=True):
    """One request as its client saw it."""

    user: str
    at: float
    """When it was sent, in seconds since the beginning."""
    first_s: float
    """Time to the first token; where the run ended before, the time until then."""
    begun: bool
    """Whether there was a first token."""


class Seen(msgspec.Struct, frozen=True):
    """One run. Samples are in order of time."""

    requests: Sequence[Request]
    samples: Sequence[Sample]
    failed: Mapping[str, int]
    ended_s: float
    slots: float = math.nan
    """Of the engine, as Fairlane had found when it began; 0: it had not."""
    eta_errors: Sequence[float] = ()
    """|told - real| / real of each time that a waiting stream was told (`bench.eta_error`)."""

    def first_s(self, users: Sequence[str], until: float = math.inf) -> list[float]:
        """Times to the first token of these users' requests, of those sent before `until`."""
        return [r.first_s for r in self.requests if r.user in users and r.at < until]

    def wait(self, users: Sequence[str], share: float, until: float = math.inf) -> float:
        """A percentile of these."""
        return percentile(self.first_s(users, until), share)

    def admitted_s(self, user: str) -> float:
        """When the last of a user's requests had its first token: until then there was a queue."""
        return max((r.at + r.first_s for r in self.requests if r.user == user), default=0.0)

    def tokens(self, until: float) -> float:
        """Weighted tokens computed by then."""
        return made(self.samples, until)

    def served(self, user: str, since: float, until: float) -> float:
        """Weighted tokens that reached a user between two instants, between samples in line."""
        return self._served(user, until) - self._served(user, since)

    def _served(self, user: str, at: float) -> float:
        before, had = 0.0, 0.0
        for sample in self.samples:
            has = sample.served.get(user, 0.0)
            if sample.at >= at:
                return had + (at - before) / max(sample.at - before, 1e-9) * (has - had)
            before, had = sample.at, has
        return had


Runs = Mapping[str, Seen]
"""What was seen of each side, by its name; sides that cannot be run are not there."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A question of fairness, asked by the same requests on each side."""

    name: str
    title: str
    users: Sequence[str]
    """All of them; those who ask most come first and get the first keys."""
    engine: EngineSettings
    sides: Sequence[Side]
    figures: Callable[[Runs], list[Figure]]
    notes: Sequence[str] = ()
    columns: Callable[[Runs], list[Column]] | None = None
    """Of the picture."""


def both(
    name: str, unit: str, runs: Runs, of: Callable[[Seen], float], *, like: str = DIRECT
) -> list[Figure]:
    """A figure for each side but `like`, beside that one."""
    beside = of(runs[like]) if like in runs else None
    found = [(side, of(seen)) for side, seen in runs.items() if side != like]
    return [
        Figure(name=named(name, side), unit=unit, value=value, direct=beside, through=value)
        for side, value in found
    ]


def named(name: str, side: str) -> str:
    """A figure's name on a side; of Fairlane as it is by default, the name alone."""
    return name if side == THROUGH else f"{name} ({side.removeprefix(THROUGH + ', ')})"


def ratio(a: float, b: float) -> float:
    """a / b; nan where b is 0."""
    return a / b if b else math.nan
