"""heartbeat: a replica learns whether it was given up."""

from common.keys import GATEWAYS
from common.queue import heartbeat
from tests.scripts.scene import NOW, Scene


async def test_new_alive_and_missing(scene: Scene) -> None:
    async def beat(ms: int, replica: str = "g1") -> str:
        return await heartbeat(scene.broker, replica, dead_ms=6_000, now_ms=NOW + ms)

    assert await beat(0) == "missing", "a new one too: nobody has waited for it"
    assert await beat(1_000) == "alive"
    assert await beat(7_000) == "alive"
    assert await beat(13_001) == "missing"
    assert await beat(13_000) == "alive", "a clock set back is nobody's death"
    assert await beat(13_000, "g2") == "missing"


async def test_the_long_dead_are_forgotten(scene: Scene) -> None:
    await heartbeat(scene.broker, "old", now_ms=NOW)
    await heartbeat(scene.broker, "new", now_ms=NOW + 599_999)
    assert await scene.broker.command("ZRANGE", GATEWAYS, 0, -1) == [b"old", b"new"]
    await heartbeat(scene.broker, "new", now_ms=NOW + 600_000)
    assert await scene.broker.command("ZRANGE", GATEWAYS, 0, -1) == [b"new"]
