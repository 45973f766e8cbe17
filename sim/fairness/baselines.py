"""Orders that a gateway might have instead of the fair one, with the same methods."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from common.keys import CLASSES
from sim.fairness.jobs import Entry


class Waiting(Protocol):
    """What a simulated gateway asks of its order; `sim.fairness.order.Order` has it too."""

    waiting: dict[str, int]

    def enqueue(self, entry: Entry) -> None: ...

    def pop(
        self, classes: Sequence[str], places: int, *, anyone: int | None = None,
        user_max: int = 0, floor: float = 0.0,
    ) -> list[Entry]: ...  # fmt: skip

    def charge(self, job: str, cost: float) -> None: ...

    def settle(self, job: str, cost: float, learn: int | None) -> None: ...

    def due(self) -> tuple[str, ...]: ...


class FirstIn:
    """First in, first out."""

    def __init__(self) -> None:
        self.waiting = dict.fromkeys(CLASSES, 0)
        self._lane: deque[Entry] = deque()

    def enqueue(self, entry: Entry) -> None:
        """To the end."""
        self._lane.append(entry)
        self.waiting[entry.cls] += 1

    def pop(
        self, classes: Sequence[str], places: int, *, anyone: int | None = None,
        user_max: int = 0, floor: float = 0.0,
    ) -> list[Entry]:  # fmt: skip
        """From the front, of whatever class; nothing is asked of users."""
        out = [self._lane.popleft() for _ in range(min(places, len(self._lane)))]
        for entry in out:
            self.waiting[entry.cls] -= 1
        return out

    def charge(self, job: str, cost: float) -> None:
        """Nothing is counted."""

    def settle(self, job: str, cost: float, learn: int | None) -> None:
        """Nothing is counted."""

    def due(self) -> tuple[str, ...]:
        """There are no groups."""
        return ()


class RoundRobin(FirstIn):
    """Users take turns, one request each."""

    def __init__(self) -> None:
        super().__init__()
        self._lanes: dict[str, deque[Entry]] = {}
        self._turns: deque[str] = deque()

    def enqueue(self, entry: Entry) -> None:
        """To the end of its user's lane; a user who had none comes last."""
        if entry.user not in self._lanes:
            self._lanes[entry.user] = deque()
            self._turns.append(entry.user)
        self._lanes[entry.user].append(entry)
        self.waiting[entry.cls] += 1

    def pop(
        self, classes: Sequence[str], places: int, *, anyone: int | None = None,
        user_max: int = 0, floor: float = 0.0,
    ) -> list[Entry]:  # fmt: skip
        """One of each user in turn, of whatever class."""
        out: list[Entry] = []
        while self._turns and len(out) < places:
            user = self._turns.popleft()
            out.append(self._lanes[user].popleft())
            self.waiting[out[-1].cls] -= 1
            if self._lanes[user]:
                self._turns.append(user)
            else:
                del self._lanes[user]
        return out
