"""What is simulated: engines, the requests that come, and whose wait is looked at."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from sim.fairness.gateway import Rules
from sim.fairness.jobs import Arrival
from sim.settings import EngineSettings

GEN = EngineSettings(
    max_num_seqs=32, step_ms=25.0, per_seq_us=400.0, prefill_tokens_per_s=8_000.0,
    prefill_chunk_tokens=2_048,
)  # fmt: skip
"""An engine limited by its slots: 2.7 jobs a second of 512 tokens in and 256 out, the first token
of 256 in after 57 ms when it is empty."""
WIDE = EngineSettings(
    max_num_seqs=256, step_ms=25.0, per_seq_us=400.0, prefill_tokens_per_s=8_000.0,
    prefill_chunk_tokens=2_048,
)  # fmt: skip
"""The same with so many slots that its speed is the limit."""
LINES = EngineSettings(max_num_seqs=64, step_ms=20.0)
"""One engine of `bench.batches`: 40 requests a second of 208 tokens in and 40 out."""
A10G = EngineSettings(
    max_num_seqs=256, step_ms=27.5, per_seq_us=600.0, prefill_tokens_per_s=3_000.0,
    prefill_chunk_tokens=2_048, kv_tokens=10_000, max_model_len=4_096,
)  # fmt: skip
"""Llama-2-7b on an A10G as the VTC artifact ran it; speeds fitted to its token latencies."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run for each policy."""

    arrivals: Sequence[Arrival]
    """In order of time."""
    light: frozenset[str]
    """Whose time to the first token is told."""
    until: float
    """The run ends here at the latest, in seconds."""
    engine: EngineSettings = GEN
    engines: int = 1
    peak_memory: bool = False
    """See `FastEngine`."""
    cache_blocks: int = 0
    """See `FastEngine`."""
    rules: Rules = Rules()
    """Of every gateway."""
    horizon: float | None = None
    """Service is compared up to here; None: as long as requests wait in the engine without
    gateway, for then any idle slot is a loss."""
    since: float = 0.0
    """Only jobs that come from here on are looked at, and service from here on."""
    users: tuple[str, ...] = ()
    """Two whose services are compared, the first by the second."""
    windows: tuple[tuple[float, float], ...] = ()
    """In which the first one's share of their service is told."""


