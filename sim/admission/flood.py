"""Floods: is the engine's own queue short, and does the engine never wait for work?

Many requests at once, through Fairlane and straight to the engine. The gateway is that of
`sim.fairness`: the product's own deciders, which know of the engine what their own events and
polls tell.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import msgspec

from sim.fairness.engine import FastEngine
from sim.fairness.fronts import Direct
from sim.fairness.gateway import BUSY_S, Gateway, Rules
from sim.fairness.jobs import Arrival, Job, Result
from sim.fairness.measures import percentile
from sim.fairness.order import Order
from sim.fairness.world import Front, World
from sim.settings import EngineSettings

LOOK_S = 0.02
"""The engine's queue is looked at so often."""
RAMP_S = 10.0
"""Throughput is compared from here on, and told from the beginning on too."""
LASTS_S = 40.0
"""A flood holds work for so long, at least."""
JOBS_MAX = 6_000
FOREIGN = "foreign"
"""The user whose requests go past the gateway."""
FOREIGN_AT = 15.0
POLLS_S = 2 * BUSY_S + LOOK_S
"""Two polls."""


class Point(msgspec.Struct, frozen=True):
    """An engine and the jobs it gets."""

    slots: int
    output: int
    """Mean output tokens; each job's are 0.25 to 1.75 times as many."""
    prompt: int = 128
    even: bool = False
    """Whether all jobs have as many."""
    lasts_s: float = LASTS_S

    def engine(self) -> EngineSettings:
        """Of the speed of an 8B model on a large GPU, as `sim.fairness.cases.GEN`."""
        return EngineSettings(
            max_num_seqs=self.slots, step_ms=25.0, per_seq_us=400.0, prefill_tokens_per_s=8_000.0,
            prefill_chunk_tokens=2_048, kv_tokens=4_000_000,
        )  # fmt: skip

    def step_s(self) -> float:
        """The longest step that prefills nothing."""
        e = self.engine()
        return e.step_ms / 1e3 + e.per_seq_us / 1e6 * self.slots

    def prefill_s(self) -> float:
        """What one prompt adds to a step."""
        return self.prompt / self.engine().prefill_tokens_per_s

    def fullest_s(self) -> float:
        """The longest step: all slots taken, and as many prompts as it may compute."""
        e = self.engine()
        tokens = min(e.prefill_chunk_tokens, self.slots * self.prompt)
        return self.step_s() + tokens / e.prefill_tokens_per_s

    def jobs(self) -> int:
        """Enough to fill all slots three times, and for so long."""
        one = self.output * self.step_s() / self.slots + self.prefill_s()
        return min(JOBS_MAX, max(4 * self.slots, math.ceil(self.lasts_s / one)))

    def arrivals(self, seed: int, *, foreign: int = 0) -> list[Arrival]:
        """All at once, of four users; so many more go past the gateway at FOREIGN_AT."""
        rng = random.Random(seed)
        low, high = max(1, self.output // 4), max(1, self.output * 7 // 4)
        users = [(0.0, f"u{n % 4}") for n in range(self.jobs())] + [(FOREIGN_AT, FOREIGN)] * foreign
        return [
            Arrival(
                at, user, self.prompt, self.output if self.even else rng.randint(low, high),
                most=4 * self.output,
            )
            for at, user in users
        ]  # fmt: skip


class Seen(msgspec.Struct, frozen=True):
    """What one run came to."""

    result: Result
    waiting: Sequence[tuple[float, int]]
    """(time, requests in the engine's queue), each LOOK_S."""
    limits: Sequence[int] = ()
    """T at the same times."""


class _Beside:
    """A gateway, and requests that go past it."""

    def __init__(self, world: World, rules: Rules) -> None:
        self._world = world
        self._gateway = Gateway(world, Order(rules.policy), rules)
        self.hop = self._gateway.hop

    def limit(self, now: float) -> int:
        """T of now."""
        return self._gateway.limit(now)

    def arrive(self, now: float, job: Job) -> None:
        """To the gateway or past it."""
        if job.arrival.user == FOREIGN:
            self._world.send(now, job, 0, self.hop)
        else:
            self._gateway.arrive(now, job)

    def first(self, now: float, job: Job) -> None:
        """Known to the gateway if it sent it."""
        if job.arrival.user != FOREIGN:
            self._gateway.first(now, job)

    def end(self, now: float, job: Job) -> None:
        """Known to the gateway if it sent it."""
        if job.arrival.user != FOREIGN:
            self._gateway.end(now, job)


def through(point: Point, rules: Rules, arrivals: Sequence[Arrival]) -> Seen:
    """Through a gateway with these rules, but for what is foreign."""
    world = World([FastEngine(point.engine())])
    front = _Beside(world, rules)
    return _seen(world, front, arrivals, front.limit)


def direct(point: Point, arrivals: Sequence[Arrival]) -> Seen:
    """Straight to the engine."""
    world = World([FastEngine(point.engine())])
    return _seen(world, Direct(world), arrivals, lambda _: 0)


def _seen(
    world: World, front: Front, arrivals: Sequence[Arrival], limit: Callable[[float], int]
) -> Seen:
    waiting: list[tuple[float, int]] = []
    limits: list[int] = []

    def look(now: float) -> None:
        waiting.append((now, world.engines[0].waiting()))
        limits.append(limit(now))
        world.at(now + LOOK_S, look)

    world.at(LOOK_S / 2, look)
    return Seen(world.run(front, arrivals, 100_000.0), waiting, limits)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of one run."""

    waiting: float
    """95th percentile of the requests in the engine's own queue, while jobs wait before it."""
    limit: float
    """95th percentile of T: 3, or what ends while one job is on its way where that is more."""
    tokens: float
    """Output tokens relative to no gateway, from RAMP_S until that has no queue any more."""
    whole: float
    """The same from the beginning."""
    steady: float
    """The same from the middle on: what is learned is learned."""
    steady_waiting: float
    """As `waiting`, from then on."""
    most_waiting: int
    stall_s: float
    """The longest time in which nothing was sent though a job waited and a slot was free."""
    prefill_s: float
    """How long that may be: the rest of a step, and the next with the prompts it computes."""
    inflight: int
    """The most that were in flight."""
    after: int
    """Jobs sent later than two polls after others' requests had filled the engine's queue, while
    they did."""


def figures(point: Point, seen: Seen, base: Seen) -> Figures:
    """`base`: the same arrivals straight to the engine."""
    until = max(at for at, n in base.waiting if n)
    own = [j for j in seen.result.jobs if j.arrival.user != FOREIGN]
    sent = max(j.sent for j in own if j.sent is not None)
    limits = [t for t, (at, _) in zip(seen.limits, seen.waiting, strict=True) if at <= sent]
    limit = percentile(limits, 0.95)
    stall, inflight = _stall(own, point.slots)
    whole, base_whole = given(seen.result, until), given(base.result, until)

    def tokens(since: float) -> float:
        return (whole - given(seen.result, since)) / (base_whole - given(base.result, since))

    def waiting(since: float) -> list[int]:
        return [n for at, n in seen.waiting if since <= at <= sent]

    middle = until / 2
    return Figures(
        waiting=percentile(waiting(0), 0.95),
        limit=limit,
        tokens=tokens(min(RAMP_S, middle)),
        whole=whole / base_whole,
        steady=tokens(middle),
        steady_waiting=percentile(waiting(middle), 0.95),
        most_waiting=max(waiting(0)),
        stall_s=stall,
        prefill_s=2 * point.fullest_s(),
        inflight=inflight,
        after=_after(seen.result),
    )


def _after(result: Result) -> int:
    others = sorted(j.first or 0.0 for j in result.jobs if j.arrival.user == FOREIGN)
    if not others:
        return 0
    few = others[len(others) // 2]  # as many again waited until then
    began = FOREIGN_AT + POLLS_S
    return sum(began < (j.sent or 0.0) < few for j in result.jobs if j.arrival.user != FOREIGN)


def given(result: Result, until: float) -> float:
    """Output tokens given by a time; those of one job come at regular intervals."""
    total = 0.0
    for job in result.jobs:
        if job.first is None or job.first > until:
            continue
        end = job.ended if job.ended is not None else result.ended
        share = 1.0 if end <= until else (until - job.first) / (end - job.first)
        total += 1 + (job.arrival.output - 1) * share
    return total


def _stall(jobs: Sequence[Job], slots: int) -> tuple[float, int]:
    """The longest time without a job sent, of those in which one waits and a slot is free; the
    most jobs in flight."""
    events = sorted(
        [(j.arrival.at, 1, 0, False) for j in jobs]
        + [(j.sent, -1, 1, True) for j in jobs if j.sent is not None]
        + [(j.ended, 0, -1, False) for j in jobs if j.ended is not None]
    )
    waiting = inflight = most = 0
    longest, since = 0.0, None
    for at, waits, flies, sends in events:
        if since is not None and (sends or waiting == 0 or inflight >= slots):
            longest, since = max(longest, at - since), None
        waiting, inflight = waiting + waits, inflight + flies
        most = max(most, inflight)
        if since is None and waiting > 0 and inflight < slots:
            since = at
    return longest, most
