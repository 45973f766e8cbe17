"""How many more jobs one backend may be sent.

The leader knows its own load exactly: I jobs in flight, U of them unstarted (sent, and no first
byte yet: they wait in the engine or are being prefilled). Polls of the engine's metrics are late
by seconds in practice, so they add only what the leader cannot know: foreign load
F = max(0, W - greatest U of the last 6 s), where W is what the engine says is waiting. Taking the
greatest U makes a late W blame nobody for jobs that were the leader's own.

A job is admitted while U + F stays below T = max(limit of the class, ⌊1.25·µ·d⌋ + 1). So the
engine's own queue, which nobody can reorder, stays short, and each first byte makes room without
waiting for a poll. µ is completions a second here and d the delay from sending a job to its first
byte in an engine that takes it in at once: the round trip, what is left of the step under way, and
the next. An engine takes what waits as a step begins, and what is sent for the first bytes of one
step comes too late for the next: so 2·µ·step jobs must be on their way for none of its slots to be
free for long. They wait about as long as that, however many they are; a quarter more lets the
number rise where jobs were few or long before.

Where slots are known to be free (configured or learned), so much is sent as the engine is seen to
take: ⌊1.25·λ·d⌋ + 1, λ being first bytes a second. Not elsewhere: once the slots are full, what is
then on its way waits for jobs to end, and long jobs end rarely. And there batch jobs on their way
keep nobody else from being sent: the engine takes in both as its next step begins.

For batch µ and λ are its own, and a half more is sent, for it goes only while no others are on
their way. With everybody's it would send as many at once, and their prompts would be computed
before those of others that come just then: chat's p99 1.53 instead of 1.41 times alone in `sim`'s
`batch-lines`, for 3 % more of what chat leaves.

Where a class has a target of time per output token, none of it is admitted above the target, and I
stays below a limit L that follows it (`dispatcher.aimd`); preemptions, which say that the engine's
memory holds less than runs there, lower L in any case.
"""

import math
from collections.abc import Callable

import msgspec

from dispatcher.aimd import Aimd
from dispatcher.engines.facts import EngineFacts
from dispatcher.flight import Flight
from dispatcher.slots import EngineSlots
from dispatcher.tpot import Signal
from dispatcher.why import Why

BATCH = "batch"
"""The class that runs only where nothing else does."""

FRESH_PERIODS = 3
"""Metrics older than this many poll periods are stale."""
NOTICE_S = 0.02
"""Round trip and pop: from a first byte until what is sent in its place is in the engine."""
STEPS = 2
"""Steps of the engine from sending a job to its first byte: what is left of the one under way, and
the one that computes its prompt."""
DELAY_MAX_S = 1.0
UNKNOWN_S = 0.05
"""Time from sending to first byte where the length of a step is not known."""
SPARE = 1.25
"""More than the engine took in is sent, so that it can show that it takes more."""
SPARE_BATCH = 1.5
"""The same of batch, which is only sent while no others are on their way."""
DELAYS = 2
"""µ and λ are means of so many d: few, so that they follow within a second."""
HEADROOM = 1 / 16
"""Batch leaves this share of the slots free, rounded up."""
KV_TRIAL_S = 5.0
"""A backend whose KV memory is full, though nothing was in flight there for so long, gets one job:
its gauge may have stuck."""


Count = Callable[[float, float, str | None], int]
"""Jobs of a class (None: of all) that something happened to in the last seconds: (now, seconds,
class)."""


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


