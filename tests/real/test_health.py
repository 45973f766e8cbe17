"""Engines that die as real ones do, over real sockets: behind good pages, or at SIGTERM."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from common.settings import BackendSettings
from tests.support.fake_engine import Engine, Reply, chunk_event
from tests.support.live import Lives, settings_for
from tests.support.wait import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

T: dict[str, Any] = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lives() -> AsyncIterator[Lives]:
    async with Lives() as made:
        yield made


async def test_met_08_a_dead_engine_behind_healthy_pages(lives: Lives) -> None:
    """Its pages say 200 and 0 running; a POST is never answered. A second engine is well."""
    healthy = Engine()
    await healthy.begin()
    healthy.reset({})
    lives.engine.reset({})

    async def never(body: Any, reply: Reply) -> bool:
        await reply.until_gone()
        return False

    lives.engine.answer = never
    usual = settings_for(lives.engine.url, {})
    backends = [BackendSettings(url=e.url, engine="vllm") for e in (lives.engine, healthy)]
    model = msgspec.structs.replace(usual.models["m1"], backends=backends)
    limits = msgspec.structs.replace(usual.dispatcher, first_byte_s=1.0)
    settings = msgspec.structs.replace(
        usual, models={**usual.models, "m1": model}, dispatcher=limits
    )
    try:
        live = await lives.open(settings)
        async with live.dispatching():
            first = await asyncio.gather(*(live.ask({"body_json": T}) for _ in range(8)))
            assert sum(r["status"] == 504 for r in first) <= 4
            state = "fairlane_backend_state"
            closed = {"model": "m1", "backend": lives.engine.url, "state": "closed"}
            await wait_until(lambda: live.sample(state, **closed) == 0, what="out of use")
            reached = len(lives.engine.reqs)
            later = [await live.ask({"body_json": T}) for _ in range(40)]
            assert sum(r["status"] == 200 for r in later) >= 38
            assert len(lives.engine.reqs) <= reached + 1
    finally:
        lives.engine.answer = None
        await healthy.end()


async def test_a_closed_port_ends_the_streams_that_hang_behind_it(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM at SIGTERM: the port refuses, an open stream gets no byte and no end of its connection.
    The limits are shorter here than they are."""
    for name in ("health.HEARD_S", "watchdog.HEARD_S", "watchdog.GONE_S"):
        monkeypatch.setattr(f"dispatcher.{name}", 1.0)
    lives.engine.reset({})
    hangs = asyncio.Event()

    async def hang(body: Any, reply: Reply) -> bool:
        await reply.begin("text/event-stream")
        await reply.send(chunk_event("a"))
        hangs.set()
        await reply.until_gone()
        return False

    lives.engine.answer = hang
    live = await lives.open(settings_for(lives.engine.url, {}))
    async with live.dispatching():
        asked = asyncio.create_task(live.ask({"body_json": {**T, "stream": True}}, 20.0))
        await hangs.wait()
        lives.engine.close_port()
        response = await asked
    assert response["complete"]
    body = response["body"]
    assert body.startswith(chunk_event("a"))
    assert body.count(b'"error"') == 1
    assert body.endswith(b"data: [DONE]\n\n")
