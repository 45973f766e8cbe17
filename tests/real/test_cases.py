"""Every case of `tests/cases` over real sockets and a real Redis: see the README there."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.fake_engine import CASES, player
from tests.support.live import Faults, Lives

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _cases() -> list[Any]:
    """All variants of all cases, those of the same set-up together."""
    found = []
    for path in sorted(CASES.glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        found += list(player.variants(case))
    assert len(found) > 90, "the cases are not all there"
    named = {"/".join(filter(None, (c["id"], c["variant"]))): c for c in found}
    return [pytest.param(c, id=name) for name, c in named.items()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lives() -> AsyncIterator[Lives]:
    """Redis, the fake engine, and a gateway for each set of settings."""
    async with Lives() as made:
        yield made


@pytest.mark.parametrize("case", _cases())
async def test_case(lives: Lives, case: dict[str, Any]) -> None:
    live = await lives.get(case.get("setup"))
    lives.engine.reset({"backend_metrics": case.get("backend_metrics")})
    with Faults() as faults:
        async with live.dispatching():
            assert await live.play(case) == []
    assert faults.errors() == []
