"""Which backend has computed how much of a prompt's beginning, as far as the leader has seen.

A prompt comes as hashes of ever longer beginnings (common/intake/prefix.py). Each backend that got
one is taken to hold all of them; what it held longest unused is forgotten first, as an engine does.
Only the leader learns: another one begins with nothing. Pure.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from common.wire import PREFIX_HASH_BYTES, PREFIX_HASHES_MAX

HASHES_MAX = 65_536
"""Most hashes remembered of all backends of a model together, about 12 MB."""

Hashes = Sequence[bytes]
"""Of one prompt, the shortest beginning first."""


def split(prefix: bytes) -> list[bytes]:
    """The hashes in a job's `JobMeta.prefix`; a rest that is no whole hash is left out."""
    size = PREFIX_HASH_BYTES
    end = min(len(prefix) // size, PREFIX_HASHES_MAX) * size
    return [prefix[at : at + size] for at in range(0, end, size)]


class Prefixes:
    """What each backend of one model has computed. Bounded."""

    def __init__(self, most: int = HASHES_MAX) -> None:
        """`most`: hashes of all backends together."""
        self._most = most
        self._seen: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._seen.values()))

    def keep(self, backends: Collection[str]) -> None:
        """Forget all others: they are gone, or come back with nothing computed."""
        for name in [name for name in self._seen if name not in backends]:
            del self._seen[name]

    def saw(self, backend: str, hashes: Hashes) -> None:
        """A prompt goes to this backend."""
        if not hashes:
            return
        seen = self._seen.setdefault(backend, OrderedDict())
        # The longest first: so what is forgotten of a prompt is always its end, as in an engine.
        for each in reversed(hashes):
            seen[each] = None
            seen.move_to_end(each)
        most = self._most // len(self._seen)
        for others in self._seen.values():
            while len(others) > most:
                others.popitem(last=False)

    def known(self, beginning: bytes, backends: Collection[str]) -> bool:
        """Whether one of these backends has a beginning."""
        return any(beginning in self._seen.get(name, {}) for name in backends)

    def matches(self, hashes: Hashes) -> Mapping[str, int]:
        """How many of the hashes, from the first on, each backend has; those with none left out."""
        if not hashes:
            return {}
        depths = ((name, _depth(seen, hashes)) for name, seen in self._seen.items())
        return {name: depth for name, depth in depths if depth}


def _depth(seen: Collection[bytes], hashes: Hashes) -> int:
    """Where a beginning is known all shorter ones are, so halving finds the longest."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in seen:
            low = middle
        else:
            high = middle - 1
    return low
