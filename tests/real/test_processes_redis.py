"""Redis dies, forgets, freezes or loses its scripts under load: what clients see, what is left."""

import asyncio
import shutil

import pytest

from tests.support.fleet import Fleet
from tests.support.load import Client, Got, asking, chats, clients, mixed, sort_out
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes

FREEZE_S = 4.0
REFUSED_S = 3.0
BACK_S = 5.0
FLUSH_S = 0.1


def forget(fleet: Fleet) -> None:
    """Remove what Redis would load at its next start."""
    for path in fleet.server.dir.glob("appendonly*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


async def underway(fleet: Fleet, open_: list[asyncio.Task[Got]], waiting: int = 12) -> None:
    """Until 8 streams have begun and so many jobs wait."""

    def seen() -> bool:
        early = [task.result() for task in open_ if task.done()]
        assert not [got for got in early if got.status != 200 or got.errors], early
        begun = [run for run in fleet.running() if run.started]
        return len(begun) >= 8 and fleet.waiting() >= waiting

    await wait_until(seen, timeout=20, what="streams under way, and a queue")


@pytest.mark.parametrize("kept", [True, False], ids=["with its data", "with nothing"])
async def test_redis_is_killed_and_starts_again(fleet: Fleet, kept: bool) -> None:
    asks = [
        ask
        for i in range(12)
        for model in fleet.models
        for ask in (
            *chats(1, model, 200, user="alice", tag=f"r{kept}{i}"),
            *chats(1, model, 200, user="bob", tag=f"r{kept}{i}"),
            *chats(1, model, 100, stream=False, user="carol", tag=f"r{kept}{i}"),
        )
    ]
    async with clients(fleet) as raw, asking(raw, asks) as open_:
        await underway(fleet, open_)
        fleet.server.kill()
        if not kept:
            forget(fleet)
        await asyncio.to_thread(fleet.server.start)
        assert ("DB loaded" in fleet.server.log()) == kept
        _, cut = sort_out(asks, await asyncio.gather(*open_), fleet.engine)
    assert cut == set()
    await fleet.settle()


async def test_redis_freezes_for_a_while(fleet: Fleet) -> None:
    asks = chats(8, fleet.models[0], 800, tag="frozen")
    loop = asyncio.get_running_loop()
    async with clients(fleet) as raw, asking(raw, asks) as open_:
        await underway(fleet, open_, waiting=0)
        fleet.server.pause()
        frozen_at = loop.time()
        refused = await asyncio.gather(*(_late(c, fleet.models[1]) for c in raw))
        for got, took_s in refused:
            assert got.status == 503, got
            assert 1 <= int(got.headers["retry-after"]) <= 60
            assert took_s < REFUSED_S

        async def not_ready() -> bool:
            states = [await asyncio.to_thread(g.status, "/readyz") for g in fleet.gateways]
            return states == [503] * len(states)

        await wait_until(not_ready, timeout=5)
        assert {g.status("/healthz") for g in fleet.gateways} == {200}
        await wait_until(lambda: loop.time() - frozen_at > FREEZE_S)
        fleet.server.resume()
        back_at = loop.time()

        async def serves(client: Client) -> bool:
            got, _ = await _late(client, fleet.models[1])
            return got.status == 200

        for client in raw:
            await wait_until(lambda c=client: serves(c), timeout=30)  # type: ignore[misc]
        assert loop.time() - back_at < BACK_S
        # A stream that was under way is whole, or ends with one error event.
        sort_out(asks, await asyncio.gather(*open_), fleet.engine)
    await fleet.settle()


async def _late(client: Client, model: str) -> tuple[Got, float]:
    """A short request, and how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    got = await client.send(chats(1, model, 2, stream=False, user="dave")[0])
    return got, loop.time() - began


async def test_scripts_are_flushed_all_the_time(fleet: Fleet) -> None:
    asks = mixed(100, fleet.engine, ("alice", "bob"), seed=3)
    before = sum(e.metric("vllm:request_success") for e in fleet.engines)
    flushes = 0
    with fleet.redis() as client:
        async with clients(fleet) as raw, asking(raw, asks) as open_:
            while not all(task.done() for task in open_):
                client.script_flush()
                flushes += 1
                await asyncio.wait(open_, timeout=FLUSH_S)
            whole, _ = sort_out(asks, [t.result() for t in open_], fleet.engine)
    assert len(whole) == len(asks)
    assert flushes >= 5
    sequences = sum(len(ask.call(fleet.engine).choices) for ask in asks)
    after = sum(e.metric("vllm:request_success") for e in fleet.engines)
    assert after - before == sequences, "none was computed twice"
    await fleet.settle()
