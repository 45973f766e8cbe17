"""Scenarios at servers that are there already; needs no checkout."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from bench.client import Target
from bench.crowd import GENERATED, read_metrics
from bench.fairness.run import Access, Place
from bench.fairness.scenario import Scenario, Side
from bench.load import Goal

PAUSE_S = 2.0


class There(msgspec.Struct, frozen=True, kw_only=True):
    """Servers that are there: a gateway, and the engine behind it where given."""

    target: Target
    direct: Target | None
    engine: str
    """URL of the engine's metrics; empty: none."""
    model: str
    keys: Sequence[str]
    """In the order of a scenario's users; the last ones share them by turns."""
    exact: bool
    pause_s: float = PAUSE_S
    """After each side: the server lets go of what was cut."""

    @asynccontextmanager
    async def opened(self, scenario: Scenario, side: Side) -> AsyncIterator[Access | None]:
        """As Place. A side without Fairlane and without an engine's URL is not run, except where
        the light user is alone."""
        at = self.target
        if side.setup is None and self.direct is not None:
            at = self.direct
        elif side.ours or (
            side.setup is None and len(side.workload.sources) == len(scenario.users)
        ):
            yield None
            return
        keys = self.keys if at is self.target else ()
        yield Access(
            model=self.model,
            goals={u: [Goal(at, assigned(keys, n))] for n, u in enumerate(scenario.users)},
            engine=self.engine,
            named=at is self.target and len(self.keys) < len(scenario.users),
            exact=self.exact,
        )
        await asyncio.sleep(self.pause_s)


def assigned(keys: Sequence[str], user: int) -> str:
    """The key of a scenario's user: the first ones have one each, the rest share the others'."""
    if user < len(keys):
        return keys[user]
    rest = keys[1:] or keys
    return rest[(user - len(keys)) % len(rest)] if rest else ""


def there(target: str, direct: str, *, model: str, keys: Sequence[str], exact: bool) -> Place:
    """Raises ValueError for what is no URL."""
    engine = direct.rstrip("/").removesuffix("/v1")
    has_metrics = False
    if engine:
        with contextlib.suppress(OSError, ValueError):
            has_metrics = GENERATED in read_metrics(engine)
    made = There(
        target=Target.of(target), direct=Target.of(direct) if direct else None,
        engine=engine if has_metrics else "", model=model, keys=keys, exact=exact,
    )  # fmt: skip
    return made.opened
