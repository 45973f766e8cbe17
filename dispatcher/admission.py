"""How many more jobs one backend may be sent.

The leader knows its own load exactly: I jobs in flight, U of them unstarted (sent, and no first
byte yet: they wait in the engine or are being prefilled). Polls of the engine's metrics are late
by seconds in practice, so they add only what the leader cannot know: foreign load
F = max(0, W - greatest U of the last 6 s), where W is what the engine says is waiting. Taking the
greatest U makes a late W blame nobody for jobs that were the leader's own.

A job is admitted while U + F stays below the class's limit. So the engine's own queue, which
nobody can reorder, stays short, and each first byte makes room without waiting for a poll.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection

import msgspec

from dispatcher.engines import EngineFacts

BATCH = "batch"
"""The class that runs only where nothing else does."""

PEAK_S = 6.0
"""W may be so old; F is taken from the greatest U of this time."""
FRESH_PERIODS = 3
"""Metrics older than this many poll periods are stale."""
FIRST_BYTE_S = 1.0
"""Median time to the first byte where none was measured."""
FIRST_BYTES_MAX = 64
"""How many measured times the median is taken from."""
KV_TRIAL_S = 5.0
"""A backend whose KV memory is full, though nothing was in flight there for so long, gets one job:
its gauge may have stuck."""


class Room(msgspec.Struct, frozen=True):
    """How many jobs may be sent now; where none, why."""

    n: int
    reason: str = ""


class Counts(msgspec.Struct, frozen=True):
    """The numbers admission goes by."""

    inflight: int
    unstarted: int
    foreign: int


class Peak:
    """The greatest value of a step function over the last `width` seconds.

    Keeps falling values only, so never more than the greatest value it was given.
    """

    def __init__(self, width: float) -> None:
        self._width = width
        self._value = 0
        self._past: deque[tuple[float, int]] = deque()
        """(until, value), each value lower than the one before: only these can still matter."""

    def set(self, now: float, value: int) -> None:
        """The function has this value from now on; times must not fall."""
        if value < self._value:
            while self._past and self._past[-1][1] <= self._value:
                self._past.pop()
            self._past.append((now, self._value))
        self._value = value
        self._expire(now)

    def peak(self, now: float) -> int:
        """The greatest value at any time from `now - width` to `now`."""
        self._expire(now)
        return max(self._value, self._past[0][1]) if self._past else self._value

    def _expire(self, now: float) -> None:
        while self._past and self._past[0][0] < now - self._width:
            self._past.popleft()


class _Run(msgspec.Struct):
    cls: str
    streams: bool
    mine: bool
    sent_at: float
    answered: bool = False
    """Its first byte came."""
    unstarted: bool = True
    """It counts in U; without an answer this may end by inference."""


class BackendLoad:
    """What is in flight at one backend, and how much more it may get.

    Holds one entry for each job that was sent and has not ended: admission itself bounds them.
    Times are seconds on any clock that never falls.
    """

    def __init__(self, *, max_num_seqs: int | None = None, kv_max: float = 0.92) -> None:
        self.facts: EngineFacts | None = None
        """The last that was read, however old."""
        self._slots = max_num_seqs
        self._kv_max = kv_max
        self._runs: dict[str, _Run] = {}
        self._quiet: dict[str, None] = {}
        """Unstarted jobs that give no first byte before they are done, oldest first."""
        self._unstarted: Counter[str] = Counter()
        self._peak = Peak(PEAK_S)
        self._first_bytes: deque[float] = deque(maxlen=FIRST_BYTES_MAX)
        self._foreign = 0
        self._polled_at = -math.inf
        self._fresh_until = -math.inf
        self._kv_full_since: float | None = None
        self._empty_since = -math.inf
        self.failures = 0
        """Polls in a row that told nothing."""

    def sent(self, now: float, job: str, cls: str, *, streams: bool, mine: bool = True) -> None:
        """A job went to this backend. `mine` False: another dispatcher says that it runs it there.

        Telling of a known job changes nothing, but that a run of one's own replaces another's.
        """
        known = self._runs.get(job)
        if known is not None:
            if known.mine or not mine:
                return
            self.ended(now, job)
        self._runs[job] = _Run(cls, streams, mine, now)
        self._unstarted[cls] += 1
        if not streams:
            self._quiet[job] = None
        self._note(now)

    def started(self, now: float, job: str) -> None:
        """Its first byte came: of an event, or of a body. Repeats and unknown jobs are ignored."""
        run = self._runs.get(job)
        if run is None or run.answered:
            return
        run.answered = True
        if run.mine:
            self._first_bytes.append(now - run.sent_at)
        self._start(now, job)

    def ended(self, now: float, job: str) -> None:
        """It is at this backend no longer, however it ended. Unknown jobs are ignored."""
        if job not in self._runs:
            return
        self._start(now, job)
        del self._runs[job]
        if not self._runs:
            self._empty_since = now

    def keep_others(self, now: float, jobs: Collection[str]) -> None:
        """Of the jobs that other dispatchers run, forget those not in `jobs`."""
        gone = [job for job, run in self._runs.items() if not run.mine and job not in jobs]
        for job in gone:
            self.ended(now, job)

    def polled(
        self, now: float, facts: EngineFacts, *, period: float, asked_at: float | None = None
    ) -> None:
        """The engine's page was read; the next reading is `period` seconds away.

        Jobs sent after `asked_at` (None: now) cannot be in it.
        """
        self.facts = facts
        self.failures = 0
        self._polled_at = now
        self._fresh_until = now + FRESH_PERIODS * period
        self._foreign = max(0, (facts.waiting or 0) - self._peak.peak(now))
        self._infer(now, facts, now if asked_at is None else asked_at)
        if facts.kv is None or facts.kv < self._kv_max:
            self._kv_full_since = None
        elif self._kv_full_since is None:
            self._kv_full_since = now

    def expect(self, period: float) -> None:
        """The next reading comes so many seconds after the last, if that is later than said."""
        self._fresh_until = max(self._fresh_until, self._polled_at + FRESH_PERIODS * period)

    def poll_failed(self, now: float) -> None:
        """The engine's page could not be read; what was read before stays until it is stale."""
        self.failures += 1

    def fresh(self, now: float) -> bool:
        """Whether the facts are young enough to go by."""
        return now <= self._fresh_until

    def counts(self, now: float) -> Counts:
        """I, U and F."""
        self._start_by_time(now)
        foreign = self._foreign if self._load_known(now) else 0
        return Counts(len(self._runs), self._unstarted.total(), foreign)

    def room(self, now: float, cls: str, limit: int, *, others_waiting: bool) -> Room:
        """How many jobs of a class may be sent now.

        `limit`: jobs of this class are admitted while fewer wait in the engine.
        `others_waiting`: a job of another class waits in the queue (batch then gives way).
        """
        c = self.counts(now)
        known = self._load_known(now)
        limit = limit if known else min(limit, 1)
        if cls == BATCH and (reason := self._batch_gives_way(c, others_waiting)):
            return Room(0, reason)
        n = limit - (c.unstarted + c.foreign)
        if n <= 0:
            why = "" if known else self._doubt(now) + ": "
            return Room(0, f"{why}{c.unstarted + c.foreign} waiting ≥ limit {limit}")
        if self._slots is not None:
            n = min(n, self._slots + limit - c.inflight)
            if n <= 0:
                return Room(0, f"slots {c.inflight} ≥ {self._slots} + {limit}")
        kv = self.facts.kv if self.facts is not None and self.fresh(now) else None
        if kv is not None and kv >= self._kv_max:
            n = min(n, self._trials(now))
            if n <= 0:
                return Room(0, f"KV {kv:.2f} ≥ {self._kv_max:g}")
        return Room(n)

    def _batch_gives_way(self, c: Counts, others_waiting: bool) -> str:
        others = c.unstarted - self._unstarted[BATCH]
        if others_waiting:
            return "other classes wait"
        if others:
            return f"{others} of other classes not started"
        return f"{c.foreign} of others waiting" if c.foreign else ""

    def _trials(self, now: float) -> int:
        """Jobs that a backend with full KV memory may get all the same."""
        if self._runs or self._kv_full_since is None:
            return 0
        return int(now - max(self._empty_since, self._kv_full_since) >= KV_TRIAL_S)

    def _load_known(self, now: float) -> bool:
        return self.fresh(now) and self.facts is not None and self.facts.waiting is not None

    def _doubt(self, now: float) -> str:
        if self.facts is None or self.fresh(now):
            return "metrics unknown"
        return f"metrics {now - self._polled_at:.1f} s old"

    def _infer(self, now: float, facts: EngineFacts, asked_at: float) -> None:
        """Engines serve in order of arrival: of the jobs that give no first byte only the newest
        can still wait, at most as many as wait in all, or as do not run."""
        behind = [0 if facts.waiting is None else facts.waiting]
        if facts.running is not None:
            behind.append(len(self._runs) - facts.running)
        if facts.waiting is None and facts.running is None:
            return
        unseen = sum(self._runs[job].sent_at > asked_at for job in self._quiet)
        for job in list(self._quiet)[: max(0, len(self._quiet) - max(*behind, unseen))]:
            self._start(now, job)

    def _start_by_time(self, now: float) -> None:
        """Without metrics: a job that gives no first byte has started after the usual time."""
        if not self._quiet or self._load_known(now):
            return
        usual = statistics.median(self._first_bytes) if self._first_bytes else FIRST_BYTE_S
        for job in [j for j in self._quiet if now - self._runs[j].sent_at >= usual]:
            self._start(now, job)

    def _start(self, now: float, job: str) -> None:
        run = self._runs[job]
        if run.unstarted:
            run.unstarted = False
            self._unstarted[run.cls] -= 1
            self._quiet.pop(job, None)
            self._note(now)

    def _note(self, now: float) -> None:
        self._peak.set(now, self._unstarted.total())
