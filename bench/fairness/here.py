"""Scenarios on this machine, with engines and Fairlane started for each side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.client import Target
from bench.crowd import RUNNING, Ask, Crowd, read_metrics
from bench.fairness.run import Access, Place
from bench.fairness.scenario import Scenario, Side
from bench.fleet import MODEL, USERS, Cores, Fleet, fleet, key, simulated
from bench.load import Goal, until

ASKS_MAX = 20_000
LEARN_S = 30.0
HEAVY_IN = 512


def here(cores: Cores) -> Place:
    """A simulated engine for each side, and Fairlane with a Redis of its own before it."""

    @asynccontextmanager
    async def opened(scenario: Scenario, side: Side) -> AsyncIterator[Access]:
        with simulated(cores, scenario.engine) as sim:
            at_engine = [Goal(Target.of(sim.url))]
            if side.setup is None:
                yield Access(
                    model=MODEL, goals=dict.fromkeys(scenario.users, at_engine), engine=sim.url
                )
                return
            async with fleet(cores, [sim.url], side.setup) as made:
                slots = await _learn(made, sim.url, scenario.engine.max_num_seqs)
                goals = _through(made, scenario.users, side)
                yield Access(model=MODEL, goals=goals, engine=sim.url, slots=slots)

    return opened


def _through(made: Fleet, users: Sequence[str], side: Side) -> dict[str, Sequence[Goal]]:
    return {
        user: [
            Goal(target, key(n))
            for target in (made.targets[:1] if user == side.lopsided else made.targets)
        ]
        for n, user in enumerate(users)
    }


async def _learn(made: Fleet, engine: str, slots: int) -> float:
    """Another user's flood, until Fairlane has learned the engine's slots and all is quiet again;
    how many it found, 0 where it did not within LEARN_S. Raises TimeoutError."""
    user = "earlier"
    goals = {user: [Goal(target, key(USERS - 1)) for target in made.targets]}
    crowd = Crowd(MODEL, goals)
    asks = (Ask(user, HEAVY_IN, 200 + 8 * (n % 32)) for n in range(ASKS_MAX))
    flood = asyncio.create_task(crowd.many(asks, 2 * slots))
    try:
        with contextlib.suppress(TimeoutError):
            await until(lambda: _slots(made) > 0, LEARN_S, "the engine's slots are learned")
    finally:
        flood.cancel()
        await asyncio.wait([flood])
        crowd.close()
    await until(lambda: not read_metrics(engine)[RUNNING], LEARN_S, "the engine is idle again")
    return _slots(made)


def _slots(made: Fleet) -> float:
    """What the dispatcher that leads has found; 0: nothing yet."""
    return max(dispatcher.metric("fairlane_slots") for dispatcher in made.dispatchers)
