"""What a leader pops, seen from outside: who went when, and what was in flight then."""

import asyncio
from collections import Counter

import msgspec
import pytest

from common.jobs import Lease, Popped
from common.keys import CLASSES
from tests.flow.world import World


class Went(msgspec.Struct, frozen=True):
    """One popped job."""

    at: float
    lease: Lease
    inflight: int
    """Jobs in flight at all backends, this one included."""
    busy_max: int | None
    """What the reserved slots allowed then to users with jobs in flight."""
    above: int
    """Jobs of higher classes that were known to wait."""

    @property
    def cost(self) -> float:
        """As booked, before weighting."""
        return self.lease.charged * self.lease.weight


class Pops:
    """Watches the leader's pops, from now on."""

    def __init__(self, w: World, monkeypatch: pytest.MonkeyPatch) -> None:
        leader = w.leader()
        assert leader is not None
        self.loop = leader._loops["m1"]
        self.went: list[Went] = []
        self.full = self.empty = 0
        self._pop = self.loop.queue.pop
        monkeypatch.setattr(self.loop.queue, "pop", self._watched)

    async def _watched(self, *args: object, **more: object) -> Popped:
        now = asyncio.get_running_loop().time()
        busy_max = self.loop._facts._ceiling(now).busy_max
        waiting = dict(self.loop._waiting)
        popped = await self._pop(*args, **more)  # type: ignore[arg-type]
        now = asyncio.get_running_loop().time()
        inflight = sum(b.load.counts(now).inflight for b in self.loop.backends)
        self.empty += not popped.leases
        self.full += bool(popped.leases)
        for n, lease in enumerate(popped.leases, start=1):
            above = sum(waiting[c] for c in CLASSES[: CLASSES.index(lease.cls)])
            self.went.append(Went(now, lease, inflight + n, busy_max, above))
        return popped

    def breaches(self) -> list[Went]:
        """Users with jobs in flight that got what is reserved."""
        return [
            w
            for w in self.went
            if w.lease.inflight and w.busy_max is not None and w.inflight > w.busy_max
        ]

    def costs(self, since: float = 0.0) -> Counter[str]:
        """By class."""
        total: Counter[str] = Counter()
        for w in self.went:
            if w.at >= since:
                total[w.lease.cls] += w.cost  # type: ignore[assignment]
        return total
