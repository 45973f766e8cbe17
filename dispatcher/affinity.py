"""Popped jobs go to the backend that has computed how their prompt begins: where that is another
than the one their `pop` wrote down, it is written down before anything is sent there."""

from collections.abc import Sequence

import msgspec

from common.errors import WireError
from common.jobs import Popped
from common.queue import Queue
from common.settings import ModelSettings
from common.wire import decode_meta
from dispatcher.ahead import Ahead
from dispatcher.backend import Backend
from dispatcher.parts import Parts
from dispatcher.prefix import Prefixes, split
from dispatcher.routing import follow
from dispatcher.turns import Turn


class Affinity:
    """Of one model; of no effect before `configure`. `backends` may change while it is used."""

    def __init__(self, queue: Queue, parts: Parts, backends: Sequence[Backend]) -> None:
        self._queue = queue
        self._parts = parts
        self._on = False
        self.lookahead = 0
        """For `Queue.pop`."""
        self._backends = backends
        self._prefixes = Prefixes()
        self._ahead = Ahead()

    def configure(self, settings: ModelSettings) -> None:
        """Go by these settings from the next `pop` on."""
        self._on = settings.prefix_affinity
        self.lookahead = settings.prefix_lookahead if self._on else 0

    def liked(self, turn: Turn) -> Sequence[str]:
        """For the `pop` of this turn: jobs whose prompts begin as its backends have it."""
        return self._ahead.liked(self._prefixes, set(turn.places)) if self.lookahead else ()

    async def placed(self, turn: Turn, popped: Popped) -> Popped:
        """The same jobs at the backends they go to. Raises BrokerError where that could not be
        written down: then nothing may be sent, and the caller gives the jobs back."""
        for heads in popped.heads:
            jobs = [(job, _hashes(meta)) for job, meta in heads.jobs]
            self._ahead.told((heads.cls, heads.user), jobs)
        useful = len(self._backends) > 1 or self.lookahead > 0
        if not self._on or not useful or not popped.leases:
            return popped
        self._prefixes.keep([b.url for b in self._backends if b.reachable is not False])
        # A job that failed before need not go where it failed.
        hashes = [() if x.tries else _hashes(x.meta) for x in popped.leases]
        chosen = follow(self._prefixes, turn.rooms, turn.places, hashes)
        leases = [
            lease if lease.backend == name else msgspec.structs.replace(lease, backend=name)
            for lease, name in zip(popped.leases, chosen, strict=True)
        ]
        moved = [
            (new.job, new.attempt, new.backend)
            for old, new in zip(popped.leases, leases, strict=True)
            if old is not new
        ]
        if moved:
            # A job that is cancelled or lost meanwhile learns that as any other: by its `start`.
            lease_ms = self._parts.settings.job_lease_ms
            await self._queue.renew(moved, self._parts.owner, lease_ms=lease_ms)
        return msgspec.structs.replace(popped, leases=leases)


def _hashes(meta: bytes) -> Sequence[bytes]:
    try:
        return split(decode_meta(meta).prefix)
    except WireError:
        return ()
