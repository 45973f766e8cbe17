"""Plays of admission in wall time: load comes, and something happens to an engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec

from bench.client import Target
from bench.crowd import GENERATED, RUNNING, Ask, Crowd, read_metrics
from bench.fleet import MODEL, Cores, fleet, key, simulated
from bench.load import Goal
from bench.setup import Setup
from sim.settings import EngineSettings
from tests.support.processes import Role

LOOK_S = 0.5
WAITING = "vllm:num_requests_waiting"
TOKEN_TIMES = "vllm:inter_token_latency_seconds"
USERS = 4
QUICK = 4.0
"""Times are so much shorter where it is only to be shown that it works."""


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Engines, what is asked of them, and what happens."""

    name: str
    about: str
    engines: Sequence[EngineSettings]
    asks: Sequence[Ask]
    lasts_s: float
    dies_at: float | None = None
    """The last engine is killed then."""
    tpot_ms: float | None = None
    sides: Sequence[str] = ("direct", "through")


class Look(msgspec.Struct, frozen=True):
    """One engine at one moment; NaN where it does not say."""

    at: float
    waiting: float
    running: float
    tokens_per_s: float
    tpot_ms: float


class Side(msgspec.Struct, frozen=True):
    """One run of a play."""

    name: str
    looks: Sequence[Sequence[Look]]
    """Of each engine."""
    failed: Mapping[str, int]
    firsts: Sequence[float]
    """Seconds to the first token of each request that had one."""


def _asks(begin: float, count: int, output: int, spread: float = 0.0) -> list[Ask]:
    """So many from a moment on, `spread` seconds apart, of 0.5 to 1.5 times as much output."""
    return [
        Ask(f"u{n % USERS}", 64, output // 2 + (n * 37) % output, begin + n * spread)
        for n in range(count)
    ]


def plays(*, quick: bool) -> list[Play]:
    """All there are."""
    engine = EngineSettings(max_num_seqs=32, step_ms=20.0, per_seq_us=500.0)
    slow = EngineSettings(max_num_seqs=32, step_ms=80.0, per_seq_us=2_000.0)
    s = 1 / QUICK if quick else 1.0
    few, many = int(20 * s), int(240 * s)
    return [
        Play(name="step", about=f"a request a second, and {many} at once",
             engines=[engine], lasts_s=50 * s,
             asks=_asks(0.0, few, 100, 1.0) + _asks(10.0 * s, many, 150)),
        Play(name="tpot", about="the same with tpot_ms = 30, which 20 in flight have",
             engines=[engine], lasts_s=50 * s, tpot_ms=30.0, sides=("through",),
             asks=_asks(0.0, few, 100, 1.0) + _asks(10.0 * s, many, 150)),
        Play(name="slow", about="two engines, the second four times as slow",
             engines=[engine, slow], lasts_s=40 * s, asks=_asks(2.0, many, 150)),
        Play(name="dead", about="two engines, the second is killed",
             engines=[engine, engine], lasts_s=40 * s, dies_at=12.0 * s,
             asks=_asks(2.0, many, 150)),
    ]  # fmt: skip


async def run(play: Play, side: str, cores: Cores) -> Side:
    """One side of a play, with engines and Fairlane started for it."""
    async with _opened(play, side, cores) as (engines, goals):
        crowd = Crowd(MODEL, goals)
        looks: list[list[Look]] = [[] for _ in engines]
        asking = asyncio.create_task(crowd.many(play.asks))
        watches = [
            asyncio.create_task(_watch(e.url, crowd, seen))
            for e, seen in zip(engines, looks, strict=True)
        ]
        try:
            if play.dies_at is not None:
                await asyncio.sleep(play.dies_at)
                engines[-1].kill()
            await asyncio.sleep(play.lasts_s - crowd.now())
            firsts = [s.first_s for s in crowd.sent if s.first_s is not None]
            return Side(side, looks, dict(crowd.failed), firsts)
        finally:
            for task in (asking, *watches):
                task.cancel()
            await asyncio.wait([asking, *watches])
            crowd.close()


@asynccontextmanager
async def _opened(
    play: Play, side: str, cores: Cores
) -> AsyncIterator[tuple[list[Role], dict[str, Sequence[Goal]]]]:
    users = [f"u{n}" for n in range(USERS)]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(simulated(cores, e)) for e in play.engines]
        if side == "direct":
            straight = [Goal(Target.of(e.url)) for e in engines]
            yield engines, dict.fromkeys(users, straight)
            return
        setup = Setup(tpot_ms=play.tpot_ms)
        async with fleet(cores, [e.url for e in engines], setup) as made:
            yield engines, {u: [Goal(made.target, key(n))] for n, u in enumerate(users)}


async def _watch(url: str, crowd: Crowd, seen: list[Look]) -> None:
    before: Mapping[str, float] = {}
    at = crowd.now()
    while True:
        page = await asyncio.to_thread(read_metrics, url)
        now = crowd.now()
        seen.append(look(before, page, at, now))
        before, at = page, now
        await asyncio.sleep(LOOK_S)


def look(before: Mapping[str, float], page: Mapping[str, float], at: float, now: float) -> Look:
    """What two readings of an engine's page say, from `at` to `now`; an empty one: it is dead."""
    if not page:
        return Look(now, math.nan, math.nan, 0.0, math.nan)

    def grown(name: str) -> float:
        return page[name] - before.get(name, page[name])

    count = grown(TOKEN_TIMES + "_count")
    return Look(
        at=now,
        waiting=page[WAITING],
        running=page[RUNNING],
        tokens_per_s=grown(GENERATED) / max(1e-9, now - at),
        tpot_ms=1e3 * grown(TOKEN_TIMES + "_sum") / count if count else math.nan,
    )