def ordered(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """By time."""
    return sorted(arrivals, key=lambda a: a.at)


def poisson(rng: random.Random, per_second: float, begin: float, end: float) -> list[float]:
    """Times of a Poisson process."""
    times, at = [], begin + rng.expovariate(per_second)
    while at < end:
        times.append(at)
        at += rng.expovariate(per_second)
    return times


def zipf(rng: random.Random, users: int, times: int) -> list[int]:
    """Numbers from 0 on, the n-th in proportion to 1/(n + 1)."""
    return rng.choices(range(users), [1 / (n + 1) for n in range(users)], k=times)


def _flood(rng: random.Random, begin: float, jobs: int = 200) -> list[Arrival]:
    return [Arrival(begin, "A", 512, rng.randint(64, 448)) for _ in range(jobs)]


def _light(rng: random.Random, begin: float, end: float) -> list[Arrival]:
    first = begin + rng.uniform(0, 10)
    return [Arrival(first + 10 * n, "C", 256, 128) for n in range(99) if first + 10 * n < end]


def flood(seed: int, engine: EngineSettings = GEN) -> Case:
    """A asks 200 times at once; C once every 10 s. Nothing is known of the engine."""
    rng = random.Random(seed)
    arrivals = ordered(_flood(rng, 0.0) + _light(rng, 0.0, 70.0))
    # With slots to spare requests wait only until their prompts are computed: 30 s are most of it.
    horizon = 30.0 if engine is WIDE else None
    return Case(
        arrivals=arrivals, light=frozenset("C"), until=300.0, engine=engine, horizon=horizon
    )


def flood_warm(seed: int) -> Case:
    """The same after an earlier flood, of which only what was learned of the engine is left."""
    rng = random.Random(seed)
    arrivals = _flood(rng, 0.0, 60) + _flood(rng, 60.0) + _light(rng, 60.0, 130.0)
    return Case(arrivals=ordered(arrivals), light=frozenset("C"), until=400.0, since=60.0)


def sizes(seed: int, weight: float = 1.0) -> Case:
    """A and B always have work; A's requests are 8 times the size of B's."""
    rng = random.Random(seed)
    a = [Arrival(0.0, "A", 1_024, rng.randint(384, 640), weight=weight) for _ in range(400)]
    b = [Arrival(0.0, "B", 128, rng.randint(48, 80)) for _ in range(1_500)]
    return Case(
        arrivals=a + b, light=frozenset("AB"), until=120.0, horizon=120.0, users=("A", "B"),
        windows=((0.0, 60.0), (60.0, 120.0)),
    )  # fmt: skip


def returning(seed: int) -> Case:
    """B always has work; A comes, is away for 60 s, and then floods."""
    rng = random.Random(seed)
    b = [Arrival(0.0, "B", 512, rng.randint(64, 448)) for _ in range(500)]
    a = [Arrival(0.0, "A", 512, rng.randint(64, 448)) for _ in range(8)]
    again = [Arrival(75.0, "A", 512, rng.randint(64, 448)) for _ in range(300)]
    windows = tuple((75.0 + 15 * n, 90.0 + 15 * n) for n in range(4))
    return Case(
        arrivals=ordered(a + b + again), light=frozenset("A"), until=140.0, horizon=140.0,
        users=("A", "B"), windows=windows,
    )  # fmt: skip


def batch(
    seed: int, engine: EngineSettings = GEN, chats_per_s: float = 1.35, *, streams: bool = False
) -> Case:
    """20 people chat, at half of what the engine can do, for 400 s; batch work without end."""
    rng = random.Random(seed)
    chat = [
        Arrival(at, f"c{rng.randrange(20)}", 512, rng.randint(64, 448), "interactive")
        for at in poisson(rng, chats_per_s, 30.0, 430.0)
    ]
    work = [
        Arrival(0.0, "B", 512, rng.randint(64, 448), "batch", streams=streams) for _ in range(2_000)
    ]
    return Case(
        arrivals=ordered(work + chat), light=frozenset(a.user for a in chat), until=500.0,
        horizon=430.0, engine=engine, since=30.0, windows=((60.0, 430.0), (460.0, 500.0)),
    )  # fmt: skip


def lines(seed: int) -> Case:
    """Batches of short jobs on two engines, limited by their steps and prompts; 20 people chat, in
    requests of the same sizes, at half of what the engines can do, for two minutes."""
    rng = random.Random(seed)

    def sizes() -> tuple[int, int]:
        return rng.randint(16, 400), rng.randint(8, 72)

    work = [Arrival(0.0, "ABD"[n % 3], *sizes(), "batch", streams=False) for n in range(15_000)]
    chat = [
        Arrival(at, f"c{rng.randrange(20)}", *sizes(), "interactive")
        for at in poisson(rng, 40.0, 20.0, 150.0)
    ]
    return Case(
        arrivals=ordered(work + chat), light=frozenset(a.user for a in chat), until=185.0,
        horizon=150.0, engine=LINES, engines=2, rules=Rules(slots=2 * LINES.max_num_seqs),
        since=20.0, windows=((25.0, 150.0), (155.0, 185.0)),
    )  # fmt: skip


def overload(seed: int, others: str = "standard") -> Case:
    """10 people chat, a quarter of what the engine can do; 5 others ask for twice that it can."""
    rng = random.Random(seed)
    chat = [
        Arrival(at, f"c{rng.randrange(10)}", 512, rng.randint(64, 448), "interactive")
        for at in poisson(rng, 0.68, 0.0, 300.0)
    ]
    rest = [
        Arrival(at, f"o{rng.randrange(5)}", 512, rng.randint(64, 448), others)
        for at in poisson(rng, 5.4, 0.0, 300.0)
    ]
    light = frozenset(a.user for a in chat)
    return Case(arrivals=ordered(chat + rest), light=light, until=300.0, horizon=300.0)
