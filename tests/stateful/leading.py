"""The steps of those who lead; a part of `Steps`."""

from typing import Any

from common.jobs import Due
from common.keys import path
from common.queue import Queue
from sim.model import Model

OWNERS = ["d1", "d2"]


class Leading:
    """See `Steps`, which has what is named here."""

    model: Model
    now: int
    terms: dict[str, int]
    do: Any
    timed: Any
    remember: Any
    lose_history: Any

    def lead(self, op: str, owner: str, honest: bool, hold_ms: int) -> None:
        term = self.terms[owner] if honest else 7
        reply = self.timed("lead", op, owner, term=term, hold_ms=hold_ms)
        if reply.word == "leader":
            self.terms[owner] = reply.term

    def leading(self, owner: str, how: str = "rightly") -> tuple[str, int]:
        """Who leads and the term, once there is a leader; or a term or a time that is over."""
        h = self.model.leader
        if h is None or h.deadline <= self.now:
            self.lead("take", owner, True, 0)
            h = self.model.leader
        assert h
        if how == "too late":
            self.now += 2_000
        return h.owner, h.term - (how == "an old term")

    def time_passes(self, ms: int, renewed: bool) -> None:
        self.now += ms
        if renewed and self.model.leader:
            self.lead("renew", self.model.leader.owner, True, 0)

    def clock_set_back(self, owner: str, fresh: bool) -> None:
        if fresh:
            self.lose_history(True, 0, False, 0)
            self.lead("take", owner, True, 2_000)
        self.now -= 20_000
        self.lead("take", OWNERS[owner == OWNERS[0]], True, 0)
        self.time_passes(0, True)

    def reap(self, owner: str, how: str, cls: str, dead: list[str], sub: bool = False) -> None:
        owner, term = self.leading(owner, how)
        group = self.model.group[cls]
        key = path("k") if sub else ""
        due = self.model.reap(owner, term, dead, group, key, now_ms=self.now)

        async def call(queue: Queue) -> list[Due] | None:
            reply = await queue.reap(owner, term, dead, group, key, now_ms=self.now)
            if reply is None:
                return None
            named = [d for d in reply[0] if d.why != "gateway"]
            rest = [d for d in reply[0] if d.why == "gateway"]
            return named + sorted(rest, key=lambda d: d.job)

        self.do(due, call)
        for one in due or []:
            self.remember(one, one.owner)

    def leases_run_out(self, owner: str, cls: str, dead: list[str]) -> None:
        self.now += 6_000
        self.timed("lead", "take", owner, grace_ms=0)
        self.reap(owner, "rightly", cls, dead)