class BackendLoad(Flight):
    """What is in flight at one backend, and how much more it may get.

    Times are seconds on any clock that never falls.
    """

    def __init__(self, *, max_num_seqs: int | None = None, kv_max: float = 0.92) -> None:
        super().__init__()
        self.facts: EngineFacts | None = None
        """The last that was read, however old."""
        self.slots = EngineSlots(max_num_seqs)
        self.signal = Signal()
        self._kv_max = kv_max
        self._limits: dict[str, Aimd] = {}
        """L of each class that was asked for."""
        self._foreign = 0
        self._polled_at = -math.inf
        self._fresh_until = -math.inf
        self._kv_full_since: float | None = None
        self._preemptions: int | None = None
        self._preempted_at = -math.inf
        self.failures = 0
        """Polls in a row that told nothing."""

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
        self.infer(now, facts.waiting, facts.running, now if asked_at is None else asked_at)
        self.slots.polled(now, facts, self.jobs - self.unstarted)
        if facts.tpot is not None:
            self.signal.histogram.read(now, facts.tpot.seconds, facts.tpot.count)
        if facts.preemptions is not None:
            if facts.preemptions > (self._preemptions or 0) and self._preemptions is not None:
                self._preempted_at = now
            self._preemptions = facts.preemptions
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
        if not self._load_known(now):
            self.guess(now, self.slots.configured)
            return Counts(self.jobs, self.unstarted, 0)
        return Counts(self.jobs, self.unstarted, self._foreign)

    def others(self) -> int:
        """Unstarted jobs of other classes than batch."""
        return self.unstarted - self.unstarted_of(BATCH)

    def tpot(self, now: float) -> float | None:
        """Time per output token, in seconds; None where nothing is known of late."""
        return self.signal.seconds(now, fresh=self.fresh(now))

    def inflight_max(self, cls: str) -> int | None:
        """L of a class, as it was when `room` was last asked for it; None: no limit."""
        limit = self._limits.get(cls)
        return None if limit is None else limit.limit

    def room(
        self, now: float, cls: str, limit: int, *, floor: bool = False, slots: int | None = None,
        headroom: float = HEADROOM, tpot_s: float | None = None,
    ) -> Room:  # fmt: skip
        """How many jobs of a class may be sent now.

        `limit`: jobs of this class are admitted while fewer wait in the engine.
        `floor`: a job that runs for its class's floor share need not give way, though it is batch.
        `slots`: of this backend, where they are known otherwise than here. `headroom`: the share
        of them that batch leaves free. `tpot_s`: the class's target of time per output token; it
        does not hold where nothing is in flight.
        """
        c = self.counts(now)
        most_inflight = self._follow(now, cls, c.inflight, tpot_s)
        known = self._load_known(now)
        limit = max(limit if known else min(limit, 1), self.keeps_up(now, cls))
        if cls == BATCH and not floor and (reason := self._batch_gives_way(c)):
            return Room(0, reason, Why.GIVES_WAY)
        if tpot_s is not None and (reason := self._slow(now, tpot_s)):
            return Room(0, reason, Why.TPOT)
        n = limit - (c.unstarted + c.foreign)
        if known and not c.foreign:
            n = max(n, min(self._fills(now, cls, limit), self._free(slots)))
        if n <= 0:
            why = "" if known else self._doubt(now) + ": "
            text = f"{why}{c.unstarted + c.foreign} waiting ≥ limit {limit}"
            return Room(0, text, Why.LIMIT if known else Why.STALE)
        if most_inflight is not None and c.inflight:
            n = min(n, most_inflight - c.inflight)
            if n <= 0:
                what = "after preemptions" if tpot_s is None else f"for TPOT {tpot_s * 1e3:g} ms"
                return Room(0, f"{c.inflight} in flight ≥ {most_inflight} {what}", Why.INFLIGHT)
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

    def keeps_up(self, now: float, cls: str | None = None) -> int:
        """Jobs that must be on their way for as many to start as end: see above."""
        return self._in_time(now, self.done, cls)

    def _delay(self, now: float) -> float:
        """d: from sending a job to its first byte, in an engine that takes it in at once."""
        step = self.signal.gaps.gap(now)
        return UNKNOWN_S if step is None else min(NOTICE_S + STEPS * step, DELAY_MAX_S)

    def _fills(self, now: float, cls: str, limit: int) -> int:
        """Jobs of a class that may be sent into slots that are known to be free."""
        beside_batch = 0 if cls == BATCH else limit - self.others()
        return max(self._in_time(now, self.begun, cls) - self.unstarted, beside_batch)

    def _free(self, slots: int | None) -> int:
        """Slots that are known to be free."""
        n = slots or self.slots.value
        return 0 if n is None else max(0, n - self.jobs)

    def _in_time(self, now: float, count: Count, cls: str | None) -> int:
        """Some more than the jobs that are counted in d, and one. Batch takes no others' places:
        what it sends at once would be computed before those of others that come just then."""
        spare, whose = (SPARE_BATCH, BATCH) if cls == BATCH else (SPARE, None)
        return math.floor(spare * count(now, DELAYS * self._delay(now), whose) / DELAYS) + 1

    def _follow(self, now: float, cls: str, inflight: int, tpot_s: float | None) -> int | None:
        """L of a class, by what is known now."""
        limit = self._limits.get(cls)
        if limit is None:
            limit = self._limits[cls] = Aimd(tpot_s)
        limit.aim(tpot_s)
        limit.follow(now, inflight, self.tpot(now), self._preempted_at)
        return limit.limit

    def _slots_for_batch(self, slots: int | None, headroom: float) -> int | None:
        """Most jobs in flight for another of batch to be sent."""
        n = slots or (None if self.slots.probed else self.slots.value)
        return None if n is None else max(1, n - math.ceil(n * headroom))

    def _batch_gives_way(self, c: Counts) -> str:
        if others := self.others():
            return f"{others} of other classes not started"
        return f"{c.foreign} of others waiting" if c.foreign else ""

    def _slow(self, now: float, most: float) -> str:
        tpot = self.tpot(now) if self.jobs else None
        if tpot is None or tpot <= most:
            return ""
        return f"TPOT {tpot * 1e3:.0f} ms > {most * 1e3:g} ms"

    def _trials(self, now: float) -> int:
        """Jobs that a backend with full KV memory may get all the same."""
        if self.jobs or self._kv_full_since is None:
            return 0
        return int(now - max(self.empty_since, self._kv_full_since) >= KV_TRIAL_S)

    def _load_known(self, now: float) -> bool:
        return self.fresh(now) and self.facts is not None and self.facts.waiting is not None

    def _doubt(self, now: float) -> str:
        if self.facts is None or self.fresh(now):
            return "metrics unknown"
        return f"metrics {now - self._polled_at:.1f} s old"
