"""The model of one LLM engine: continuous batching over a queue that nobody can reorder.

The engine works in steps. At each step boundary it admits waiting requests in order while a slot
and KV cache are free, then computes one step: one more token for each sequence that decodes, and
up to `prefill_chunk_tokens` of prompts. A step lasts

    step_ms + per_seq_us * sequences in the step + prompt tokens in it / prefill_tokens_per_s

and its tokens appear together at its end. When the KV cache is full, the newest sequence (in
priority mode: the least urgent, then newest) goes back to the queue at its old place and computes
its prompt and its tokens so far again. An idle engine starts a step when a request arrives.

Pure: time is an argument (seconds), nothing here reads a clock, sleeps or draws random numbers.
Time may not run backwards; methods may be called late, and steps keep their exact times.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from sim.events import EngineRequest, Event, Finished, Gauges, TokenEvent
from sim.settings import EngineSettings
from sim.stats import EngineStats


class _Sequence:
    """A request inside the engine. `kv` is the tokens it holds in the cache."""

    __slots__ = (
        "arrived", "chunk", "first_token_at", "generated", "id", "key", "kv", "last_token_at",
        "live", "request", "started", "to_prefill",
    )  # fmt: skip

    def __init__(self, number: int, request: EngineRequest, now: float, priority: int) -> None:
        self.id = number
        self.request = request
        self.key = (priority, number)
        self.arrived = now
        self.live = True
        self.started = False
        self.kv = 0
        self.to_prefill = request.prompt_tokens
        self.chunk = 0
        self.generated = 0
        self.first_token_at = 0.0
        self.last_token_at = 0.0


class Engine:
    """One engine. The waiting queue is as long as its callers let it become."""

    def __init__(
        self, settings: EngineSettings, observe: Callable[[Gauges], None] | None = None
    ) -> None:
        """`observe` is called after each submit, abort and step boundary."""
        self.settings = settings
        self.stats = EngineStats()
        self.peak_waiting = 0
        self._observe = observe
        self._submitted = 0
        self._waiting: list[tuple[tuple[int, int], _Sequence]] = []
        self._running: list[_Sequence] = []
        self._sequences: dict[int, _Sequence] = {}
        self._batch: list[_Sequence] = []
        self._step_ends: float | None = None
        self._kv_used = 0
        self._time = float("-inf")
        self._events: list[Event] = []

    def running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    def waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return self._kv_used / self.settings.kv_tokens

    def preemptions(self) -> int:
        """Sequences sent back to the queue so far."""
        return self.stats.preemptions

    def gauges(self) -> Gauges:
        """The present state, as an observer gets it."""
        running = len(self._running)
        return Gauges(
            at=self._time,
            running=running,
            waiting=len(self._waiting),
            free_slots=self.settings.max_num_seqs - running,
            kv_usage=self.kv_usage(),
            preemptions=self.stats.preemptions,
        )

    def submit(self, now: float, request: EngineRequest) -> int:
        """Queue a request; returns its id (1, 2, 3 …, in order of arrival).

        Raises ValueError when it could never fit in the KV cache or has no prompt.
        """
        needed = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 0:
            raise ValueError("a request has at least 1 prompt token and no negative output")
        if needed > self.settings.kv_tokens:
            raise ValueError(f"{needed} tokens exceed the KV cache of {self.settings.kv_tokens}")
        self._run_until(now)
        self._submitted += 1
        priority = request.priority if self.settings.priority_mode else 0
        sequence = _Sequence(self._submitted, request, now, priority)
        self._sequences[sequence.id] = sequence
        insort(self._waiting, (sequence.key, sequence))
        if self._step_ends is None:
            self._begin_step(now)
        self.peak_waiting = max(self.peak_waiting, len(self._waiting))
        self._notify()
        return sequence.id

    def abort(self, now: float, request_id: int) -> bool:
        """Drop a request and free its slot and cache at once; False when it is not here (any more).

        A step under way still lasts its time; the request's token of it is lost.
        """
        self._run_until(now)
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.live = False
        if sequence in self._running:
            self._release(sequence)
        else:
            del self._waiting[bisect_left(self._waiting, (sequence.key,))]
        self.stats.aborted += 1
        # Events that the caller has not fetched belong to a request it no longer wants.
        self._events = [event for event in self._events if event.request_id != request_id]
        self._notify()
        return True

    def next_event(self, now: float) -> float | None:
        """When `advance` next has something to do: `now` or earlier means at once, None never."""
        if self._events:
            return now
        return self._step_ends

    def advance(self, now: float) -> list[Event]:
        """Run all steps that end by `now`; returns what they produced, in order of time."""
        self._run_until(now)
        events, self._events = self._events, []
        return events

    def _run_until(self, now: float) -> None:
        if now < self._time:
            raise ValueError(f"time runs backwards: {now} after {self._time}")
        while self._step_ends is not None and self._step_ends <= now:
            ended = self._time = self._step_ends
            self._end_step(ended)
            self._begin_step(ended)
            self._notify()
        self._time = now

    def _notify(self) -> None:
        if self._observe is not None:
            self._observe(self.gauges())

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._kv_used -= sequence.kv
        sequence.kv = 0

    def _begin_step(self, now: float) -> None:
        preempted = self._reserve_decodes()
        budget = self.settings.prefill_chunk_tokens
        batch = []
        for sequence in self._running:
            if sequence.to_prefill:
                budget -= self._take_chunk(sequence, budget)
            if sequence.chunk or not sequence.to_prefill:
                batch.append(sequence)
        if not preempted:
            budget = self._admit(now, budget, batch)
        self._batch = batch
        if not batch:
            self._step_ends = None
            return
        prefilled = self.settings.prefill_chunk_tokens - budget
        self.stats.steps += 1
        self._step_ends = now + self._step_seconds(len(batch), prefilled)

    def _step_seconds(self, sequences: int, prefilled: int) -> float:
        settings = self.settings
        fixed = settings.step_ms / 1e3 + settings.per_seq_us / 1e6 * sequences
        return fixed + prefilled / settings.prefill_tokens_per_s

    def _reserve_decodes(self) -> bool:
        """One cache token for each decoding sequence; True when some had to be preempted."""
        preempted = False
        for sequence in tuple(self._running):
            while sequence.kv and not sequence.to_prefill:
                if self._kv_used < self.settings.kv_tokens:
                    sequence.kv += 1
                    self._kv_used += 1
                    break
                self._preempt(max(self._running, key=lambda running: running.key))
                preempted = True
        return preempted

    def _preempt(self, sequence: _Sequence) -> None:
        self._release(sequence)
        sequence.to_prefill = sequence.request.prompt_tokens + sequence.generated
        insort(self._waiting, (sequence.key, sequence))
        self.stats.preemptions += 1
        self.peak_waiting = max(self.peak_waiting, len(self._waiting))

    def _admit(self, now: float, budget: int, batch: list[_Sequence]) -> int:
        """Start waiting requests in order; the first that does not fit holds up the rest."""
        while self._waiting and budget > 0 and len(self._running) < self.settings.max_num_seqs:
            sequence = self._waiting[0][1]
            if self._kv_used + sequence.to_prefill > self.settings.kv_tokens:
                break
            del self._waiting[0]
            sequence.kv = sequence.to_prefill
            self._kv_used += sequence.kv
            self._running.append(sequence)
            budget -= self._take_chunk(sequence, budget)
            batch.append(sequence)
            if not sequence.started:
                sequence.started = True
                self.stats.queue_time.observe(now - sequence.arrived)
        return budget

    def _take_chunk(self, sequence: _Sequence, budget: int) -> int:
        whole = sequence.request.output_tokens == 0 and budget > 0
        sequence.chunk = sequence.to_prefill if whole else min(sequence.to_prefill, max(budget, 0))
        return sequence.chunk

    def _end_step(self, now: float) -> None:
        tokens = 0
        for sequence in self._batch:
            if not sequence.live:
                continue
            tokens += sequence.chunk or 1
            sequence.to_prefill -= sequence.chunk
            sequence.chunk = 0
            if sequence.to_prefill:
                continue
            if sequence.request.output_tokens:
                self._emit_token(sequence, now)
            if sequence.generated == sequence.request.output_tokens:
                self._finish(sequence, now)
        self.stats.iteration_tokens.observe(tokens)

    def _emit_token(self, sequence: _Sequence, now: float) -> None:
        stats = self.stats
        if sequence.generated == 0:
            sequence.first_token_at = now
            stats.prompt_tokens += sequence.request.prompt_tokens
            stats.ttft.observe(now - sequence.arrived)
        else:
            stats.inter_token.observe(now - sequence.last_token_at)
        self._events.append(TokenEvent(sequence.id, now, sequence.generated))
        sequence.last_token_at = now
        sequence.generated += 1
        stats.generation_tokens += 1

    def _finish(self, sequence: _Sequence, now: float) -> None:
        stats, request, generated = self.stats, sequence.request, sequence.generated
        self._release(sequence)
        del self._sequences[sequence.id]
        self._events.append(Finished(sequence.id, now, generated, request.reason))
        if generated == 0:
            stats.prompt_tokens += request.prompt_tokens
        elif generated > 1:
            decode_s = now - sequence.first_token_at
            stats.time_per_output_token.observe(decode_s / (generated - 1))
        stats.e2e.observe(now - sequence.arrived)
        if request.reason == "stop":
            stats.finished_stop += 1
        else:
            stats.finished_length += 1
