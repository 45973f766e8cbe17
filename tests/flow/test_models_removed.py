"""Models that no source names any more, and whose jobs wait: each ends by its deadline. Virtual
time, real code of both sides."""

from pathlib import Path

import pytest

from common.client import Client
from common.client_types import Request
from common.known import remember
from common.outcomes import Outcome
from common.settings import Settings
from sim.settings import EngineSettings
from tests.flow.test_client import CHAT, asks, client_of
from tests.flow.world import Asked, World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

ENGINES = {"e1": EngineSettings(model="other", max_num_seqs=4, step_ms=100, seed=1)}
NONE: dict[str, object] = {"backends": []}


async def without_it(w: World) -> None:
    """All dispatchers are killed, and one starts whose configuration names no model."""
    while w.dispatchers:
        process, _ = w.dispatchers.pop()
        await process.kill()
    configured, w.settings = w.settings, Settings()
    await w.add_dispatcher("d9")
    w.settings = configured


async def ended(asked: Asked) -> None:
    await wait_until(lambda: asked.end, timeout=120, what="its deadline")
    assert asked.outcome is Outcome.DEADLINE


async def expires(client: Client, job: str) -> bool:
    return (await client.status(job)).state == "expired"


async def test_jobs_of_a_model_without_a_backend_end_after_it_was_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, ENGINES, dispatchers=2, model=NONE) as w:
        await pass_time(30)
        held = await w.ask("a", wait_ms=20_000)
        late = await w.ask("a", wait_ms=60_000, cls="batch")
        await pass_time(2)
        await without_it(w)
        for asked in (held, late):
            await ended(asked)


async def test_a_model_is_not_forgotten_while_its_jobs_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.known.FORGOTTEN_MS", 30_000)
    async with world(monkeypatch, ENGINES, model=NONE) as w:
        waits = await w.ask("a", wait_ms=120_000)
        await pass_time(2)
        while w.dispatchers:
            await w.dispatchers.pop()[0].kill()
        await pass_time(60)
        await without_it(w)
        await ended(waits)
        await pass_time(45)
        assert await remember(w.gateways[0][0].broker, []) == [], "then it is"


async def test_a_program_s_job_of_a_model_that_nobody_serves_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own configuration names the model, that of the dispatcher does not."""
    config = tmp_path / "fairlane.toml"
    config.write_text('[models."m2"]\n')
    async with world(monkeypatch, ENGINES, model=NONE) as w, client_of(w, config=config) as c:
        body = {**asks(), "model": "m2"}
        job = await c.submit(Request(path=CHAT, body=body, wait_s=20))
        await wait_until(lambda: expires(c, job), timeout=25, what="its deadline")
