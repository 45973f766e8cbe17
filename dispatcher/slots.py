"""How many slots the engines of a model have, and how many of them are kept free.

A slot is a request that an engine runs at once (vLLM's `--max-num-seqs`). Where all are taken, a
user who comes with a first job waits until one ends, however fair the order: about 1/µ seconds at µ
completions a second. So some are reserved for users with nothing in flight; jobs of all others are
sent only while fewer than slots - reserved are in flight. Keeping 1 of 32 free took a light user's
95th percentile beside a flood from 2.9 s to 0.2 s in simulation and cost 2.3 % of the throughput.

Slots are configured, or told by the engine's metrics, or else learned for each backend: the most
that ever ran there, once enough readings said that others waited meanwhile. A number seen is a
proof that there are as many. That there are no more is only a guess: an engine also lets requests
wait for memory or for its prompts to be computed. Hence:

- The most of all readings counts, and it never decays: a number too large only leaves the reserve
  without effect, while one too small leaves slots unused. It is forgotten when the engine may have
  been started anew (its page was missing three times in a row, or its count of preemptions fell),
  for only then can it have fewer slots than before.
- That somebody waited counts only where reading after reading says so: who has just come waits for
  the next step of the engine, whatever is free.
- The most counts once READINGS such readings, over SETTLE_S or longer, came close to it and none
  exceeded it; a reading that does exceed it makes it a guess again.
- Below slots - reserved nobody waits, so nothing would ever show that there are more. Where the
  reserve (or what batch leaves free) alone holds jobs back for a while, a probe lets just enough go
  that one would wait in each engine. Either one does, which confirms the number; or more run than
  was thought. A probe costs those who come first during about (reserved + 1)/µ seconds the wait
  that there is without reserve. So it begins when those whom the reserve is for have just taken it,
  unless they do not come for as long again; each that finds nothing doubles the time to the next.

Pure: time is an argument, in seconds.
"""

import math
from collections.abc import Sequence

import msgspec

from dispatcher.engines.facts import EngineFacts

READINGS = 10
SETTLE_S = 1.0
LASTING = 5
LASTING_S = 0.4
"""Somebody waits in so many readings in a row, over so long, before the last of them counts."""
FAILURES_MAX = 3
"""After so many polls in a row that told nothing, another engine may answer."""
PROBE_S = 60.0
"""A learned number that nothing confirmed for so long is probed, if it holds jobs back and all
slots are taken; after twice as long in any case."""
PROBE_MAX_S = 600.0
PROBE_LASTS_S = 3.0
"""Longest probe; metrics that are later than this tell later."""
SLACK = 16
"""A reading is close to the most where at most one in so many slots is missing: engines count at
the end of a step, when those that end with it are gone and those that follow have not begun."""


def reserved(slots: int, setting: int | None) -> int:
    """How many of `slots` are kept: as set, else one in 32, 1 of 16 to 31, none of fewer.

    Never all of them: jobs of users that have others in flight would not run at all.
    """
    if setting is not None:
        return min(setting, max(0, slots - 1))
    return slots // 32 if slots >= 32 else int(slots >= 16)


