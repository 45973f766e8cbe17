"""The policies that are compared: each a way from clients to engines."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from common.cost import pricing
from common.settings import Fairness, ModelSettings
from sim.fairness.baselines import FirstIn, RoundRobin, Waiting
from sim.fairness.fronts import Direct, EnginePriority, RateLimit, Scattered
from sim.fairness.gateway import Gateway, Rules
from sim.fairness.order import Order
from sim.fairness.world import Front, World


class Policy(msgspec.Struct, frozen=True):
    """How to build a front, and what it asks of the engines."""

    name: str
    about: str
    front: Callable[[World, Rules], Front]
    """The rules are those of the scenario; what makes the policy is changed in them."""
    priority_mode: bool = False
    """Whether its engines order their own queue by priority."""


def _change(rules: Rules, **changes: object) -> Rules:
    return msgspec.structs.replace(rules, **changes)


def _plain(world: World, order: Waiting, rules: Rules) -> Gateway:
    """A gateway with the article's queue limit and nothing of Fairlane's but its admission."""
    return Gateway(world, order, _change(rules, reserved=0, classes=False))


def _fair(world: World, rules: Rules, *, lift: bool = True) -> Gateway:
    start = pricing(ModelSettings(fairness=rules.fairness)).start
    return Gateway(world, Order(rules.policy, start=start, lift=lift), rules)


def _by(kind: Fairness, what: str) -> Policy:
    return Policy(
        f"by-{kind}", f"as `fair`, but jobs are charged {what}",
        lambda w, r: _fair(w, _change(r, reserved=0, fairness=kind)),
    )  # fmt: skip


def _headroom(slots: int) -> Policy:
    return Policy(
        f"headroom-{slots}", f"as `no-yield`, and batch leaves {slots} slots free",
        lambda w, r: _fair(w, _change(r, headroom=slots, yields=False)),
    )  # fmt: skip


def _yields(slots: int) -> Policy:
    return Policy(
        f"yield-{slots}", f"as `reserve`, and batch leaves {slots} slots free",
        lambda w, r: _fair(w, _change(r, headroom=slots)),
    )  # fmt: skip


def _at_most(jobs: int) -> Policy:
    return Policy(
        f"at-most-{jobs}", f"as `reserve`, and at most {jobs} batch jobs in flight",
        lambda w, r: _fair(w, _change(r, batch_max=jobs)),
    )  # fmt: skip


def _lookahead(jobs: int) -> Policy:
    return Policy(
        f"lookahead-{jobs}", f"as `reserve`, with `prefix_lookahead = {jobs}`",
        lambda w, r: _fair(w, _change(r, lookahead=jobs)),
    )  # fmt: skip


RATE = 0.7
BURST = 4
"""Of the static limit, for each user: about a quarter of what the engine `gen` does."""

POLICIES = {
    p.name: p
    for p in (
        Policy("direct", "no gateway: the engine's own first in, first out",
               lambda w, r: Direct(w)),
        Policy("fifo", "a gateway with queue limit 3, first in, first out",
               lambda w, r: _plain(w, FirstIn(), r)),
        Policy("rr", "queue limit 3, users take turns request by request",
               lambda w, r: _plain(w, RoundRobin(), r)),
        Policy("static", f"no gateway, {RATE:g} requests a second for each user, burst {BURST}",
               lambda w, r: RateLimit(w, RATE, BURST)),
        Policy("priority", "no gateway, engine priorities 0 to 3 by the user's requests in flight",
               lambda w, r: EnginePriority(w), priority_mode=True),
        Policy("fair", "Fairlane, queue limit 3, no reserved slots",
               lambda w, r: _fair(w, _change(r, reserved=0))),
        Policy("reserve", "Fairlane as it is: queue limit 3, slots learned, some reserved",
               lambda w, r: _fair(w, r)),
        Policy("random", "no gateway, and clients ask any engine", lambda w, r: Scattered(w)),
        Policy("no-affinity", "as `reserve`, always the engine with the fewest jobs in flight",
               lambda w, r: _fair(w, _change(r, affinity=False))),
        Policy("deep", "Fairlane, queue limit 64, engine priorities, no reserved slots",
               lambda w, r: _fair(w, _change(r, limit=64, reserved=0, priority=True)),
               priority_mode=True),
        Policy("no-lift", "as `fair`, but idle time is banked: to show what the lift is for",
               lambda w, r: _fair(w, _change(r, reserved=0), lift=False)),
        _by("requests", "each the same"),
        _by("time", "their time in the engine"),
        _by("kv", "the KV memory they hold times the steps they hold it"),
        *(_headroom(n) for n in (2, 4, 6, 8, 12)),
        *(_yields(n) for n in (0, 1, 4)),
        *(_at_most(n) for n in (32, 56, 96)),
        *(_lookahead(n) for n in (2, 4, 8)),
        Policy("no-yield", "as `reserve`, but what batch holds it keeps",
               lambda w, r: _fair(w, _change(r, yields=False))),
    )
}  # fmt: skip
STANDARD = ("direct", "fifo", "rr", "static", "priority", "fair", "reserve", "deep")
"""What most scenarios compare."""
