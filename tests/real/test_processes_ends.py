"""Processes that die, freeze or are told to stop, under load: who takes over, what clients see."""

import asyncio

import httpx
import pytest

from common.keys import ModelKeys
from tests.support.fleet import Fleet, Pops
from tests.support.load import Ask, asking, chats, clients, mixed, sort_out
from tests.support.processes import Role
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes

TAKEOVER_S = 3.0
HANDOVER_S = 1.0
GATEWAY_GONE_S = 10.0
FREEZE_S = 5.0


def long_asks(fleet: Fleet, n: int, tokens: int, tag: str) -> list[Ask]:
    """For each model `n` streams of two users, and half as many answers in one piece."""
    return [
        ask
        for i in range(n // 2)
        for model in fleet.models
        for ask in (
            *chats(1, model, tokens, user="alice", tag=f"{tag}{i}"),
            *chats(1, model, tokens, user="bob", tag=f"{tag}{i}"),
            *chats(1, model, tokens // 2, stream=False, user="carol", tag=f"{tag}{i}"),
        )
    ]


async def busy_leader(fleet: Fleet, model: str) -> Role:
    """The leader of a model once it has streams under way, and jobs wait."""

    def found() -> Role | None:
        leader = fleet.leader(model)
        mine = [r for r in fleet.running() if leader and r.owner == leader.id and r.started]
        return leader if len(mine) >= 3 and fleet.waiting() >= 12 else None

    leader = await wait_until(found, timeout=20, what="a leader with streams, and a queue")
    assert leader is not None
    return leader


async def first_pop(fleet: Fleet, model: str, pops: Pops, old: str, since_ms: int) -> float:
    """Seconds, by the Redis clock, from `since_ms` to the first pop by another than `old`."""

    def others() -> list[int]:
        pops.look()
        by_others = [r for r in pops.seen.values() if r.model == model and r.owner != old]
        return [r.popped_ms for r in by_others if r.popped_ms > since_ms]

    return (min(await wait_until(others, timeout=20, what="a pop by another")) - since_ms) / 1000


async def test_a_leader_is_killed(fleet: Fleet) -> None:
    asks, model, pops = long_asks(fleet, 24, 150, "k"), fleet.models[0], Pops(fleet)
    async with clients(fleet) as raw, asking(raw, asks) as open_:
        leader = await busy_leader(fleet, model)
        dead, killed_ms = leader.id, fleet.now_ms()
        leader.kill()
        held = {r.job: r.started for r in fleet.running() if r.owner == dead}
        took_s = await first_pop(fleet, model, pops, dead, killed_ms)
        whole, cut = sort_out(asks, await asyncio.gather(*open_), fleet.engine)

    assert took_s < TAKEOVER_S
    started = {job for job, was_started in held.items() if was_started}
    # All that it had begun is cut, but one whose last bytes were on their way already; what it
    # had not begun, and what waited, is whole.
    assert cut <= started
    assert cut
    assert len(started & whole) <= 2
    assert whole >= held.keys() - started
    assert pops.by_others() == []
    await fleet.settle()


async def test_a_leader_freezes_and_wakes(fleet: Fleet) -> None:
    asks, model, pops = long_asks(fleet, 24, 200, "f"), fleet.models[0], Pops(fleet)
    async with clients(fleet) as raw, asking(raw, asks) as open_:
        leader = await busy_leader(fleet, model)
        frozen_ms = fleet.now_ms()
        leader.pause()

        def thawed() -> bool:
            pops.look()
            return fleet.now_ms() - frozen_ms > FREEZE_S * 1000

        await wait_until(thawed, timeout=20)
        took_s = await first_pop(fleet, model, pops, leader.id, frozen_ms)
        leader.resume()

        def answered() -> bool:
            pops.look()
            return all(task.done() for task in open_)

        await wait_until(answered, timeout=60, what="all answers")
        whole, cut = sort_out(asks, [t.result() for t in open_], fleet.engine)

    assert took_s < TAKEOVER_S
    assert (len(whole), cut) == (len(asks), set())
    assert pops.by_others() == []
    assert len(pops.seen) > len(asks) // 2
    await fleet.settle()


async def test_a_gateway_is_killed(fleet: Fleet) -> None:
    doomed = chats(30, fleet.models[0], 3_000, user="dave", tag="doomed")
    others = mixed(40, fleet.engine, ("alice", "bob"), seed=2)
    gateway = fleet.gateways[0]
    async with clients(fleet) as raw, asking(raw[:1], doomed) as lost:
        await wait_until(lambda: len(_of(fleet, gateway.id)) >= 12 and fleet.waiting() >= 10,
                         timeout=20, what="jobs of the gateway run, and more wait")  # fmt: skip
        async with asking(raw[1:], others) as open_:
            dead, killed_ms = gateway.id, fleet.now_ms()
            gateway.kill()
            owned = ModelKeys(fleet.models[0]).owned(dead)

            def gone() -> bool:
                with fleet.redis() as client:
                    return not (_of(fleet, dead) or client.exists(owned))

            await wait_until(gone, timeout=30, what="the dead gateway's jobs are gone")
            # Nobody is taken for dead in the first 6 s of a term, which is at least its time.
            since_ms = max(killed_ms, fleet.term(fleet.models[0]))
            took_s = (fleet.now_ms() - since_ms) / 1000
            whole, cut = sort_out(others, await asyncio.gather(*open_), fleet.engine)
        assert all(got.broken for got in await asyncio.gather(*lost))

    assert took_s < GATEWAY_GONE_S
    assert (len(whole), cut) == (len(others), set())
    await wait_until(lambda: _running_in_engines(fleet) == 0, timeout=3, what="engines are idle")
    await fleet.settle(expiring=True)


def _of(fleet: Fleet, replica: str) -> list[str]:
    return [r.job for r in fleet.running() if r.replica == replica]


def _running_in_engines(fleet: Fleet) -> float:
    return sum(
        e.metric("vllm:num_requests_running") + e.metric("vllm:num_requests_waiting")
        for e in fleet.engines
    )


async def test_a_gateway_is_told_to_stop(fleet: Fleet) -> None:
    gateway = fleet.gateways[1]
    asks = chats(12, fleet.models[0], 200, tag="t") + chats(
        6, fleet.models[1], 100, stream=False, tag="t"
    )
    async with clients(fleet) as raw, asking(raw[1:2], asks) as open_:
        await wait_until(lambda: len(_of(fleet, gateway.id)) >= 8, timeout=20)
        stopping = asyncio.create_task(asyncio.to_thread(gateway.stop, 30))
        await wait_until(lambda: gateway.status("/readyz") in (0, 503), timeout=5)
        assert not all(task.done() for task in open_)
        late = await raw[1].send(asks[0])
        assert (late.status, "retry-after" in late.headers) == (503, True) or late.broken
        whole, cut = sort_out(asks, await asyncio.gather(*open_), fleet.engine)
        assert await stopping == 0
    assert (len(whole), cut) == (len(asks), set())
    await fleet.settle()


async def test_a_leader_is_told_to_stop(fleet: Fleet) -> None:
    asks, model, pops = long_asks(fleet, 24, 150, "s"), fleet.models[0], Pops(fleet)
    async with clients(fleet) as raw, asking(raw, asks) as open_:
        leader = await busy_leader(fleet, model)
        told_ms, old = fleet.now_ms(), leader.id
        stopping = asyncio.create_task(asyncio.to_thread(leader.stop, 30))
        took_s = await first_pop(fleet, model, pops, old, told_ms)
        whole, cut = sort_out(asks, await asyncio.gather(*open_), fleet.engine)
        assert await stopping == 0

    assert took_s < HANDOVER_S
    assert (len(whole), cut) == (len(asks), set())
    assert pops.by_others() == []
    await fleet.settle()


async def test_an_engine_is_killed(fleet: Fleet) -> None:
    asks, engine = long_asks(fleet, 24, 150, "e"), fleet.engines[0]
    async with clients(fleet) as raw, asking(raw, asks) as open_:
        await busy_leader(fleet, fleet.models[0])
        await wait_until(lambda: any(not s for s in _at(fleet, engine).values()), timeout=10)
        engine.pause()
        await wait_until(lambda: _at(fleet, engine) == _at(fleet, engine), timeout=5)
        held = _at(fleet, engine)
        engine.kill()
        whole, cut = sort_out(asks, await asyncio.gather(*open_), fleet.engine)

    assert cut
    assert cut == {job for job, started in held.items() if started}
    assert whole >= {job for job, started in held.items() if not started}
    await fleet.settle()


def _at(fleet: Fleet, engine: Role) -> dict[str, bool]:
    return {r.job: r.started for r in fleet.running() if r.backend == engine.url}


async def test_health_of_every_part(fleet: Fleet) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        for role in (*fleet.gateways, *fleet.dispatchers):
            for path in ("/healthz", "/readyz", "/metrics"):
                assert (await client.get(role.url + path)).status_code == 200, (role.name, path)
