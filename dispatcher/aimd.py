"""A limit L on the jobs in flight at one backend that holds its time per output token.

The more sequences an engine runs at once, the longer each of its steps. A gate that shuts above a
target and opens below it swings, for what it let in shows only later; so L moves by small steps and
waits for their effect: additive increase, multiplicative decrease (Chiu and Jain, 1989), with the
rule of Netflix's concurrency-limits that a limit which does not limit does not grow.

Each LOOK_S, by the level: what the signal stays below in about nine looks of ten. That is its mean
of late and DEVIATIONS times its mean deviation, both moving averages as in TCP's retransmission
timer (Jacobson, 1988). So an engine whose steps are even comes close to the target, and one whose
steps are not, for what they prefill, keeps as far below it as it must.

- slow (the level is above the target, or the engine preempted a sequence): L = CUT · min(L, I), at
  most every CUT_EVERY_S, and not while more than L are in flight: that cut has yet to work.
- else, where I ≥ LIMITED · L and the level is below NEAR times the target: L += max(1, GROW·L).
- Until something was slow for the first time, L begins at START and doubles instead, and slow is
  SEEKING times the target: the signal is the mean of two seconds, and a flood fills an engine in
  less.

No new samples is not slow. Without a target only preemptions cut, and L begins without a limit.

Pure: time is an argument, in seconds.
"""

import math

DEVIATIONS = 2.0
MEAN_OF, DEVIATION_OF = 1 / 4, 1 / 8
"""Weight of each look in the moving averages."""
SEEKING = 0.85
NEAR = 0.95
"""Of the target: from this level on L does not grow."""
CUT = 0.9
CUT_EVERY_S = 3.0
GROW = 0.05
LIMITED = 0.9
LOOK_S = 1.0
START = 8


class Aimd:
    """The limit of one class at one backend."""

    def __init__(self, target_s: float | None) -> None:
        self._begin(target_s)
        self._looked_at = -math.inf
        self._cut_at = -math.inf

    def _begin(self, target_s: float | None) -> None:
        self._target_s = target_s
        self._limit = math.inf if target_s is None else float(START)
        self._seeking = target_s is not None
        """Nothing was slow yet."""
        self._mean = 0.0
        self._deviation = 0.0

    def aim(self, target_s: float | None) -> None:
        """Follow this target from now on."""
        old = self._target_s
        if target_s == old:
            return
        if target_s is None or old is None:
            self._begin(target_s)
            return
        self._target_s = target_s
        self._mean *= old / target_s
        self._deviation *= old / target_s

    @property
    def limit(self) -> int | None:
        """L, at least 1; None: there is no limit."""
        return None if math.isinf(self._limit) else int(self._limit)

    def follow(
        self, now: float, inflight: int, tpot_s: float | None, preempted_at: float = -math.inf
    ) -> None:
        """What is known now. `tpot_s`: the signal, None where there is none; `preempted_at`: when
        the engine's count of preemptions last rose. Calls within LOOK_S of the last change nothing.
        """
        if now - self._looked_at < LOOK_S:
            return
        preempted = preempted_at > max(self._looked_at, now - CUT_EVERY_S)
        self._looked_at = now
        level = self._level(tpot_s)
        if preempted or level > 1:
            self._seeking = False
            if now - self._cut_at >= CUT_EVERY_S and inflight <= self._limit:
                self._limit = max(1.0, CUT * min(self._limit, inflight))
                self._cut_at = now
        elif level < NEAR and inflight >= LIMITED * self._limit:
            self._limit += self._limit if self._seeking else max(1.0, GROW * self._limit)

    def _level(self, tpot_s: float | None) -> float:
        """The level, as a share of the target; 0 where nothing is known."""
        if self._target_s is None or tpot_s is None:
            return 0.0
        share = tpot_s / self._target_s
        if self._seeking:
            self._mean = share
            return share / SEEKING
        off = share - self._mean
        self._mean += MEAN_OF * off
        self._deviation += DEVIATION_OF * (abs(off) - self._deviation)
        return self._mean + DEVIATIONS * self._deviation
