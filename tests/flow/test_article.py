"""The picture that Fairlane comes from: a flood by A must not keep B and C waiting."""

import pytest

from sim.settings import EngineSettings
from tests.flow.world import world
from tests.support.wait import pass_time

SLOTS, LIMIT = 4, 3


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.looptime
async def test_none_but_what_the_engine_has_starts_before_b_and_c(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sends 30; 4 run and 3 wait in the engine. Then B and C send one each: they are next."""
    engine = EngineSettings(model="m1", max_num_seqs=SLOTS, step_ms=40, seed=seed)
    async with world(monkeypatch, {"e1": engine}) as w:
        order: list[str] = []
        users = {}
        flood = [await w.ask("A", output=6 + (seed * 7 + 5 * n) % 10) for n in range(30)]
        transport = w.engines["e1"]
        while transport.running() < SLOTS or transport.waiting() < LIMIT:
            await pass_time(0.005)
        late = [await w.ask(u, output=5) for u in ("B", "C")]
        users.update({a.job: a.user for a in [*flood, *late]})
        await w.answers()
        for received in transport.log:
            if received.path == "/v1/chat/completions":
                order.append(users[received.headers["x-request-id"]])
        assert len(order) == 32
        assert order[: SLOTS + LIMIT] == ["A"] * (SLOTS + LIMIT)
        assert set(order[SLOTS + LIMIT : SLOTS + LIMIT + 2]) == {"B", "C"}
        for asked in late:
            assert asked.first_at is not None
            before = [a for a in flood if a.first_at is not None and a.first_at < asked.first_at]
            assert len(before) <= SLOTS + LIMIT
