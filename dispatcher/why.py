"""Why no job is sent: a closed set, for metrics and for those who ask."""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum


class Why(StrEnum):
    """One reason for which a place is not given."""

    OPEN = ""
    """There is no reason: there is a place."""
    LIMIT = "limit"
    """As many wait in the engine as may."""
    SLOTS = "slots"
    """All slots and the engine's queue are taken."""
    KV = "kv"
    """The engine's KV memory is full."""
    TPOT = "tpot"
    """The engine's time per output token is above the class's limit."""
    INFLIGHT = "inflight"
    """As many are in flight as hold the class's time per output token, or fit in KV memory."""
    STALE = "stale"
    """The engine's metrics are old, so only one at a time is sent."""
    REFUSED = "refused"
    """The backend refused a job a moment ago, or its port is gone."""
    DRAINED = "drained"
    """The backend gets no more jobs, for it is drained or was removed."""
    SILENT = "silent"
    """The backend took jobs and gave no byte: its engine is dead."""
    SLOW_START = "slow_start"
    """The backend is back since a moment ago, and gets more with each answer."""
    GIVES_WAY = "gives_way"
    """Batch gives way to the load of others there."""
    RESERVED = "reserved"
    """What is left is for users with nothing in flight, and none of them waits."""
    USER_LIMIT = "user_limit"
    """All who wait have as much in flight as one user may."""
    CLASS_LIMIT = "class_limit"
    """The class has as much in flight as it may."""
    PROCESS = "process"
    """This dispatcher runs as many jobs as it may."""
    NO_BACKEND = "no_backend"
    """The model has no backend."""


SAID: Mapping[Why, str] = {
    Why.RESERVED: "the slots that are left are for users with nothing in flight",
    Why.USER_LIMIT: "all who wait have as much in flight as one user may",
    Why.CLASS_LIMIT: "the class has as much in flight as it may",
    Why.PROCESS: "the dispatcher runs as many jobs as it may",
    Why.NO_BACKEND: "the model has no engine",
}
"""Those that are not of one backend, for people; of one backend each `Room` has its own words."""

_AWAY = (Why.DRAINED, Why.REFUSED, Why.SILENT)


def most_common(reasons: Iterable[Why]) -> Why | None:
    """What most backends say; those that are out of use only where no others are. None: there are
    none at all."""
    said = list(reasons)
    counts = Counter([why for why in said if why not in _AWAY] or said)
    return counts.most_common(1)[0][0] if counts else None
