"""Cases from the traces that come with the package."""

from __future__ import annotations

import random

import msgspec

from sim.fairness import traces
from sim.fairness.cases import A10G, Case, ordered, zipf
from sim.fairness.jobs import Arrival
from sim.settings import EngineSettings

MOST = 4_096
"""Output tokens that the clients of the traces allow."""
HEAVY = 0.6
"""Share of requests of the one heavy user H, in Azure's trace."""
USERS = 20
LARGE = EngineSettings(
    max_num_seqs=64, step_ms=15.0, per_seq_us=200.0, prefill_tokens_per_s=40_000.0,
    prefill_chunk_tokens=2_048, kv_tokens=2_048_000, max_model_len=262_144,
)  # fmt: skip
"""One of four that serve Mooncake's long prompts, with time to spare."""
SLOW = msgspec.structs.replace(LARGE, prefill_tokens_per_s=16_000.0)
"""The same, about as fast as the prompts come."""
CROWDS = {"conversation": 1, "synthetic": 0}
"""How many blocks all sessions of a trace share."""


def azure(seed: int, per_second: float = 2.49, cls: str = "standard") -> Case:
    """A slice of 300 s, thinned out to a rate; 60 % are H's, of class `cls`, the rest 20 Zipf
    users'. The engine's capacity is about 2.5 a second."""
    rng = random.Random(seed)
    rows = traces.azure(seed % traces.SLICES)
    keep = per_second * traces.SLICE_S / len(rows)
    rows = [r for r in rows if rng.random() < keep]
    users = [f"u{n}" for n in zipf(rng, USERS, len(rows))]
    arrivals = [
        Arrival(r.at, "H", r.input, r.output, cls, most=MOST)
        if rng.random() < HEAVY
        else Arrival(r.at, user, r.input, r.output, most=MOST)
        for r, user in zip(rows, users, strict=True)
    ]
    light = frozenset(a.user for a in arrivals) - {"H"}
    return Case(arrivals=arrivals, light=light, until=1_500.0, horizon=traces.SLICE_S)


def servegen(seed: int) -> Case:
    """10 minutes of ServeGen's clients in 250 s: too much for the engine. Light are those who ask
    less than the mean."""
    rng = random.Random(seed)
    begin = rng.uniform(0.0, 1_200.0)
    rows = [r for r in traces.servegen() if begin <= r.at < begin + 600.0]
    arrivals = [Arrival((r.at - begin) / 2.4, r.user, r.input, r.output, most=MOST) for r in rows]
    counts = {u: sum(a.user == u for a in arrivals) for u in {a.user for a in arrivals}}
    light = frozenset(u for u, n in counts.items() if n < len(arrivals) / len(counts))
    return Case(arrivals=arrivals, light=light, until=1_500.0, horizon=250.0)


def arena(seed: int) -> Case:
    """The Chatbot Arena on an A10G as in the VTC artifact; light are users of fewer than 50
    requests. Another seed moves the arrivals by up to a second."""
    rng = random.Random(seed)
    rows = traces.arena()
    moved = [r.at + (rng.uniform(0.0, 1.0) if seed else 0.0) for r in rows]
    arrivals = [
        Arrival(at, r.user, r.input, r.output, most=MOST) for at, r in zip(moved, rows, strict=True)
    ]
    counts = {u: sum(r.user == u for r in rows) for u in {r.user for r in rows}}
    light = frozenset(u for u, n in counts.items() if n < 50)
    return Case(
        arrivals=ordered(arrivals),
        light=light,
        until=1_500.0,
        engine=A10G,
        horizon=600.0,
        peak_memory=True,
    )


def mooncake(seed: int, name: str, engine: EngineSettings = LARGE, most: int | None = None) -> Case:
    """The first `most` requests of a trace of long prompts that begin alike. Its sessions are
    divided among users: 60 % are H's, the rest 20 Zipf users'."""
    rng = random.Random(seed)
    rows = traces.mooncake(name, CROWDS[name])[:most]
    sessions = list(dict.fromkeys(r.user for r in rows))
    others = zipf(rng, USERS, len(sessions))
    users = {
        session: "H" if rng.random() < HEAVY else f"u{n}"
        for session, n in zip(sessions, others, strict=True)
    }
    arrivals = [
        Arrival(r.at, users[r.user], r.input, r.output, most=MOST, blocks=r.blocks) for r in rows
    ]
    return Case(
        arrivals=arrivals, light=frozenset(users.values()) - {"H"}, until=rows[-1].at + 1_800.0,
        engine=engine, engines=4, cache_blocks=4_000, horizon=rows[-1].at,
    )  # fmt: skip