class EngineSlots:
    """The slots of one backend: `configured`, or learned from its metrics."""

    def __init__(self, configured: int | None = None) -> None:
        self.setting = configured
        """As the operator says."""
        self._told: int | None = None
        """By the engine's metrics."""
        self.confirmed_at = -math.inf
        """When a reading last had somebody waiting with about as many running as ever."""
        self.probed = False
        """Whether there may be more than is thought: then `value` is no limit for now."""
        self._most = 0
        self._readings = 0
        self._first = 0.0
        self._lasting = 0
        self._waits_since = 0.0
        self._settled = False
        self._preemptions = 0

    @property
    def configured(self) -> int | None:
        """How many there are for certain: as set here, or else as the engine tells."""
        return self.setting or self._told

    @property
    def value(self) -> int | None:
        """How many there are; None where that is not known (yet)."""
        return self.configured or (self._most if self._settled else None)

    def polled(self, now: float, facts: EngineFacts, started: int) -> None:
        """A reading. `started`: own jobs with a first byte, where the page counts none running."""
        if facts.preemptions is not None:
            if facts.preemptions < self._preemptions:
                self.forget()
            self._preemptions = facts.preemptions
        self._told = facts.slots or self._told
        running = started if facts.running is None else facts.running
        if running > self._most:
            self._most = running
            self._readings, self._settled = 0, False
        if not self._waits(now, facts) or running < self._most - max(1, self._most // SLACK):
            return
        self.confirmed_at = now
        self._readings += 1
        if self._readings == 1:
            self._first = now
        if self._readings >= READINGS and now - self._first >= SETTLE_S:
            self._settled = True

    def _waits(self, now: float, facts: EngineFacts) -> bool:
        """Whether somebody has been waiting for a while."""
        self._lasting = self._lasting + 1 if facts.waiting else 0
        if self._lasting <= 1:
            self._waits_since = now
        return self._lasting >= LASTING and now - self._waits_since >= LASTING_S

    def poll_failed(self, failures: int) -> None:
        """The page was not read, `failures` times in a row."""
        if failures >= FAILURES_MAX:
            self.forget()

    def forget(self) -> None:
        """Another engine may answer there now."""
        self._most = self._readings = self._lasting = self._preemptions = 0
        self._settled, self._told = False, None


class Ceiling(msgspec.Struct, frozen=True):
    """What the slots of a model allow."""

    slots: int | None = None
    """Of all its usable backends together; None: not known."""
    reserved: int = 0
    busy_max: int | None = None
    """Users with jobs in flight get another while fewer than this are in flight at those backends;
    None: no limit."""


class ModelSlots:
    """The slots of one model. `total` and `setting`: as configured, where they are."""

    def __init__(self, total: int | None = None, setting: int | None = None) -> None:
        self._total = total
        self._setting = setting
        self._slots: int | None = None
        self._period = PROBE_S
        self._probe_from: float | None = None
        self._probe_ended = 0.0
        self._learned: list[tuple[EngineSlots, int]] = []
        """Those that can be used and whose number is a guess, and the number."""

    def ceiling(self, now: float, engines: Sequence[EngineSlots], backends: int) -> Ceiling:
        """`engines`: of those `backends` that can be used now."""
        slots = self._count(engines, backends)
        learned = [(e, e.value) for e in engines if e.configured is None and e.value is not None]
        self._follow(now, slots, [] if self._total else learned)
        if slots is None:
            return Ceiling()
        kept = reserved(slots, self._setting)
        if not kept:
            return Ceiling(slots)
        probing = self._probe_from is not None
        return Ceiling(slots, kept, slots + len(engines) if probing else slots - kept)

    def bound(self, now: float, taken: int) -> None:
        """Jobs wait, and what is known of the slots alone holds them back, `taken` of them."""
        if self.due(now, taken):
            self._probe_from = now
            for engine, _ in self._learned:
                engine.probed = True

    def due(self, now: float, taken: int) -> bool:
        """Whether a probe would begin where `bound` is told the same."""
        if not self._learned or self._probe_from is not None:
            return False
        known = min(engine.confirmed_at for engine, _ in self._learned)
        patience = 1 if taken >= (self._slots or 0) else 2
        return now - max(known, self._probe_ended) >= patience * self._period

    def _count(self, engines: Sequence[EngineSlots], backends: int) -> int | None:
        if not engines:
            return None
        if self._total is not None:
            return self._total * len(engines) // max(backends, len(engines))
        known = [engine.value for engine in engines]
        return sum(n for n in known if n) if all(known) else None

    def _follow(
        self, now: float, slots: int | None, learned: list[tuple[EngineSlots, int]]
    ) -> None:
        """End a probe that told what it can tell, or whose engines changed."""
        began, before = self._probe_from, self._learned
        if (slots, learned) != (self._slots, before):
            self._slots, self._period = slots, PROBE_S
        elif began is None or not (
            now - began >= PROBE_LASTS_S or all(e.confirmed_at > began for e, _ in learned)
        ):
            return
        else:
            self._probe_ended = now
            self._period = min(2 * self._period, PROBE_MAX_S)
        self._probe_from, self._learned = None, learned
        for engine, _ in (*before, *learned):
            engine.probed = False
