"""The fair order in memory: the arithmetic of the queue's verbs, without their bookkeeping.

Start-time fair queueing with settled charges, as `sim.model.Model` specifies it and common/lua does
it, for one leader that loses nothing: there are no leases, terms, tries or deadlines here, so a
simulation of thousands of jobs takes no time. A test compares its choices with the model's.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Collection, Iterator, Sequence

from common.cost import OUTPUT_ALPHA, OUTPUT_START
from common.keys import CLASSES, GROUPS, Policy
from sim.fairness.jobs import Entry

SCAN = 64
"""Users of a backlog that one pop looks at."""
LIFTS_MAX = 65_535


class _Level:
    """One level of one group: its users' counters, and who waits in which class."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.counters: dict[str, float] = {}
        self.backlog: dict[str, set[str]] = {c: set() for c in classes}
        self.vtime = 0
        self.lifts = 0
        self.back = 0.0

    def follow(self, c: int) -> None:
        """V is the counter of who goes, but falls only by what was given back."""
        v, back = self.vtime, self.back
        c = max(0, c, math.ceil(v - back)) if c < v else c
        if c != v:
            self.vtime, self.lifts = c, 0
            self.back = max(0.0, back - (v - c)) if c < v else 0.0

    def waits(self, name: str) -> bool:
        return any(name in b for b in self.backlog.values())

    def first(self, cls: str) -> Iterator[str]:
        """Who waits in a class, least counter first, at most SCAN; equals by name, as in Redis."""
        waiting, counters = self.backlog[cls], self.counters

        def place(name: str) -> tuple[float, bytes]:
            return counters[name], name.encode()

        if waiting:
            yield min(waiting, key=place)
            yield from heapq.nsmallest(SCAN, waiting, key=place)[1:]


class _Group:
    def __init__(self, name: str, classes: Sequence[str]) -> None:
        self.name = name
        self.classes = classes
        self.top = _Level(classes)
        self.below: dict[str, _Level] = {}
        """Of each key whose share is divided: the level of its sub-users."""
        self.owed = 0.0

    def levels(self, user: str) -> list[tuple[_Level, str]]:
        key, colon, _ = user.partition(":")
        if not colon:
            return [(self.top, user)]
        below = self.below.setdefault(key, _Level(self.classes))
        return [(self.top, key + ":"), (below, user)]


