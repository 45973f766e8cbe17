"""The simulated engine on a real socket: the official client, disconnects, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import msgspec
import openai
import pytest

from sim.openai import expected_answers
from sim.server import EngineApp, Message, app, serve
from sim.settings import EngineSettings
from tests.support.wait import pass_time, wait_until

CHAT = "/v1/chat/completions"
FAST = EngineSettings(step_ms=1.0, per_seq_us=1.0, seed=4)
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}


@asynccontextmanager
async def serving(settings: EngineSettings) -> AsyncIterator[str]:
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(settings, port=0, on_ready=ready.set_result))
    try:
        yield f"http://127.0.0.1:{await ready}"
    finally:
        server.cancel()
        await asyncio.wait([server])
    assert server.cancelled()


async def gauge(client: httpx.AsyncClient, name: str) -> float:
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith(f"vllm:{name}{{"):
            return float(line.split(" ")[-1])
    raise AssertionError(name)


async def test_the_official_client_streams_the_expected_answer() -> None:
    (wanted,) = expected_answers("chat", msgspec.json.encode(ASK), FAST)
    async with serving(FAST) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as api:
        stream = await api.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [event async for event in stream]
        vectors = await api.embeddings.create(model="sim", input=["a", "b"])
        models = [model.id async for model in api.models.list()]
    texts = [event.choices[0].delta.content for event in events if event.choices]
    assert texts == ["", *wanted]
    usage = events[-1].usage
    assert usage is not None and usage.completion_tokens == len(wanted)
    assert [len(item.embedding) for item in vectors.data] == [16, 16]
    assert models == ["sim"]


async def test_a_disconnect_frees_the_queue_and_the_slot() -> None:
    settings = EngineSettings(max_num_seqs=1, mean_output_tokens=10_000)
    async with serving(settings) as url, httpx.AsyncClient(base_url=url, timeout=5) as client:
        body = {**ASK, "max_tokens": 8_000, "ignore_eos": True}
        async with client.stream("POST", CHAT, json={**body, "stream": True}) as running:
            chunks = running.aiter_raw()
            await anext(chunks)
            async with client.stream("POST", CHAT, json={**body, "stream": True}) as queued:
                assert queued.status_code == 200
                assert await gauge(client, "num_requests_waiting") == 1
            whole = asyncio.create_task(client.post(CHAT, json=body))
            await wait_until(lambda: _is(client, waiting=1, running=1))
            whole.cancel()
            await wait_until(lambda: _is(client, waiting=0, running=1), timeout=0.5)
        await wait_until(lambda: _is(client, waiting=0, running=0), timeout=0.5)


async def _is(client: httpx.AsyncClient, waiting: int, running: int) -> bool:
    found = [await gauge(client, f"num_requests_{name}") for name in ("waiting", "running")]
    return found == [waiting, running]


async def test_one_http_chunk_is_one_event() -> None:
    body = msgspec.json.encode({**ASK, "stream": True, "ignore_eos": True})
    async with serving(FAST) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"\r\n\r\n")
        chunks = []
        while size := int(await reader.readline(), 16):
            chunks.append((await reader.readexactly(size + 2))[:-2])
        writer.close()
        await writer.wait_closed()
    assert len(chunks) == 42
    assert all(c.startswith(b"data: ") and c.count(b"\n\n") == 1 for c in chunks)
    assert chunks[-1] == b"data: [DONE]\n\n"


async def test_stopping_the_server_breaks_open_streams() -> None:
    async with httpx.AsyncClient(timeout=5) as client:
        async with serving(EngineSettings()) as url:
            request = client.build_request(
                "POST", url + CHAT, json={**ASK, "max_tokens": 8_000, "ignore_eos": True,
                                          "stream": True}
            )  # fmt: skip
            response = await client.send(request, stream=True)
            chunks = response.aiter_raw()
            await anext(chunks)
        with pytest.raises(httpx.TransportError):
            async for _ in chunks:
                pass
        await response.aclose()


# --- the application without a server: writes that suspend ---


class _Client:
    """An ASGI peer whose socket can be full, and who can go away."""

    def __init__(self, application: EngineApp, body: dict[str, object]) -> None:
        self.messages: list[Message] = []
        self.room = asyncio.Event()
        self.room.set()
        self.gone = asyncio.Event()
        self._body = msgspec.json.encode(body)
        self._asked = False
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        call: Callable[..., Awaitable[None]] = application
        self.task = asyncio.ensure_future(call(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.room.wait()
        self.messages.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.gone.set()

    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]


STREAM = {**ASK, "stream": True, "ignore_eos": True, "max_tokens": 10}


@pytest.mark.looptime
async def test_a_full_socket_delays_its_own_stream_only_and_keeps_the_order() -> None:
    application = app(EngineSettings())
    slow, quick = _Client(application, STREAM), _Client(application, STREAM)
    await pass_time(0.035)
    seen = len(slow.messages)
    slow.room.clear()
    await pass_time(1.0)
    assert quick.task.done() and not slow.task.done()
    assert len(slow.messages) == seen
    slow.room.set()
    await slow.task
    assert slow.bodies()[-2:] == [b"data: [DONE]\n\n", b""]
    ours = [body[body.find(b"choices") :] for body in slow.bodies()]
    assert ours == [body[body.find(b"choices") :] for body in quick.bodies()]


@pytest.mark.looptime
async def test_a_client_that_leaves_with_a_full_socket_is_forgotten() -> None:
    application = app(EngineSettings())
    client = _Client(application, {**STREAM, "max_tokens": 1_000})
    await pass_time(0.1)
    client.room.clear()
    await pass_time(0.1)
    client.gone.set()
    await client.task
    assert (application.host.engine.running(), len(asyncio.all_tasks())) == (0, 1)


@pytest.mark.looptime
async def test_a_killed_engine_breaks_open_and_new_connections() -> None:
    application = app(EngineSettings())
    open_one = _Client(application, {**STREAM, "max_tokens": 1_000})
    await pass_time(0.1)
    application.host.kill()
    new_one = _Client(application, STREAM)
    await asyncio.wait_for(asyncio.gather(open_one.task, new_one.task), 1.0)
    assert open_one.bodies() and new_one.messages == []


@pytest.mark.looptime
async def test_a_stalled_process_loses_time_instead_of_bursting() -> None:
    application = app(EngineSettings(max_num_seqs=1, step_ms=100.0, per_seq_us=0.0))
    client = _Client(application, {**STREAM, "max_tokens": 100})
    await pass_time(0.25)
    before = len(client.messages)
    asyncio.get_running_loop().setup_looptime(start=60.0)  # type: ignore[attr-defined]
    await pass_time(0.001)
    assert len(client.messages) - before <= 4
    client.gone.set()
    await client.task
