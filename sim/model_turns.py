"""The executable specification of the fair order: lifts, turns, the floor share, places."""

import math
from collections.abc import Sequence

from sim.model_state import Job, State

LIFTS_MAX = 65_535


class Turns(State):
    """Whose turn it is."""

    def lift(self, order: str, name: str) -> None:
        """Who becomes backlogged stands at V, behind those lifted before; or further on."""
        lifted = self.vtime[order] + min(self.lifts[order], LIFTS_MAX) / (LIFTS_MAX + 1)
        if self.counters[order].get(name, 0) <= lifted:
            self.counters[order][name] = lifted
            self.lifts[order] += 1

    def follow(self, order: str, c: int) -> None:
        """V is the counter of who goes, but falls only by what was given back."""
        v, back = self.vtime[order], self.back.get(order, 0)
        c = max(0, c, math.ceil(v - back)) if c < v else c
        if c != v:
            self.vtime[order], self.lifts[order] = c, 0
            self.back.pop(order, None)
            if c < v and back > v - c:
                self.back[order] = back - (v - c)

    def turn(
        self, classes: Sequence[str], user_max: int = 0, *, idle: bool = False
    ) -> tuple[float, Job] | None:
        """Whose turn it is, and its counter: the least over the classes; of equal ones the higher
        class."""
        found = [(self._first(c, user_max, idle), c) for c in classes]
        turns = [
            (self.counters[self.group[c]][name], i, c, user)
            for i, ((name, user), c) in enumerate(found)
            if name
        ]
        return (min(turns)[0], self.lane(*min(turns)[2:])[0]) if turns else None

    def ahead(self, head: Job, lookahead: int, liked: Sequence[str]) -> Job:
        """Of the first jobs of a lane the first that is liked, where it may pass those before it:
        each lets `lookahead` go before it in all."""
        passed: list[Job] = []
        for job in self.lane(head.cls, head.user)[: lookahead + 1]:
            if not job.record:
                break
            if job.id in liked:
                for other in passed:
                    other.passed += 1
                return job
            if job.passed >= lookahead:
                break
            passed.append(job)
        return head

    def _first(self, cls: str, user_max: int, idle: bool) -> tuple[str, str]:
        """The first in a class that may go: its name in the order, and the user whose job goes."""

        def may(user: str) -> bool:
            return not user_max or self.inflight(user) < user_max

        for name in self.backlog(cls):
            if idle and self.inflight(name):
                continue
            order = f"{self.group[cls]}:{name[:-1]}"
            users = self.stand(order, cls) if name.endswith(":") else [name]
            user = next((u for u in users if may(u)), "")
            if user:
                return name, user
        return "", ""

    def owe(self, popped: str, share: float, cost: float) -> None:
        """A lower group earns its share while it waits, and pays where it goes before others."""
        names = [group for group, _ in self.groups]
        waits = {g: any(j.cls in members for j in self.waiting()) for g, members in self.groups}
        at = names.index(popped)
        if share and any(waits[g] for g in names[:at]):
            self.owed[popped] = self.owed.get(popped, 0) - cost
        for group in names[at + 1 :]:
            if share and waits[group]:
                self.owed[group] = min(self.owed.get(group, 0) + share * cost, cost)
            elif self.owed.get(group, 0) > 0:
                del self.owed[group]

    def place(self, cls: str, user: str, job: str, counts: dict[str, int]) -> int:
        """How many jobs go until one has gone; 0 where it does not wait."""
        lane = [j.id for j in self.lane(cls, user)]
        if job not in lane:
            return 0
        above = 0
        for _, members in self.groups:
            if cls in members:
                break
            above += sum(counts[c] for c in members)
        higher = members[: members.index(cls)]
        before = lane.index(job) + sum(self.jobs_of(c, user) for c in higher)
        for order, name in reversed(self.levels(cls, user)):
            before = self._before(order, name, before)
        return above + before + 1

    def _before(self, order: str, name: str, before: int) -> int:
        """Jobs that go before one with so many of its own user's before it."""
        members = self.members(order)
        users = {u for c in members for u in self.stand(order, c)}
        turns, ahead = before, 1
        for other in sorted(users, key=lambda u: (self.counters[order][u], u.encode())):
            if other == name:
                ahead = 0
            else:
                jobs = sum(self.jobs_of(c, other) for c in members)
                turns += min(jobs, before + ahead)
        return turns