class Order:
    """Who goes next. Times do not matter here, only the sequence of calls."""

    def __init__(self, policy: Policy = "weighted", *, start: int = OUTPUT_START,
                 lift: bool = True) -> None:  # fmt: skip
        """`start`: units expected of an unknown user. `lift` False: idle time is banked, which no
        fair order may do; it shows what the lift is for."""
        self._groups = [_Group(name, classes) for name, classes in GROUPS[policy]]
        self._of = {c: g for g in self._groups for c in g.classes}
        self._start = start
        self._lift = lift
        self._lanes: dict[tuple[str, str], list[tuple[int, str]]] = {}
        self._entries: dict[str, Entry] = {}
        self._arrivals = 0
        self.waiting = dict.fromkeys(CLASSES, 0)
        """Jobs of each class that wait."""
        self.inflight: dict[str, int] = {}
        """Running jobs of each user, and of each key with sub-users."""
        self.means: dict[str, float] = {}

    def counter(self, cls: str, user: str) -> float:
        """A user's counter in the group of this class."""
        level, name = self._of[cls].levels(user)[-1]
        return level.counters.get(name, 0.0)

    def due(self) -> tuple[str, ...]:
        """Groups that wait below one that waits, and are owed some of their floor share."""
        found, above = [], 0
        for group in self._groups:
            n = self._jobs(group)
            if above and n and group.owed > 0:
                found.append(group.name)
            above += n
        return tuple(found)

    def enqueue(self, entry: Entry) -> None:
        """To the end of its user's lane; who becomes backlogged is lifted to V, behind others."""
        self._arrivals += 1
        entry.arrival = self._arrivals
        for level, name in self._of[entry.cls].levels(entry.user):
            if not level.waits(name):
                c = level.counters.get(name, 0.0)
                lifted = level.vtime + min(level.lifts, LIFTS_MAX) / (LIFTS_MAX + 1)
                if c <= lifted and self._lift:
                    c = lifted
                    level.lifts += 1
                level.counters[name] = c
        self._wait(entry)

    def _wait(self, entry: Entry) -> None:
        for level, name in self._of[entry.cls].levels(entry.user):
            level.backlog[entry.cls].add(name)
        insort(self._lanes.setdefault((entry.cls, entry.user), []), (entry.arrival, entry.id))
        self._entries[entry.id] = entry
        self.waiting[entry.cls] += 1

    def pop(
        self, classes: Sequence[str], places: int, *, anyone: int | None = None,
        user_max: int = 0, floor: float = 0.0, lookahead: int = 0, liked: Collection[str] = (),
    ) -> list[Entry]:  # fmt: skip
        """The next jobs of these classes of one group, at most one for each place.

        `anyone`: so many places are for anyone, the rest for users with nothing in flight.
        `user_max`: users with so many in flight are passed over. `floor`: the share of what this
        group is charged that each lower one that waits is owed. `liked`: jobs that may go before
        at most `lookahead` of their user's, each of which lets so many go before it in all.
        """
        out: list[Entry] = []
        while len(out) < places:
            idle = anyone is not None and len(out) >= anyone
            turn = self._turn(classes, idle, user_max)
            if turn is None:
                break
            everyone = self._turn(self._of[classes[0]].classes, False, user_max)
            cls, user, least = turn
            nth = self._ahead(cls, user, lookahead, liked) if liked else 0
            out.append(self._run(cls, user, everyone[2] if everyone else least, floor, nth))
        return out

    def first(self, cls: str, user: str, most: int) -> list[str]:
        """The first jobs of a lane."""
        return [job for _, job in self._lanes.get((cls, user), ())[:most]]

    def _ahead(self, cls: str, user: str, lookahead: int, liked: Collection[str]) -> int:
        """Which job of a lane goes, past those before it."""
        entries = [self._entries[job] for job in self.first(cls, user, lookahead + 1)]
        full = next((i for i, e in enumerate(entries) if e.passed >= lookahead), lookahead)
        nth = next((i for i, e in enumerate(entries[: full + 1]) if e.id in liked), 0)
        for entry in entries[:nth]:
            entry.passed += 1
        return nth

    def _turn(
        self, classes: Sequence[str], idle: bool, user_max: int
    ) -> tuple[str, str, float] | None:
        best: tuple[str, str, float] | None = None
        least = math.inf
        for cls in classes:
            group = self._of[cls]
            for name in group.top.first(cls):
                user = self._may(group, cls, name, idle, user_max)
                if user is not None:
                    if group.top.counters[name] < least:
                        least = group.top.counters[name]
                        best = cls, user, least
                    break
        return best

    def _may(self, group: _Group, cls: str, name: str, idle: bool, user_max: int) -> str | None:
        """The user that goes when it is the turn of this name; None: it is passed over."""
        if idle and self.inflight.get(name):
            return None
        if not name.endswith(":"):
            full = user_max and self.inflight.get(name, 0) >= user_max
            return None if full else name
        subs = group.below[name[:-1]].first(cls)
        return next((s for s in subs if not user_max or self.inflight.get(s, 0) < user_max), None)

    def _run(self, cls: str, user: str, first: float, floor: float, nth: int) -> Entry:
        group = self._of[cls]
        lane = self._lanes[cls, user]
        entry = self._entries[lane.pop(nth)[1]]
        if not lane:
            del self._lanes[cls, user]
        t = entry.terms
        x = min(self.means.get(user, self._start), t.most)
        cost = t.fixed + t.per_unit * x + t.per_square * x * x
        entry.charged = cost / entry.weight
        self.waiting[cls] -= 1
        waits = bool(lane)
        for level, name in reversed(group.levels(user)):
            c = level.counters[name]
            least = math.floor(min(c, first) if level is group.top else c)
            level.follow(least)
            level.counters[name] += entry.charged
            if not waits:
                level.backlog[cls].discard(name)
            waits = bool(level.backlog[cls])
        self._owe(group, floor, cost)
        entry.inflight = self._fly(group, user, 1) - 1
        return entry

    def _owe(self, group: _Group, share: float, cost: float) -> None:
        below, above = False, 0
        for other in self._groups:
            if other is group:
                below = True
                if above and share:
                    other.owed -= cost
            elif not below:
                above += self._jobs(other)
            elif share and self._jobs(other):
                other.owed = min(other.owed + share * cost, cost)
            else:
                other.owed = min(other.owed, 0.0)

    def _jobs(self, group: _Group) -> int:
        return sum(self.waiting[c] for c in group.classes)

    def _fly(self, group: _Group, user: str, jobs: int) -> int:
        for _, name in group.levels(user):
            n = self.inflight.get(name, 0) + jobs
            self.inflight[name] = n
            if n <= 0:
                del self.inflight[name]
        return self.inflight.get(group.levels(user)[0][1], 0)

    def _book(self, entry: Entry, amount: float) -> None:
        for level, name in self._of[entry.cls].levels(entry.user):
            level.counters[name] = level.counters.get(name, 0.0) + amount

    def _give_back(self, entry: Entry, amount: float) -> None:
        for level, _ in self._of[entry.cls].levels(entry.user):
            level.back += amount

    def charge(self, job: str, cost: float) -> None:
        """What a running job has cost so far, before weighting; a charge only rises."""
        entry = self._entries[job]
        more = cost / entry.weight - entry.charged
        if more > 0:
            self._book(entry, more)
            entry.charged += more

    def settle(self, job: str, cost: float, learn: int | None) -> None:
        """A running job ended at this cost, before weighting. `learn`: units for the mean."""
        entry = self._entries.pop(job)
        delta = cost / entry.weight - entry.charged
        self._book(entry, delta)
        self._give_back(entry, max(0.0, -delta))
        if learn is not None:
            mean = self.means.get(entry.user, learn)
            self.means[entry.user] = mean + OUTPUT_ALPHA * (learn - mean)
        self._fly(self._of[entry.cls], entry.user, -1)

    def requeue(self, job: str) -> None:
        """A running job goes back to its old place, its charge undone."""
        entry = self._entries[job]
        self._book(entry, -entry.charged)
        self._give_back(entry, entry.charged)
        entry.charged = 0.0
        self._fly(self._of[entry.cls], entry.user, -1)
        self._wait(entry)

    def cancel(self, job: str) -> None:
        """A waiting job goes, free of charge."""
        entry = self._entries.pop(job)
        lane = self._lanes[entry.cls, entry.user]
        lane.remove((entry.arrival, job))
        waits = bool(lane)
        if not lane:
            del self._lanes[entry.cls, entry.user]
        self.waiting[entry.cls] -= 1
        for level, name in reversed(self._of[entry.cls].levels(entry.user)):
            if not waits:
                level.backlog[entry.cls].discard(name)
            waits = bool(level.backlog[entry.cls])
