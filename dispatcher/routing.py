"""Which backend gets the next job: the one with the fewest in flight, of those with room.

One leader knows the jobs in flight at each backend exactly, so no randomisation is needed against
everybody choosing the same one. Equals take turns.

Which jobs are next is known only after their places were chosen. Then those whose prompt begins as
one that a backend has computed go there instead, while it has room and not much more in flight than
the others: 1.25 times the mean and one.
"""

import heapq
from collections.abc import Mapping, Sequence

import msgspec

from dispatcher.prefix import Hashes, Prefixes
from dispatcher.why import Why

LOAD_FACTOR = 1.25
LOAD_SPARE = 1.0
"""A backend with more in flight than the mean times the one plus the other gets no job for what it
has computed."""
MATCH_SHARE = 0.6
"""A match of a smaller share of a prompt's hashes draws it nowhere. Else the few lines that all
prompts begin with would keep them where the first one went, and other backends never saw any."""


class Place(msgspec.Struct, frozen=True):
    """What one backend may get now."""

    room: int
    """How many more jobs it may be sent; none at 0 or below."""
    inflight: int
    """How many it has."""
    why: Why = Why.OPEN
    """Why there is no room."""


class Router:
    """Remembers whose turn it was. Holds one number for each backend it was ever told of."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def places(self, rooms: Mapping[str, Place], most: int) -> list[str]:
        """Backends in the order in which the next jobs go to them, at most `most` names.

        A backend is named as often as it gets a job, at most `room` times. Nothing is booked: jobs
        that were handed out are told by `sent`.
        """
        turn = self._turn
        heap = [
            (place.inflight, self._turns.get(name, 0), name)
            for name, place in rooms.items()
            if place.room > 0
        ]
        heapq.heapify(heap)
        order: list[str] = []
        given: dict[str, int] = {}
        while heap and len(order) < most:
            inflight, _, name = heap[0]
            order.append(name)
            given[name] = given.get(name, 0) + 1
            turn += 1
            if given[name] < rooms[name].room:
                heapq.heapreplace(heap, (inflight + 1, turn, name))
            else:
                heapq.heappop(heap)
        return order

    def forget(self, backend: str) -> None:
        """This backend is gone."""
        self._turns.pop(backend, None)

    def sent(self, backend: str) -> None:
        """A job went to this backend: among equals it is the last to get another."""
        self._turn += 1
        self._turns[backend] = self._turn


def follow(
    prefixes: Prefixes, rooms: Mapping[str, Place], places: Sequence[str], jobs: Sequence[Hashes]
) -> list[str]:
    """Where the jobs go whose places `Router.places` chose with these rooms: each to the backend
    that has computed the most of its beginning, else to its own place, or where that was given
    away, to the one with the fewest in flight. `prefixes` is told."""
    load = {name: place.inflight for name, place in rooms.items()}
    room = {name: place.room for name, place in rooms.items()}
    chosen: list[str] = []
    for place, hashes in zip(places, jobs, strict=False):
        matches = prefixes.matches(hashes)
        worth = {n: depth for n, depth in matches.items() if depth >= MATCH_SHARE * len(hashes)}
        name = _computed(place, worth, load, room) or _least(place, load, room)
        prefixes.saw(name, hashes)
        load[name] += 1
        room[name] -= 1
        chosen.append(name)
    return chosen


def _computed(
    place: str, matches: Mapping[str, int], load: Mapping[str, int], room: Mapping[str, int]
) -> str | None:
    """Who has the longest match; of equals the fewest in flight, and of equals of these its own
    place, for whose turn it is."""
    if not matches:
        return None
    serving = [load[name] for name in load if load[name] > 0 or room[name] > 0]
    most = LOAD_FACTOR * sum(serving) / max(1, len(serving)) + LOAD_SPARE
    some = [n for n in matches if room.get(n, 0) > 0 and load[n] <= most]
    return min(some, key=lambda n: (-matches[n], load[n], n != place), default=None)


def _least(place: str, load: Mapping[str, int], room: Mapping[str, int]) -> str:
    """Its own place unless others have fewer in flight by now, or it is full."""
    some = [name for name in load if room[name] > 0]
    return min(some, key=lambda name: (load[name], name != place), default=place)
