"""describe: a description expires from its first moment on, and outlives who is refused."""

from common.keys import JOBS
from common.queue import describe
from tests.scripts.scene import Scene

LIVES_MS = 60_000


async def test_it_expires_from_the_first_moment(scene: Scene) -> None:
    assert await describe(scene.broker, "j", "new", b"one", LIVES_MS)
    assert 0 < await scene.broker.command("PTTL", JOBS + "j") <= LIVES_MS
    assert not await describe(scene.broker, "j", "new", b"two", 9 * LIVES_MS), "there is one"
    assert await scene.broker.command("HGETALL", JOBS + "j") == [b"about", b"one"]
    assert await scene.broker.command("PTTL", JOBS + "j") <= LIVES_MS


async def test_one_is_refused_and_another_is_not(scene: Scene) -> None:
    await describe(scene.broker, "j", "new", b"about", LIVES_MS)
    for first, then in (("in", "out"), ("out", "in")):
        await describe(scene.broker, "j", first, b"about", LIVES_MS)  # type: ignore[arg-type]
        await describe(scene.broker, "j", then, b"about", LIVES_MS)  # type: ignore[arg-type]
        found = await scene.broker.command("HGETALL", JOBS + "j")
        assert found == [b"about", b"about", b"in", b"1"], (first, then)
        assert 0 < await scene.broker.command("PTTL", JOBS + "j") <= LIVES_MS
        await scene.broker.command("DEL", JOBS + "j")


async def test_what_was_refused_goes(scene: Scene) -> None:
    await describe(scene.broker, "j", "new", b"about", LIVES_MS)
    assert await describe(scene.broker, "j", "out")
    assert not await describe(scene.broker, "j", "out")
    assert await scene.dump() == {}


async def test_a_webhook_of_a_job_that_was_deleted(scene: Scene) -> None:
    for step in ("told", "hooks"):
        assert await describe(scene.broker, "j", step) == 0  # type: ignore[arg-type]
    assert await scene.dump() == {}
    await describe(scene.broker, "j", "new", b"about", LIVES_MS)
    assert [await describe(scene.broker, "j", "hooks") for _ in range(3)] == [1, 2, 3]
    assert await describe(scene.broker, "j", "told")
    assert 0 < await scene.broker.command("PTTL", JOBS + "j") <= LIVES_MS
