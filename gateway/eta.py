"""When a waiting job's turn comes: from its place, and from how fast places fall. Pure.

A place counts the turns until a job's own. It falls by one with each turn of anybody counted in it,
and rises where users come who go before it, so between two looks at one job the difference is what
came of both. A fall is taken as it is: it holds the users who kept coming meanwhile, who will keep
coming. A rise is taken as standing still: so many came at once is no reason to think that so many
will again, while a place that rises at every look comes to look like one that never falls.

Falls are added up in three steps, each the guess with which the next one begins (the mean of a
Gamma prior, see `_shrunk`): what dispatchers announce of the model, what was
seen of the class, what was seen of the lane. Users of other weights have other paces, so the lane's
own counts most once enough was seen of it. What was seen is forgotten with MEMORY_S.
"""

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

ANNOUNCED_TURNS = 2.0
CLASS_TURNS = 4.0
"""The announced rate, and that of the class, weigh as much as having seen so many turns. What is
announced is little trusted: it is the mean of a minute in which there may have been nothing to do.
"""
MEMORY_S = 60.0
"""What was seen so long ago counts 1/e of what is seen now."""
LOOK_S_MIN = 1.0
"""Looks at one job that are closer together count as one."""
LOOK_S_MAX = 120.0
"""Of two that are further apart the first is too old to say anything."""
STILL_S = 60.0
"""A place that was looked at and did not fall for so long, or for STILL_TURNS turns of the model,
has no time at which its turn comes."""
STILL_TURNS = 3.0
LONGEST_S = 86_400.0
"""A longer time is unknown: no job waits longer."""
LANES_MAX = 4_096
"""Most lanes, and most classes of models, that are remembered: those last looked at."""
JOBS_MAX = 16_384
"""Most jobs whose last look is."""


class Pace:
    """Turns that passed, over the seconds in which they did; old ones are forgotten."""

    __slots__ = ("_at", "fell_at", "seconds", "turns")

    def __init__(self, now: float) -> None:
        self.turns = 0.0
        self.seconds = 0.0
        self.fell_at = now
        """When turns last passed, or when the watch began."""
        self._at = now

    def add(self, turns: float, seconds: float, now: float) -> None:
        """So many turns passed in the seconds before now."""
        kept = math.exp(min(0.0, self._at - now) / MEMORY_S)
        self.turns = self.turns * kept + turns
        self.seconds = self.seconds * kept + seconds
        self._at = max(self._at, now)
        if turns > 0:
            self.fell_at = now


class Lane:
    """What is known of one user's lane."""

    __slots__ = ("falls", "went", "went_at")

    def __init__(self, now: float) -> None:
        self.falls = Pace(now)
        self.went = Pace(now)
        """Jobs of its own that went."""
        self.went_at: float | None = None


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """The values of the keys that were last put."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        return self._kept.get(key)

    def put(self, key: K, value: V) -> V:
        self._kept.pop(key, None)
        self._kept[key] = value
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return value

    def drop(self, key: K) -> None:
        self._kept.pop(key, None)


class Eta:
    """What one gateway has seen of all queues. All times in seconds, of one clock."""

    def __init__(self) -> None:
        self._jobs: _Recent[str, tuple[float, int]] = _Recent(JOBS_MAX)
        self._lanes: _Recent[tuple[str, str, str], Lane] = _Recent(LANES_MAX)
        self._classes: _Recent[tuple[str, str], Pace] = _Recent(LANES_MAX)

    def __len__(self) -> int:
        """How many things are remembered."""
        return len(self._jobs) + len(self._lanes) + len(self._classes)

    def look(self, model: str, cls: str, user: str, job: str, place: int, now: float) -> None:
        """A job of a user (its path) was seen at a place; 0: it does not wait any more."""
        last = self._jobs.get(job)
        if place <= 0:
            self._jobs.drop(job)
            return
        lane, of_class = self._lane(model, cls, user, now), self._classes.get((model, cls))
        if last is not None:
            seconds = now - last[0]
            if seconds < LOOK_S_MIN:
                return
            if seconds <= LOOK_S_MAX:
                turns = max(0, last[1] - place)
                lane.falls.add(turns, seconds, now)
                of_class = of_class or Pace(now)
                of_class.add(turns, seconds, now)
                self._classes.put((model, cls), of_class)
        self._jobs.put(job, (now, place))

    def forget(self, job: str) -> None:
        """It is over: nobody looks at it again."""
        self._jobs.drop(job)

    def went(self, model: str, cls: str, user: str, now: float) -> None:
        """A job of a user's lane has left it for an engine."""
        lane = self._lane(model, cls, user, now)
        if lane.went_at is not None:
            lane.went.add(1, min(max(0.0, now - lane.went_at), LOOK_S_MAX), now)
        lane.went_at = max(now, lane.went_at or now)

    def seconds(
        self, model: str, cls: str, user: str, place: int, drain: float | None, now: float
    ) -> float | None:
        """Seconds until the turn of a job at this place of a user's; None where that is not known.

        `drain`: jobs a second that the model's dispatchers announce; 0: they have seen none end,
        None: none can run.
        """
        if drain is None or place <= 0:
            return 0.0 if place == 0 else None
        lane = self._lanes.get((model, cls, user))
        falls = lane.falls if lane else None
        if falls is not None and falls.seconds > 0:
            still = max(STILL_S, STILL_TURNS / drain) if drain > 0 else STILL_S
            if now - falls.fell_at >= still:
                return None
        of_class = _shrunk(self._classes.get((model, cls)), drain, ANNOUNCED_TURNS)
        rate = _shrunk(falls, of_class, CLASS_TURNS)
        found = place / rate if rate > 0 else math.inf
        return found if found <= LONGEST_S else None

    def next_leaves_s(self, model: str, cls: str, user: str, now: float) -> float | None:
        """Seconds in which one job of a user's lane leaves it; None where none was seen to."""
        lane = self._lanes.get((model, cls, user))
        if lane is None or lane.went_at is None or lane.went.turns <= 0:
            return None
        return (lane.went.seconds + max(0.0, now - lane.went_at)) / lane.went.turns

    def _lane(self, model: str, cls: str, user: str, now: float) -> Lane:
        key = (model, cls, user)
        return self._lanes.put(key, self._lanes.get(key) or Lane(now))


def _shrunk(seen: Pace | None, guess: float, turns: float) -> float:
    """Turns a second, from those seen and a guess: the mean of a Gamma distribution of Poisson
    rates, which had so many turns at the guessed rate before anything was seen. 0: unknown."""
    if seen is None or seen.seconds <= 0:
        return guess
    if guess <= 0:
        return seen.turns / seen.seconds
    return (turns + seen.turns) / (turns / guess + seen.seconds)
