"""The course of one simulation: arrivals, engines, a front between them, in order of time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sim.fairness.engine import FastEngine
from sim.fairness.jobs import INPUT_WEIGHT, OUTPUT_WEIGHT, Arrival, Job, Result, Sample

EVENTS_MAX = 20_000_000
"""A run of more events has gone astray."""


class Front(Protocol):
    """What stands before the engines: a policy. Each method is told the time."""

    hop: float
    """Seconds that a message takes between an engine and the front, one way."""

    def arrive(self, now: float, job: Job) -> None:
        """A request came: to send now or later."""

    def first(self, now: float, job: Job) -> None:
        """Its first token was seen."""

    def end(self, now: float, job: Job) -> None:
        """Its end was seen."""


class World:
    """Engines and clients; a front takes part by `send` and `at`."""

    def __init__(self, engines: Sequence[FastEngine], *, sample_s: float = 1.0) -> None:
        self.engines = engines
        self.started: dict[str, Job] = {}
        """Jobs that give tokens."""
        self._sample_s = sample_s
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()
        self._inside: list[dict[int, Job]] = [{} for _ in engines]
        self._done: dict[str, float] = {}
        self._open = 0

    def at(self, time: float, call: Callable[[float], None]) -> None:
        """Call it then, with the time."""
        heapq.heappush(self._heap, (time, next(self._count), call))

    def send(self, now: float, job: Job, engine: int, hop: float, priority: int = 0) -> None:
        """The job goes to an engine, where it is after `hop` seconds."""
        job.sent, job.engine = now, engine
        yields = job.yields
        if hop:
            self.at(now + hop, lambda at: self._submit(at, job, priority, yields))
        else:
            self._submit(now, job, priority, yields)

    def _submit(self, now: float, job: Job, priority: int, yields: int) -> None:
        if job.yields != yields:
            return  # it was taken back on its way
        a = job.arrival
        job.request = self.engines[job.engine].submit(now, a.input, a.output, priority, a.blocks)
        self._inside[job.engine][job.request] = job

    def abort(self, now: float, job: Job) -> bool:
        """Take a job out of its engine, or from its way there, as if it had never been sent; False
        when it is done."""
        if job.ended is not None:
            return False
        if job.request:
            if not self.engines[job.engine].abort(now, job.request):
                return False
            del self._inside[job.engine][job.request]
            self.started.pop(job.id, None)
        job.request, job.sent, job.first, job.seen = 0, None, None, None
        job.yields += 1
        return True

    def tokens(self, now: float, job: Job) -> int:
        """Output tokens that it has given so far."""
        if job.ended is not None:
            return job.arrival.output
        return self.engines[job.engine].generated(now, job.request)

    def run(self, front: Front, arrivals: Sequence[Arrival], until: float) -> Result:
        """Until nothing is left to do, or at latest `until`; arrivals are in order of time."""
        jobs = [Job(n, a) for n, a in enumerate(arrivals)]
        samples: list[Sample] = []
        due, now, sample_at = 0, 0.0, 0.0
        for _ in range(EVENTS_MAX):
            if due == len(jobs) and not self._open:
                break
            now, which = self._next(jobs, due)
            if now > until:
                now = until
                break
            while sample_at <= now:
                samples.append(self._sample(sample_at))
                sample_at += self._sample_s
            if which >= 0:
                self._advance(front, which, now)
            elif due < len(jobs) and jobs[due].arrival.at <= now:
                due, self._open = due + 1, self._open + 1
                front.arrive(now, jobs[due - 1])
            else:
                heapq.heappop(self._heap)[2](now)
        else:
            raise RuntimeError(f"more than {EVENTS_MAX} events by {now} s")
        while sample_at <= until:
            samples.append(msgspec.structs.replace(self._sample(now), at=sample_at))
            sample_at += self._sample_s
        return Result(jobs, samples, now)

    def _next(self, jobs: list[Job], due: int) -> tuple[float, int]:
        """The time of the next event, and of which engine it is (-1: of none)."""
        now, which = self._heap[0][0] if self._heap else float("inf"), -1
        if due < len(jobs):
            now = min(now, jobs[due].arrival.at)
        for n, engine in enumerate(self.engines):
            end = engine.next_event()
            if end is not None and end <= now:
                now, which = end, n
        return now, which

    def _advance(self, front: Front, which: int, now: float) -> None:
        for event in self.engines[which].advance(now):
            job = self._inside[which][event.id]
            if event.kind == "first":
                job.first, job.seen = event.at, event.at + front.hop
                job.cached = event.cached
                self.started[job.id] = job
                self._tell(front.first, event.at, job, front.hop)
            else:
                job.ended = event.at
                del self.started[job.id], self._inside[which][event.id]
                user = job.arrival.user
                self._done[user] = self._done.get(user, 0.0) + job.arrival.work
                self._open -= 1
                self._tell(front.end, event.at, job, front.hop)

    def _tell(self, call: Callable[[float, Job], None], now: float, job: Job, hop: float) -> None:
        if not hop:
            call(now, job)
            return
        yields = job.yields  # of a run that was taken back meanwhile nothing is seen
        self.at(now + hop, lambda at: call(at, job) if job.yields == yields else None)

    def _sample(self, at: float) -> Sample:
        served = dict(self._done)
        for job in self.started.values():
            a = job.arrival
            got = INPUT_WEIGHT * a.input + OUTPUT_WEIGHT * self.tokens(at, job)
            served[a.user] = served.get(a.user, 0.0) + got
        waiting = sum(e.waiting() for e in self.engines)
        return Sample(at, served, waiting, sum(map(len, self._inside)))
