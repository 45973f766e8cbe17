"""Which waiting jobs begin as a backend has computed: of each lane the first ones, as the last
`pop` from it told. The next `pop` may take one of these before those that came before it.

What came since then is not known yet, and what has gone since then is not there to be taken. Pure.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

from dispatcher.prefix import Hashes, Prefixes
from dispatcher.routing import MATCH_SHARE

LANES_MAX = 256
"""Most lanes remembered, those popped from last."""
LIKED_MAX = 256
"""Most jobs named to one `pop`."""

Lane = tuple[str, str]
"""Class and user."""


class Ahead:
    """Of one model. Bounded."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[Lane, list[tuple[str, bytes]]] = OrderedDict()

    def told(self, lane: Lane, jobs: Iterable[tuple[str, Hashes]]) -> None:
        """These are the first of a lane now."""
        self._lanes.pop(lane, None)
        known = [(job, _worth(hashes)) for job, hashes in jobs if hashes]
        if known:
            self._lanes[lane] = known
            if len(self._lanes) > LANES_MAX:
                self._lanes.popitem(last=False)

    def liked(self, prefixes: Prefixes, backends: Collection[str]) -> list[str]:
        """The jobs that would follow their beginning to one of these backends. Where they are too
        many, those of the lanes popped from longest ago, whose turn it is soonest."""
        found: list[str] = []
        for jobs in self._lanes.values():
            found += [job for job, worth in jobs if prefixes.known(worth, backends)]
        return found[:LIKED_MAX]


def _worth(hashes: Hashes) -> bytes:
    """A backend that has this one has enough of the prompt to draw it."""
    return hashes[max(0, math.ceil(MATCH_SHARE * len(hashes)) - 1)]
