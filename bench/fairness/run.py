"""Runs of a scenario's sides, wherever its requests go."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from bench.crowd import Crowd
from bench.eta_error import errors, told
from bench.fairness.scenario import Request, Scenario, Seen, Side, Workload
from bench.load import Goal

LOOK_S = 0.1


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Where one side's requests go."""

    model: str
    goals: dict[str, Sequence[Goal]]
    engine: str = ""
    """URL of the engine whose metrics are read; empty: there is none."""
    named: bool = False
    """The body says who asks."""
    exact: bool = True
    slots: float = math.nan
    """Of the engine, as Fairlane found before; 0: it did not; nan: nobody asked it."""


Place = Callable[[Scenario, Side], "AbstractAsyncContextManager[Access | None]"]
"""Opens a side; None where it cannot be run there."""


async def see(workload: Workload, access: Access) -> Seen:
    """One run. All that is open at its end is cut."""
    crowd = Crowd(
        access.model, access.goals, named=access.named, exact=access.exact, engine=access.engine
    )
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(crowd.many(source.asks, source.at_once))
            for source in workload.sources
        ]
        watch = group.create_task(crowd.watch())
        while not (_over(workload, crowd) or all(t.done() for t in tasks)):
            await asyncio.wait(tasks, timeout=LOOK_S)
        ended = crowd.now()
        requests = [
            Request(s.ask.user, s.at, ended - s.at if s.first_s is None else s.first_s, s.begun)
            for s in crowd.sent
            if s.first_s is not None or not s.ended
        ]
        eta_errors = [
            error
            for s in crowd.sent
            if (answer := s.answer) is not None
            for error in errors(told(answer.comments), answer.first)
        ]
        failed = dict(crowd.failed)
        for task in (*tasks, watch):
            task.cancel()
    crowd.close()
    return Seen(requests, crowd.samples, failed, ended, access.slots, eta_errors)


def _over(workload: Workload, crowd: Crowd) -> bool:
    if crowd.now() >= workload.until_s:
        return True
    if not workload.until_begun:
        return False
    asked = sum(len(s.asks) for s in workload.sources if s.user in workload.until_begun)
    sent = [s for s in crowd.sent if s.ask.user in workload.until_begun]
    return len(sent) == asked and all(s.begun for s in sent)


async def all_sides(
    scenario: Scenario, place: Place, tell: Callable[[str], None]
) -> dict[str, Seen]:
    """Each side that can be run in this place, one after the other."""
    runs = {}
    for side in scenario.sides:
        async with place(scenario, side) as access:
            if access is not None:
                tell(f"{scenario.name}: {side.name}")
                runs[side.name] = await see(side.workload, access)
    return runs
