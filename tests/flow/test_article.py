"""The picture that Fairlane comes from: a flood by A must not keep B and C waiting."""

import pytest

from common.config import load
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.flow.world import World, world
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

SLOTS, LIMIT = 4, 3
CHAT = "/v1/chat/completions"
SLACK = {False: 0, True: 1}
"""On the real clock one more of A's may be on its way while B and C are written down."""


async def picture(w: World, seed: int) -> None:
    """A sends 30; 4 run and 3 wait in the engine. Then B and C send one each: they are next."""
    flood = [await w.ask("A", output=6 + (seed * 7 + 5 * n) % 10) for n in range(30)]
    transport = w.engines["e1"]
    await wait_until(
        lambda: transport.running() == SLOTS and transport.waiting() == LIMIT, what="4 + 3 of A"
    )
    # More of A's may have started by the time that B and C ask; none may after that.
    ahead = sum(r.path == CHAT for r in transport.log)
    assert ahead == SLOTS + LIMIT or w.url
    late = [await w.ask(u, output=5) for u in ("B", "C")]
    users = {a.job: a.user for a in [*flood, *late]}
    await w.answers()
    order = [users[r.headers["x-request-id"]] for r in transport.log if r.path == CHAT]
    assert len(order) == 32
    assert set(order[:ahead]) == {"A"}
    for user in ("B", "C"):
        assert order.index(user) <= ahead + SLACK[w.url is not None] + 1
    for asked in late:
        assert asked.first_at is not None
        before = [a for a in flood if a.first_at is not None and a.first_at < asked.first_at]
        assert len(before) <= ahead + SLACK[w.url is not None]


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.looptime
async def test_none_but_what_the_engine_has_starts_before_b_and_c(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineSettings(model="m1", max_num_seqs=SLOTS, step_ms=40, seed=seed)
    async with world(monkeypatch, {"e1": engine}) as w:
        await picture(w, seed)


async def test_the_same_on_a_real_redis(redis_server: RedisServer) -> None:
    engine = EngineSettings(model="m1", max_num_seqs=SLOTS, step_ms=40, seed=1)
    backends = [{"url": "http://e1", "max_num_seqs": SLOTS}]
    settings = load(options={"models": {"m1": {"backends": backends}}}, environment={})
    w = World(settings, {"e1": EngineTransport(engine)}, redis_server.url)
    try:
        await w.add_gateway("g0")
        await w.gateways[0][0].broker.command("FLUSHALL")
        await w.add_dispatcher("d0")
        await wait_until(lambda: w.leader() is not None, timeout=10, what="a leader")
        await picture(w, 1)
    finally:
        await w.close()
