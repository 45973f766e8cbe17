"""All scenarios by name."""

from __future__ import annotations

from sim.fairness import cases, trace_cases
from sim.fairness.contest import Scenario
from sim.fairness.policies import STANDARD

SHARING = ("direct", "fifo", "rr", "fair", "reserve")
KINDS = (*SHARING, "by-requests", "by-time", "by-kv")
BATCH = (
    "direct", "priority", "fair", "reserve", "headroom-2", "headroom-4", "headroom-6",
    "headroom-8", "yield-0", "yield-1", "yield-4",
)  # fmt: skip
ROUTES = ("direct", "random", "no-affinity", "reserve")

WAITS = ("p50", "p95", "p99", "alone", "better", "tokens", "even", "behind")
SHARES = ("ratio", "ratio_min", "ratio_max", "jain", "share", "tokens", "behind")
RESTS = ("p50", "p95", "p99", "alone", "alone99", "tokens", "rest", "idle")
PREFIXES = ("hits", "uneven", "p50", "p95", "p99", "even")

SCENARIOS = {
    s.name: s
    for s in (
        Scenario("flood", "A asks 200 times at once, C once every 10 s; 32 slots, an engine of "
                 "which nothing is known", cases.flood, STANDARD, WAITS),
        Scenario("flood-warm", "the same on an engine whose slots were learned in an earlier flood",
                 cases.flood_warm, STANDARD, WAITS),
        Scenario("flood-wide", "flood on an engine with 256 slots, which its speed limits",
                 lambda seed: cases.flood(seed, cases.WIDE), STANDARD, WAITS),
        Scenario("sizes", "two users always have work, requests of 8:1",
                 cases.sizes, KINDS, SHARES),
        Scenario("sizes-weighted", "the same; the one with large requests has weight 3",
                 lambda seed: cases.sizes(seed, 3.0), SHARING, SHARES),
        Scenario("returning", "A is away for 60 s, then floods against B, who always has work",
                 cases.returning, (*SHARING, "no-lift"), SHARES),
        Scenario("azure-low", "Azure conversations, 2.18 a second: overload at times",
                 lambda seed: trace_cases.azure(seed, 2.18), STANDARD, WAITS),
        Scenario("azure", "Azure conversations, 2.49 a second: about what the engine can do",
                 trace_cases.azure, STANDARD, WAITS),
        Scenario("azure-high", "Azure conversations, 2.71 a second: more than the engine can do",
                 lambda seed: trace_cases.azure(seed, 2.71), STANDARD, WAITS),
        Scenario("azure-batch", "azure-high, the heavy user as batch",
                 lambda seed: trace_cases.azure(seed, 2.71, "batch"), STANDARD, WAITS),
        Scenario("servegen", "clients of ServeGen, 2.4 times as fast: overload",
                 trace_cases.servegen, STANDARD, WAITS),
        Scenario("arena", "Chatbot Arena on an A10G as in the VTC artifact",
                 trace_cases.arena, STANDARD, WAITS),
        Scenario("batch", "batch work without end, 20 people chat at half load; 32 slots",
                 cases.batch, BATCH, RESTS),
        Scenario("batch-wide", "the same on an engine with 256 slots",
                 lambda seed: cases.batch(seed, cases.WIDE),
                 ("direct", "fair", "reserve", "at-most-32", "at-most-56", "at-most-96"), RESTS),
        Scenario("batch-lines", "short jobs on two engines of 64 slots, chat at half load",
                 cases.lines, ("direct", "reserve", "yield-0"), RESTS),
        Scenario("overload", "10 people chat, others ask as standard for twice the capacity",
                 cases.overload, STANDARD, WAITS),
        Scenario("overload-same", "the same; the others are interactive too",
                 lambda seed: cases.overload(seed, "interactive"), STANDARD, WAITS),
        Scenario("prefix-conversation", "Mooncake's conversations on 4 engines that keep 4,000 "
                 "blocks each", lambda seed: trace_cases.mooncake(seed, "conversation"), ROUTES,
                 PREFIXES),
        Scenario("prefix-synthetic", "Mooncake's synthetic trace on the same",
                 lambda seed: trace_cases.mooncake(seed, "synthetic"), ROUTES, PREFIXES),
        Scenario("prefix-conversation-slow", "Mooncake's conversations on engines that just keep "
                 "up", lambda seed: trace_cases.mooncake(seed, "conversation", trace_cases.SLOW),
                 ROUTES, PREFIXES),
        Scenario("prefix-synthetic-slow", "Mooncake's synthetic trace on the same",
                 lambda seed: trace_cases.mooncake(seed, "synthetic", trace_cases.SLOW), ROUTES,
                 PREFIXES),
    )
}  # fmt: skip
