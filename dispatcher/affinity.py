"""Popped jobs go to the backend that has computed how their prompt begins: where that is another
than the one their `pop` wrote down, it is written down before anything is sent there."""

from collections.abc import Sequence

import msgspec

from common.errors import WireError
from common.jobs import Lease, Popped
from common.queue import Queue
from common.settings import ModelSettings
from common.wire import decode_meta
from dispatcher.backend import Backend
from dispatcher.parts import Parts
from dispatcher.prefix import Prefixes, split
from dispatcher.routing import follow
from dispatcher.turns import Turn


class Affinity:
    """Of one model. `backends` may change while it is used."""

    def __init__(
        self, queue: Queue, parts: Parts, settings: ModelSettings, backends: Sequence[Backend]
    ) -> None:
        self._queue = queue
        self._parts = parts
        self._on = settings.prefix_affinity
        self._backends = backends
        self._prefixes = Prefixes()

    async def placed(self, turn: Turn, popped: Popped) -> Popped:
        """The same jobs at the backends they go to. Raises BrokerError where that could not be
        written down: then nothing may be sent, and the caller gives the jobs back."""
        if not self._on or len(self._backends) < 2 or not popped.leases:
            return popped
        self._prefixes.keep([b.url for b in self._backends if b.reachable is not False])
        jobs = [_hashes(lease) for lease in popped.leases]
        chosen = follow(self._prefixes, turn.rooms, turn.places, jobs)
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


def _hashes(lease: Lease) -> Sequence[bytes]:
    """None of a job that failed before: it need not go where it failed."""
    if lease.tries:
        return ()
    try:
        return split(decode_meta(lease.meta).prefix)
    except WireError:
        return ()
