"""Which backend gets the next job: the one with the fewest in flight, of those with room.

One leader knows the jobs in flight at each backend exactly, so no randomisation is needed against
everybody choosing the same one. Equals take turns.
"""

import heapq
from collections.abc import Mapping

import msgspec

from dispatcher.why import Why


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
