"""How many more jobs one backend may be sent.

The leader knows its own load exactly: I jobs in flight, U of them unstarted (sent, and no first
byte yet: they wait in the engine or are being prefilled). Polls of the engine's metrics are late
by seconds in practice, so they add only what the leader cannot know: foreign load
F = max(0, W - greatest U of the last 6 s), where W is what the engine says is waiting. Taking the
greatest U makes a late W blame nobody for jobs that were the leader's own.

A job is admitted while U + F stays below max(limit of the class, ⌈µ·d⌉). So the engine's own queue,
which nobody can reorder, stays short, and each first byte makes room without waiting for a poll.
µ is completions a second here and d the delay until one is noticed and made up for: where jobs are
so short that many end within d, fewer waiting than that would leave slots unused.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection

import msgspec

from dispatcher.engines.facts import EngineFacts
from dispatcher.peak import Peak
from dispatcher.rate import Rate
from dispatcher.slots import EngineSlots
from dispatcher.tpot import Tpot
from dispatcher.why import Why

BATCH = "batch"
"""The class that runs only where nothing else does."""

PEAK_S = 6.0
"""W may be so old; F is taken from the greatest U of this time."""
FRESH_PERIODS = 3
"""Metrics older than this many poll periods are stale."""
FIRST_BYTE_S = 1.0
"""Median time to the first byte where none was measured."""
FIRST_BYTES_MAX = 64
NOTICE_S = 0.05
"""d: round trip, one engine step and the pop. It is a bound, not measured: the time to a first byte
holds the wait in the engine too, and a limit that grows with that wait would never stop growing."""
COMPLETED_S = 10.0
"""µ is the mean of this time."""
HEADROOM = 1 / 16
"""Batch leaves this share of the slots free, rounded up."""
KV_TRIAL_S = 5.0
"""A backend whose KV memory is full, though nothing was in flight there for so long, gets one job:
its gauge may have stuck."""


class Room(msgspec.Struct, frozen=True):
    """How many jobs may be sent now; where none, why: for people, and as one of a closed set."""

    n: int
    reason: str = ""
    why: Why = Why.OPEN


class Counts(msgspec.Struct, frozen=True):
    """The numbers admission goes by."""

    inflight: int
    unstarted: int
    foreign: int


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
        self.slots = EngineSlots(max_num_seqs)
        self.tpot = Tpot()
        self._kv_max = kv_max
        self._runs: dict[str, _Run] = {}
        self._quiet: dict[str, None] = {}
        """Unstarted jobs that give no first byte before they are done, oldest first."""
        self._inflight: Counter[str] = Counter()
        self._unstarted: Counter[str] = Counter()
        self._completed = Rate(COMPLETED_S)
        self.peak = Peak(PEAK_S)
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
        self._inflight[cls] += 1
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
        run = self._runs.get(job)
        if run is None:
            return
        if not run.unstarted:
            self._completed.count(now)
        self._start(now, job)
        del self._runs[job]
        self._inflight[run.cls] -= 1
        if not self._runs:
            self._empty_since = now

    def keep_others(self, now: float, jobs: Collection[str]) -> None:
        """Of the jobs that other dispatchers run, forget those not in `jobs`."""
        for job in [j for j, run in self._runs.items() if not run.mine and j not in jobs]:
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
        self._foreign = max(0, (facts.waiting or 0) - self.peak.all(now))
        self._infer(now, facts, now if asked_at is None else asked_at)
        self.slots.polled(now, facts, len(self._runs) - self._unstarted.total())
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
        self.slots.poll_failed(self.failures)

    def fresh(self, now: float) -> bool:
        """Whether the facts are young enough to go by."""
        return now <= self._fresh_until

    def counts(self, now: float) -> Counts:
        """I, U and F."""
        self._start_by_time(now)
        foreign = self._foreign if self._load_known(now) else 0
        return Counts(len(self._runs), self._unstarted.total(), foreign)

    def inflight(self, cls: str) -> int:
        """Jobs of a class in flight."""
        return self._inflight[cls]

    def others(self) -> int:
        """Unstarted jobs of other classes than batch."""
        return self._unstarted.total() - self._unstarted[BATCH]

    def room(
        self, now: float, cls: str, limit: int, *, floor: bool = False, slots: int | None = None,
        headroom: float = HEADROOM, tpot_s: float | None = None,
    ) -> Room:  # fmt: skip
        """How many jobs of a class may be sent now.

        `limit`: jobs of this class are admitted while fewer wait in the engine.
        `floor`: a job that runs for its class's floor share need not give way, though it is batch.
        `slots`: of this backend, where they are known otherwise than here. `headroom`: the share
        of them that batch leaves free. `tpot_s`: none are sent while time per output token is known
        to be above it, unless nothing is in flight.
        """
        c = self.counts(now)
        known = self._load_known(now)
        limit = max(limit, self._keeps_up(now)) if known else min(limit, 1)
        if cls == BATCH and not floor and (reason := self._batch_gives_way(c)):
            return Room(0, reason, Why.GIVES_WAY)
        if tpot_s is not None and (reason := self._slow(now, tpot_s)):
            return Room(0, reason, Why.TPOT)
        n = limit - (c.unstarted + c.foreign)
        if n <= 0:
            why = "" if known else self._doubt(now) + ": "
            text = f"{why}{c.unstarted + c.foreign} waiting ≥ limit {limit}"
            return Room(0, text, Why.LIMIT if known else Why.STALE)
        most = self._slots_for_batch(slots, headroom)
        if cls != BATCH or floor:
            configured = self.slots.configured
            most = None if configured is None else configured + limit  # others may wait for one
        if most is not None:
            n = min(n, most - c.inflight)
            if n <= 0:
                return Room(0, f"{c.inflight} in flight ≥ {most}", Why.SLOTS)
        kv = self.facts.kv if self.facts is not None and self.fresh(now) else None
        if kv is not None and kv >= self._kv_max:
            n = min(n, self._trials(now))
            if n <= 0:
                return Room(0, f"KV {kv:.2f} ≥ {self._kv_max:g}", Why.KV)
        return Room(n)

    def _keeps_up(self, now: float) -> int:
        """⌈µ·d⌉: jobs that end before the first of them is made up for."""
        return math.ceil(self._completed.per_second(now) * NOTICE_S)

    def _slots_for_batch(self, slots: int | None, headroom: float) -> int | None:
        """Most jobs in flight for another of batch to be sent."""
        n = slots or (None if self.slots.probed else self.slots.value)
        return None if n is None else max(1, n - math.ceil(n * headroom))

    def _batch_gives_way(self, c: Counts) -> str:
        if others := self.others():
            return f"{others} of other classes not started"
        return f"{c.foreign} of others waiting" if c.foreign else ""

    def _slow(self, now: float, most: float) -> str:
        tpot = self.tpot.mean(now) if self._runs else None
        if tpot is None or tpot <= most:
            return ""
        return f"TPOT {tpot * 1e3:.0f} ms > {most * 1e3:g} ms"

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
        self.peak.set(now, self._unstarted.total())
