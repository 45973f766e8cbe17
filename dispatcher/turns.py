"""Whose turn it is: which classes the next `pop` is for, which places it fills, and for whom.

Groups of classes come in order: a lower one has its turn when nothing of the higher waits that
could run, or when its floor share is due, then one job at a time and before the others. Jobs that a
limit of their own holds back (of their class, or of users who have as much in flight as one may)
hold up nobody else.

Users with something in flight are given places only while fewer jobs than `busy_max` are in flight;
the places beyond are for users with nothing in flight (see `dispatcher.slots`). A floor share
takes none of those.

Classes of one group have one order, so one `pop` is for all of them where all have room; what only
some have room for is popped after that.

Pure: facts in, decision out.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from dispatcher.routing import Place, Router
from dispatcher.why import Why, most_common

Groups = Sequence[tuple[str, Sequence[str]]]
"""(group, its classes), highest first."""

PRIORITY_BASES = {"interactive": 0, "standard": 1_000, "batch": 1_000_000}
PRIORITY_JOBS_MAX = 999


def engine_priority(cls: str, inflight: int) -> int:
    """What an engine in priority mode is told: the least number runs first.

    Class before class; within one, users by how many jobs they have in flight, so that a user's
    first goes before anybody's second. More than 999 count as 999: they stay within their class
    (below standard's base; batch's base leaves standard room for any).
    """
    return PRIORITY_BASES[cls] + min(PRIORITY_JOBS_MAX, max(0, inflight))


class Rules(msgspec.Struct, frozen=True):
    """Limits of one class, beyond what each backend has room for."""

    inflight_max: int | None = None
    """Most jobs of the class in flight over all backends."""
    user_max: int = 0
    """A user with so many in flight gets no other of this class; 0: no limit."""


class View(msgspec.Struct, frozen=True):
    """What is known as one decision is made."""

    waiting: Mapping[str, int]
    """Jobs waiting, by class."""
    inflight: Mapping[str, int]
    """Jobs in flight over all backends, by class."""
    room: Callable[[str, bool], Mapping[str, Place]]
    """(class, for its floor share) -> what each backend may get of it."""
    most: int
    """More jobs than this cannot be popped at once."""
    busy_max: int | None = None
    """See `slots.Ceiling`."""
    taken: int = 0
    """Jobs in flight at the backends whose slots count for `busy_max`."""
    due: Collection[str] = ()
    """Groups whose floor share is due."""
    look: bool = False
    """Any class may have jobs that `waiting` does not count."""


class Turn(msgspec.Struct, frozen=True):
    """The next `pop`."""

    group: str
    classes: tuple[str, ...]
    places: tuple[str, ...]
    """A backend for each job."""
    anyone: int | None
    """Only the first so many places are for any user, the rest for users with nothing in flight;
    None: all."""
    user_max: int
    floor: bool = False
    """It is for a floor share."""
    rooms: Mapping[str, Place] = {}
    """What each backend has room for, these places included."""


class Round:
    """Turns until `next` has none, and what their pops told of the queue.

    The same may be used again after more room came, as long as nothing else changed for those who
    wait: no job came or went back to the queue, and nobody's job ended. Otherwise begin a new one.
    At most three turns a class come to nothing in one round.
    """

    def __init__(self, groups: Groups, rules: Mapping[str, Rules], router: Router) -> None:
        self._groups = groups
        self._rules = rules
        self._router = router
        self._nobody: set[tuple[str, ...]] = set()
        """Classes whose users all have as much in flight as they may."""
        self._none_idle: set[tuple[str, ...]] = set()
        """Classes of which no user with nothing in flight waits."""
        self.why = Why.OPEN
        """Why the last `next` had no turn though jobs wait."""
        self.held: tuple[str, ...] = ()
        """The classes of whose jobs `why` was said."""

    def next(self, view: View) -> Turn | None:
        """The next turn; None: nothing that waits may run now."""
        self.why, self.held = Why.OPEN if view.most > 0 else Why.PROCESS, ()
        if view.most <= 0:
            return None
        for at, (group, classes) in enumerate(self._groups):
            if at and group in view.due and (waiting := self._waiting(view, classes)):
                turn = self._offer(view, at, waiting, floor=True)
                if turn is not None:
                    return turn
        self.why, self.held = Why.OPEN, ()
        for at, (_, classes) in enumerate(self._groups):
            waiting = self._waiting(view, classes)
            for some in self._choices(waiting):
                if (turn := self._offer(view, at, some)) is not None:
                    return turn
            if any(self._why_spent(view, (c,)) is not Why.USER_LIMIT for c in waiting):
                return None
        return None

    def told(self, turn: Turn, taken: int, *, cut: bool = False) -> None:
        """The turn's `pop` leased so many jobs. `cut`: it stopped at the size of its reply."""
        if cut or taken >= len(turn.places):
            return
        self._none_idle.add(turn.classes)
        if taken < (len(turn.places) if turn.anyone is None else turn.anyone):
            self._nobody.add(turn.classes)

    def _why_spent(self, view: View, classes: tuple[str, ...]) -> Why:
        """Why a turn for these, or for others besides, would come to nothing, as far as is known.

        One for others besides had the strictest limit of them: it says nothing of those whose own
        is looser.
        """
        for known, why in ((self._nobody, Why.USER_LIMIT), (self._none_idle, Why.RESERVED)):
            if why is Why.RESERVED and _anyone(view) != 0:
                continue
            for asked in known:
                same = self._user_max(asked) == self._user_max(classes)
                if set(classes) <= set(asked) and (same or asked == classes):
                    return why
        return Why.OPEN

    def _waiting(self, view: View, classes: Sequence[str]) -> tuple[str, ...]:
        """The classes that have jobs and are below their own limit."""
        some = [c for c in classes if view.waiting[c] > 0 or view.look]
        below = tuple(c for c in some if self._left(view, c) > 0)
        if any(view.waiting[c] > 0 for c in some) and not below:
            self.why = Why.CLASS_LIMIT
        return below

    def _left(self, view: View, cls: str) -> int:
        most = self._rules[cls].inflight_max
        return view.most if most is None else min(view.most, most - view.inflight[cls])

    def _choices(self, waiting: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """All together first, then each alone."""
        if waiting:
            yield waiting
        if len(waiting) > 1:
            for cls in waiting:
                yield (cls,)

    def _user_max(self, classes: Sequence[str]) -> int:
        """The strictest of their limits; 0 where none has one."""
        return min((m for c in classes if (m := self._rules[c].user_max)), default=0)

    def _offer(
        self, view: View, at: int, classes: tuple[str, ...], *, floor: bool = False
    ) -> Turn | None:
        if (why := self._why_spent(view, classes)) is not Why.OPEN:
            self.why = why
            return None
        anyone = _anyone(view)
        if floor and anyone == 0:
            self.why = Why.RESERVED
            return None
        most = 1 if floor else min(self._left(view, c) for c in classes)
        rooms = _common([view.room(c, floor) for c in classes])
        places = self._router.places(rooms, most)
        if not places:
            self.why, self.held = _why(rooms), classes
            return None
        if anyone is not None:
            anyone = min(len(places), anyone)
        group, user_max = self._groups[at][0], self._user_max(classes)
        return Turn(group, classes, tuple(places), anyone, user_max, floor, rooms)


def _anyone(view: View) -> int | None:
    """How many more jobs may go to any user; None: no limit."""
    return None if view.busy_max is None else max(0, view.busy_max - view.taken)


def _common(rooms: list[Mapping[str, Place]]) -> Mapping[str, Place]:
    """What each backend has room for whichever of the classes a job is of."""
    first, *others = rooms
    return {
        name: min((place, *(r[name] for r in others)), key=lambda p: p.room)
        for name, place in first.items()
    }


def _why(rooms: Mapping[str, Place]) -> Why:
    """Why there are no places: what most backends say."""
    return most_common(place.why for place in rooms.values()) or Why.NO_BACKEND
