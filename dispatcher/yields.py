"""Which batch jobs are taken out of their engines again, so that others have their slots.

An engine serves in order of arrival: a job that is sent while all slots are taken waits there until
one ends, for seconds, however short the queue in front of it is. Where batch holds slots, that wait
is needless: of the jobs of which no byte of an answer has come the youngest is aborted, goes back
to its place in the order and is run again later. What the engine did for it is lost, so:

- As many are taken back as jobs inside an engine lack a slot, while one of another class is
  unstarted there, or waits outside because the engine's queue is full. Nothing is taken back for
  jobs that memory, a limit of their class or a refusal holds back. However many wait outside, they
  lack nothing yet: they are sent as those inside start, and more slots would be idle until then.
- Where the slots are known a slot is lacking for each job in flight beyond them. Where they are
  not, for each that the engine says is waiting, once it has said so for PATIENCE_S beside such a
  job: a prompt takes time to be computed, and pages are old. After each time it has to say so anew,
  so that what was taken back is seen before more is.
- A job that was taken back YIELDS_MAX times is left alone, as is one that runs for a floor share:
  batch goes on under any load. So are streams from their first event on, for it cannot be unsaid.

Pure: time is an argument, in seconds.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from dispatcher.admission import BATCH
from dispatcher.engines.facts import EngineFacts
from dispatcher.why import Why

FULL = (Why.LIMIT, Why.SLOTS)
"""Why jobs wait outside where an engine's own queue is full."""
YIELDS_MAX = 3
"""A job that was taken back so often runs to its end."""
PATIENCE_S = 0.5
"""So long an engine whose slots are not known says that somebody waits."""


class Pressed(msgspec.Struct, frozen=True):
    """One backend, as one decision is made."""

    name: str
    inflight: int
    unstarted: int
    """Of all classes."""
    others: int
    """Of classes other than batch, unstarted."""
    slots: int | None = None
    """None: not known."""
    facts: EngineFacts | None = None
    """What its engine says of itself, where that is young enough to go by."""


class Yields:
    """The batch jobs of one model that may be taken back.

    It holds one entry for each that was sent and has not ended: admission itself bounds them.
    """

    def __init__(self, *, kv_max: float = 0.92) -> None:
        """`kv_max`: an engine above it lacks memory, not slots."""
        self._kv_max = kv_max
        self._where: dict[str, str] = {}
        """Job -> backend."""
        self._jobs: dict[str, dict[str, None]] = {}
        """Of each backend those that may be taken back, oldest first."""
        self._leaving: Counter[str] = Counter()
        """At each backend those that were, and are there still."""
        self._since: dict[str, float] = {}
        """Since when an engine of unknown slots says that somebody waits."""

    def __len__(self) -> int:
        return len(self._where)

    def sent(self, backend: str, job: str, yields: int) -> None:
        """A batch job goes there, which was taken back so often before."""
        if yields < YIELDS_MAX:
            self._where[job] = backend
            self._jobs.setdefault(backend, {})[job] = None

    def gone(self, job: str) -> None:
        """A first byte of its answer came, or it is there no longer. Others are ignored."""
        backend = self._where.pop(job, None)
        if backend is None:
            return
        jobs = self._jobs.get(backend, {})
        if job in jobs:
            del jobs[job]
        else:
            self._leaving[backend] -= 1
        if not jobs:
            self._jobs.pop(backend, None)
        if not self._leaving[backend]:
            del self._leaving[backend]

    def free(self, backend: str) -> int:
        """How many may be taken back there: their slots are as good as free for other classes."""
        return len(self._jobs.get(backend, ()))

    def take(
        self, now: float, backends: Iterable[Pressed], why: Why, classes: Collection[str]
    ) -> list[str]:
        """The jobs that are to be taken back now; of each backend the youngest first, never more
        than are unstarted there.

        `why` jobs of these `classes` wait outside, as `turns.Round` tells.
        """
        outside = why in FULL and BATCH not in classes
        before, self._since = self._since, {}
        taken: list[str] = []
        for at in backends:
            if at.others or outside:
                lacking = self._lacking(now, at, before.get(at.name, now))
                n = min(lacking, at.unstarted) - self._leaving[at.name]
                taken += self._youngest(at.name, n)
        return taken

    def _lacking(self, now: float, at: Pressed, since: float) -> int:
        """Slots that jobs in this engine's queue want."""
        if at.slots is not None:
            return at.inflight - at.slots
        facts = at.facts
        if facts is None or not facts.waiting or (facts.kv or 0) >= self._kv_max:
            return 0
        due = now - since >= PATIENCE_S
        self._since[at.name] = now if due else since
        return facts.waiting if due else 0

    def _youngest(self, backend: str, n: int) -> list[str]:
        jobs = self._jobs.get(backend, {})
        taken = [jobs.popitem()[0] for _ in range(min(n, len(jobs)))]
        self._leaving[backend] += len(taken)
        return taken
