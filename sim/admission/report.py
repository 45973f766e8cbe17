"""The tables of the admission experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from sim.admission.flood import Figures, Point, direct, figures, through
from sim.admission.tpot import LOADS, best, held
from sim.fairness.gateway import Rules

LENGTHS = (8, 32, 128, 512, 2_000)
SLOTS = (1, 4, 16, 64, 256)


class Experiment(msgspec.Struct, frozen=True):
    """A table."""

    name: str
    about: str
    lines: Callable[[int], Iterator[str]]
    """By seed, one after the other as they are known."""


FLOOD = "slots  output  prompt  waiting p95   T  tokens   whole  stall/ms  bound/ms  in flight"


def _row(point: Point, f: Figures) -> str:
    return (
        f"{point.slots:5} {point.output:7} {point.prompt:7} {f.waiting:12.0f} {f.limit:3.0f} "
        f"{f.tokens:7.1%} {f.whole:7.1%} {f.stall_s * 1e3:9.0f} {f.prefill_s * 1e3:9.0f} "
        f"{f.inflight:10}"
    )


def measure(point: Point, rules: Rules, seed: int, foreign: int = 0) -> Figures:
    """One point against no gateway."""
    arrivals = point.arrivals(seed, foreign=foreign)
    return figures(point, through(point, rules, arrivals), direct(point, arrivals))


def _lengths(seed: int, points: Sequence[Point] = ()) -> Iterator[str]:
    yield FLOOD
    for point in points or [Point(s, n) for s in SLOTS for n in LENGTHS]:
        yield _row(point, measure(point, Rules(reserved=0, slots=point.slots), seed))


def _metrics(seed: int) -> Iterator[str]:
    kinds = {
        "fresh": Rules(reserved=0),
        "5 s late": Rules(reserved=0, delay=5.0),
        "none": Rules(reserved=0, metrics=False),
        "whole answers": Rules(reserved=0, streams=False),
        "none, whole answers": Rules(reserved=0, streams=False, metrics=False),
    }
    yield f"{'metrics':20} {FLOOD}"
    for point in (Point(32, 32), Point(32, 128), Point(64, 512)):
        for name, rules in kinds.items():
            yield f"{name:20} {_row(point, measure(point, rules, seed))}"


def _blind(seed: int) -> Iterator[str]:
    yield ("answers        slots  output  lasts/s  tokens   whole  from half on  waiting p95  "
           "from half on  most")  # fmt: skip
    points = [Point(32, 32), Point(32, 128, lasts_s=100), Point(64, 512, lasts_s=600),
              Point(16, 128, lasts_s=100), Point(4, 32), Point(1, 32)]  # fmt: skip
    blind = Rules(reserved=0, streams=False, metrics=False)
    kinds = {
        "uneven": (False, blind),
        "even": (True, blind),
        "without usage": (False, msgspec.structs.replace(blind, usage=False)),
    }
    for name, (even, rules) in kinds.items():
        for point in points:
            f = measure(msgspec.structs.replace(point, even=even), rules, seed)
            yield (
                f"{name:14} {point.slots:5} {point.output:7} {point.lasts_s:8.0f} {f.tokens:7.1%} "
                f"{f.whole:7.1%} {f.steady:13.1%} {f.waiting:12.0f} {f.steady_waiting:13.0f} "
                f"{f.most_waiting:5}"
            )


def _foreign(seed: int) -> Iterator[str]:
    yield "slots  output  requests of others  tokens  sent later than two polls"
    for point in (Point(16, 128), Point(32, 128), Point(32, 512)):
        f = measure(point, Rules(reserved=0), seed, foreign=2 * point.slots)
        yield f"{point.slots:5} {point.output:7} {2 * point.slots:19} {f.tokens:7.1%} {f.after:26}"


def _tpot(seed: int) -> Iterator[str]:
    yield "load    target/ms  limit       above  tokens/s  of best  in flight  sigma"
    for load in LOADS.values():
        limit, top = best(load, seed)
        rows = {"none": held(load, seed, target=False), f"{limit} constant": top,
                "moving": held(load, seed)}  # fmt: skip
        for name, row in rows.items():
            yield (
                f"{load.name:6} {load.target_ms:10.0f}  {name:12} {row.above:5.1%} "
                f"{row.tokens_per_s:9.0f} {row.tokens_per_s / top.tokens_per_s:8.1%} "
                f"{row.inflight:10.1f} {row.sigma:6.1%}"
            )


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment("admission-lengths", "floods of jobs of 8 to 2,000 tokens, 1 to 256 slots, "
                   "which are known, against no gateway", _lengths),
        Experiment("admission-metrics", "the same where metrics are late or missing, slots are not "
                   "known, and answers do not stream", _metrics),
        Experiment("admission-blind", "whole answers and no metrics: lengths uneven, even, and not "
                   "told", _blind),
        Experiment("admission-foreign", "requests that go past the gateway fill the engine's queue",
                   _foreign),
        Experiment("admission-tpot", "a target of time per output token, against the best constant "
                   "limit on what is in flight", _tpot),
    )
}  # fmt: skip
