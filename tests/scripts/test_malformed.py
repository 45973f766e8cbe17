"""No verb writes anything where one of its arguments is no number, or the record no record."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.batches import Batches
from common.errors import BrokerRefused
from common.keys import BATCH, GATEWAYS, JOBS
from common.outcomes import Outcome
from common.queue import describe, heartbeat
from common.scripts import VERBS
from tests.scripts.scene import LEADER, NOW, REPLICA, Scene
from tests.scripts.test_batches import about

pytestmark = pytest.mark.jobs_inside

CALLS: dict[str, Callable[[Scene, Any], Awaitable[object]]] = {
    "lead": lambda s, r: s.lead(),
    "enqueue": lambda s, r: s.enqueue("new"),
    "pop": lambda s, r: s.queue.pop(["interactive"], ["b"], LEADER, s.term, now_ms=NOW),
    "start": lambda s, r: s.queue.start("j", LEADER, r.attempt, s.channel, b"first"),
    "append": lambda s, r: s.queue.append("j", LEADER, r.attempt, b"more", (0, 0)),
    "forget": lambda s, r: s.queue.forget(["j"]),
    "describe": lambda s, r: describe(s.broker, "j", "new", b"about", 1_000),
    "renew": lambda s, r: s.queue.renew([("j", r.attempt, "b2")], LEADER, now_ms=NOW),
    "charge": lambda s, r: s.queue.charge([(r, 9e9)], LEADER),
    "settle": lambda s, r: s.settle(r, cost=5.0, learn=3),
    "ack": lambda s, r: s.queue.ack(["j"], REPLICA),
    "requeue": lambda s, r: s.queue.requeue(r, LEADER, count_try=True, now_ms=NOW),
    "assert": lambda s, r: s.queue.restore(r, LEADER, "b2", 1.0, started=False, now_ms=NOW),
    "cancel": lambda s, r: s.queue.cancel("k", "interactive", "u", REPLICA, Outcome.CANCELLED,
                                          now_ms=NOW),
    "heartbeat": lambda s, r: heartbeat(s.broker, "g9", now_ms=NOW),
    "reap": lambda s, r: s.queue.reap(LEADER, s.term, [REPLICA], "live", now_ms=NOW),
    "batch_create": lambda s, r: batches(s).create(about("b3")),
    "batch_take": lambda s, r: batches(s).take("take", "b2", "w2", now_ms=NOW),
    "batch_commit": lambda s, r: batches(s).commit("b1", "w1", NOW, "m", keep_ms=1, now_ms=NOW),
    "batch_cancel": lambda s, r: s.broker.call("batch_cancel", batch=BATCH + "b1", now_ms=NOW),
    "snapshot": lambda s, r: s.queue.snapshot([("interactive", "u", "k")]),
}  # fmt: skip


def batches(scene: Scene) -> Batches:
    return Batches(scene.broker, 1)


async def two_batches(scene: Scene) -> None:
    """One that w1 runs, and one that nobody does."""
    for id in ("b1", "b2"):
        await scene.broker.command("HSET", BATCH + id, "status", "validating")
    assert (await batches(scene).take("take", "b1", "w1", now_ms=NOW)).fence == NOW


KEYS = dict.fromkeys(("lead", "pop", "reap", "snapshot"), "board")
"""The key each verb looks at first, where that is not the record."""


@pytest.mark.parametrize("verb", VERBS)
async def test_nothing_is_written(scene: Scene, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await scene.running()
    await scene.enqueue("k")
    await two_batches(scene)
    before = await scene.dump()
    call = scene.broker.call
    numbers = [s.name for s in scene.broker.scripts[verb].args if s.type in ("num", "nums")]
    for bad in (b"", b"many", b"\xff"):
        for name in numbers:

            async def broken(verb: str, name: str = name, bad: bytes = bad, **slots: Any) -> Any:
                return await call(verb, **(slots | {name: bad}))

            with monkeypatch.context() as patch:
                patch.setattr(scene.broker, "call", broken)
                with pytest.raises(BrokerRefused, match=name):
                    await CALLS[verb](scene, run)
            assert await scene.dump() == before


@pytest.mark.parametrize("verb", VERBS)
async def test_a_key_of_another_type_is_an_error_and_stays(scene: Scene, verb: str) -> None:
    run = await scene.running()
    await scene.enqueue("k")
    job = {"enqueue": "new", "cancel": "k"}.get(verb, "j")
    key = {"board": scene.keys.board}.get(KEYS.get(verb, ""), scene.keys.record(job))
    key = {"heartbeat": GATEWAYS, "describe": JOBS + "j"}.get(verb, key)
    batch = {"batch_create": "b3", "batch_take": "b2"}.get(verb, "b1")
    key = BATCH + batch if "batch" in verb else key
    await scene.broker.command("SET", key, "of another type")
    before = await scene.dump()
    with pytest.raises(BrokerRefused, match="WRONGTYPE"):
        await CALLS[verb](scene, run)
    assert await scene.dump() == before
