"""The engine model of `sim.engine`, in jumps: for simulations of hours in seconds.

The same steps at the same times. But while nothing is prefilled or admitted all steps are alike, so
a whole stretch of them, up to the next end of a sequence, is one jump; a request that may be
admitted cuts the stretch at the end of the step under way. What `sim.engine` reports of each
token is left out: there are first tokens and ends, and counts for who asks.

Pure: time is an argument (seconds) and may not run backwards.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from dispatcher.engines.facts import EngineFacts, TokenTimes
from sim.fairness.prefixes import BlockCache
from sim.fairness.sequences import Happened, Running
from sim.settings import EngineSettings


class FastEngine:
    """One engine. The waiting queue is as long as its callers let it become."""

    def __init__(
        self, settings: EngineSettings, *, peak_memory: bool = False, cache_blocks: int = 0
    ) -> None:
        """`cache_blocks`: so many of the prompts' blocks it keeps, those used last, and need not
        compute again. `peak_memory`: it admits only what will fit in the cache to its end, whose
        length it knows, as S-LoRA does (Sheng et al., arXiv 2311.03285); then nothing is ever sent
        back."""
        self.settings = settings
        self._peak_memory = peak_memory
        self._cache = BlockCache(cache_blocks)
        self.preemptions = 0
        self._submitted = 0
        self._waiting: list[tuple[tuple[int, int], Running]] = []
        self._sequences: dict[int, Running] = {}
        self._running: dict[int, Running] = {}
        """In the order in which they were admitted."""
        self._prefilling: list[Running] = []
        self._decoding = 0
        self._ends: list[tuple[int, int, Running]] = []
        self._ticks = 0
        """Steps done: each gave every sequence that decoded one token."""
        self._kv = 0
        self._gaps = 0.0
        """Seconds between tokens, of all sequences together, and how many there were."""
        self._tokens = 0
        self._began: float | None = None
        """When the stretch under way began; None: the engine is idle."""
        self._step = 0.0
        self._steps = 0
        self._events: list[Happened] = []

    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    def facts(self, now: float) -> EngineFacts:
        """What its metrics page says now."""
        used = self._kv + self._decoding * self._passed(now)
        share = used / self.settings.kv_tokens
        return EngineFacts(
            len(self._waiting), len(self._running), share, self.preemptions,
            tpot=self.token_times(now),
        )  # fmt: skip

    def token_times(self, now: float) -> TokenTimes:
        """The times between the tokens of one sequence, of all so far."""
        tokens = self._decoding * self._passed(now)
        return TokenTimes(self._gaps + tokens * self._step, self._tokens + tokens)

    def generated(self, now: float, request: int) -> int:
        """Tokens it gave so far; 0 for one that is not here (any more)."""
        s = self._sequences.get(request)
        if s is None:
            return 0
        return s.generated + (self._ticks + self._passed(now) - s.since if s.ends >= 0 else 0)

    def submit(
        self, now: float, prompt: int, output: int, priority: int = 0, blocks: Sequence[int] = ()
    ) -> int:
        """Queue a request; returns its id (1, 2, 3 …). A lower priority is more urgent, in priority
        mode. Raises ValueError when it could never run."""
        if prompt < 1 or output < 1 or prompt + output > self.settings.kv_tokens:
            raise ValueError(f"a request of {prompt} and {output} tokens cannot run")
        self._run_until(now)
        self._submitted += 1
        key = priority if self.settings.priority_mode else 0
        s = Running(self._submitted, prompt, output, key, blocks)
        self._sequences[s.id] = s
        insort(self._waiting, (s.key, s))
        if self._began is None:
            self._begin(now)
        elif self._steps > 1 and len(self._running) < self.settings.max_num_seqs:
            self._steps = self._passed(now) + 1
        return s.id

    def abort(self, now: float, request: int) -> bool:
        """Drop a request; False when it is not here (any more). A step under way still lasts its
        time."""
        self._run_until(now)
        s = self._sequences.pop(request, None)
        if s is None:
            return False
        self._events = [event for event in self._events if event.id != request]
        if request not in self._running:
            del self._waiting[bisect_left(self._waiting, (s.key,))]
            return True
        held = s.kv
        if s.ends >= 0:  # what it got in this stretch was not booked yet, but for the first step
            held += self._ticks - s.since + 1
            self._decoding -= 1
            s.ends = -1
        else:
            self._prefilling.remove(s)
        self._steps = self._passed(now) + 1
        self._kv -= held
        del self._running[request]
        return True

    def next_event(self) -> float | None:
        """When the stretch under way ends; None: never, if nobody submits."""
        return None if self._began is None else self._began + self._step * self._steps

    def advance(self, now: float) -> list[Happened]:
        """What happened up to now, in order of time."""
        self._run_until(now)
        events, self._events = self._events, []
        return events

    def _passed(self, now: float) -> int:
        """Steps of the stretch under way that are done."""
        if self._began is None:
            return 0
        return max(0, min(self._steps - 1, int((now - self._began) / self._step)))

    def _run_until(self, now: float) -> None:
        while (end := self.next_event()) is not None and end <= now:
            self._end(end)
            self._begin(end)

    def _end(self, at: float) -> None:
        self._kv += self._decoding * (self._steps - 1)
        self._gaps += self._decoding * self._steps * self._step
        self._tokens += self._decoding * self._steps
        self._ticks += self._steps
        while self._ends and self._ends[0][0] <= self._ticks:
            tick, _, s = heapq.heappop(self._ends)
            if s.ends == tick:
                self._decoding -= 1
                self._finish(s, s.kv + self._ticks - s.since, at)
        for s in self._prefilling:
            s.to_prefill -= s.chunk
            s.chunk = 0
        ready = [s for s in self._prefilling if not s.to_prefill]
        if ready:
            self._prefilling = [s for s in self._prefilling if s.to_prefill]
        for s in ready:
            self._emit(s, at)

    def _emit(self, s: Running, at: float) -> None:
        """The prompt is computed, and one token more."""
        s.generated += 1
        if s.generated == 1:
            self._events.append(Happened(at, "first", s.id, s.cached))
        if s.generated == s.output:
            self._finish(s, s.kv, at)
            return
        s.since, s.ends = self._ticks, self._ticks + s.output - s.generated
        heapq.heappush(self._ends, (s.ends, s.id, s))
        self._decoding += 1

    def _finish(self, s: Running, kv: int, at: float) -> None:
        self._kv -= kv
        s.ends = -1
        del self._running[s.id], self._sequences[s.id]
        self._events.append(Happened(at, "end", s.id))

    def _begin(self, at: float) -> None:
        settings = self.settings
        preempted = self._kv + self._decoding > settings.kv_tokens
        if preempted:
            self._preempt()
        else:
            self._kv += self._decoding
        budget = settings.prefill_chunk_tokens
        for s in self._prefilling:
            budget -= self._take_chunk(s, budget)
        if not preempted:
            budget = self._admit(budget)
        batch = self._decoding + sum(s.chunk > 0 for s in self._prefilling)
        if not batch:
            self._began = None
            return
        prefilled = settings.prefill_chunk_tokens - budget
        fixed = settings.step_ms / 1e3 + settings.per_seq_us / 1e6 * batch
        self._began, self._step = at, fixed + prefilled / settings.prefill_tokens_per_s
        self._steps = 1 if prefilled or preempted else self._alike()

    def _alike(self) -> int:
        """How many steps until one of the sequences ends or the cache is full."""
        while self._ends[0][2].ends != self._ends[0][0]:
            heapq.heappop(self._ends)
        room = (self.settings.kv_tokens - self._kv) // self._decoding
        return min(self._ends[0][0] - self._ticks, room + 1)

    @staticmethod
    def _take_chunk(s: Running, budget: int) -> int:
        s.chunk = min(s.to_prefill, budget)
        return s.chunk

    def _admit(self, budget: int) -> int:
        while self._waiting and budget > 0 and len(self._running) < self.settings.max_num_seqs:
            s = self._waiting[0][1]
            if not self._fits(s):
                break
            del self._waiting[0]
            if s.blocks:
                s.cached = min(self._cache.take(s.blocks), s.to_prefill - 1)
                s.to_prefill -= s.cached
            s.kv = s.to_prefill
            self._kv += s.kv
            self._running[s.id] = s
            self._prefilling.append(s)
            budget -= self._take_chunk(s, budget)
        return budget

    def _fits(self, new: Running) -> bool:
        if not self._peak_memory:
            return self._kv + new.to_prefill <= self.settings.kv_tokens
        # Whoever ends last needs the most when the one before ends: the cache is fullest then.
        left = [(new.output, new.prompt)]
        for s in self._running.values():
            given = s.generated + (self._ticks - s.since if s.ends >= 0 else 0)
            left.append((s.output - given, s.prompt + given))
        left.sort(reverse=True)
        held = 0
        for count, (to_come, now) in enumerate(left, 1):
            held += now
            if held + to_come * count > self.settings.kv_tokens:
                return False
        return True

    def _preempt(self) -> None:
        """One cache token for each sequence that decodes, while the last to come makes room."""
        got: set[int] = set()
        for s in tuple(self._running.values()):
            while s.ends >= 0 and self._kv >= self.settings.kv_tokens:
                self._send_back(max(self._running.values(), key=lambda r: r.key), got)
            if s.ends >= 0:
                self._kv += 1
                got.add(s.id)

    def _send_back(self, s: Running, got: set[int]) -> None:
        held = s.kv
        if s.ends >= 0:
            self._decoding -= 1
            passed = self._ticks - s.since
            s.generated += passed
            held += passed + (s.id in got)
            s.ends = -1
        else:
            self._prefilling.remove(s)
        self._kv -= held
        s.kv, s.to_prefill = 0, s.prompt + s.generated
        del self._running[s.id]
        insort(self._waiting, (s.key, s))
        self.preemptions += 1
