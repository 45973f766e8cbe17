"""The simulated engine behind httpx, in virtual time: streaming, aborts, limits, faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from sim.events import Gauges
from sim.openai import expected_answers
from sim.settings import EngineSettings
from sim.transport import EngineTransport
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime

CHAT = "/v1/chat/completions"
FIXTURES = Path(__file__).parent.parent / "fixtures" / "vllm-0.32"


def slow(**changes: object) -> EngineSettings:
    """Steps of 100 ms, prefill without cost: token n comes at (n + 1) / 10 s."""
    values: dict[str, object] = {
        "max_num_seqs": 2,
        "step_ms": 100.0,
        "per_seq_us": 0.0,
        "prefill_tokens_per_s": 1e12,
        **changes,
    }
    return EngineSettings(**values)  # type: ignore[arg-type]


def body(text: str = "hi", tokens: int = 10, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    fixed: dict[str, object] = {"model": "sim", "messages": messages, "max_tokens": tokens}
    return {**fixed, "ignore_eos": True, **more}


@asynccontextmanager
async def client_of(transport: EngineTransport) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=transport, base_url="http://e", timeout=None) as client:
        yield client


def text_of(chunks: list[bytes]) -> str:
    made = [msgspec.json.decode(c[6:]) for c in chunks if c.startswith(b"data: {")]
    return "".join(e["choices"][0]["delta"].get("content", "") for e in made if e["choices"])


def now() -> float:
    return asyncio.get_running_loop().time()


async def read(response: httpx.Response) -> list[bytes]:
    return [chunk async for chunk in response.aiter_raw()]


# --- streaming ---


async def test_chunks_arrive_when_the_engine_makes_them() -> None:
    transport = EngineTransport(slow())
    async with (
        client_of(transport) as client,
        client.stream("POST", CHAT, json=body(tokens=3, stream=True)) as response,
    ):
        start = now()
        times = [(round(now() - start, 3), chunk[:6]) async for chunk in response.aiter_raw()]
    # The role comes with the first token, [DONE] with the last; each event is one chunk.
    assert [at for at, _ in times] == [0.1, 0.1, 0.2, 0.3, 0.3]


async def test_headers_come_while_the_request_waits() -> None:
    transport = EngineTransport(slow(max_num_seqs=1))
    async with client_of(transport) as client:
        first = asyncio.create_task(client.post(CHAT, json=body(tokens=50)))
        await pass_time(0.05)
        start = now()
        async with client.stream("POST", CHAT, json=body("b", stream=True)) as response:
            assert (response.status_code, now() - start) == (200, 0.0)
            assert (transport.running(), transport.waiting()) == (1, 1)
            await anext(response.aiter_raw())
            assert now() == pytest.approx(5.1)
        assert first.done()


async def test_a_whole_answer_sends_nothing_before_it_is_complete() -> None:
    transport = EngineTransport(slow())
    async with client_of(transport) as client:
        start = now()
        async with client.stream("POST", CHAT, json=body(tokens=7)) as response:
            assert now() - start == pytest.approx(0.7)
            answer = msgspec.json.decode(b"".join(await read(response)))
    assert answer["usage"]["completion_tokens"] == 7


async def test_the_answer_is_the_expected_text_streamed_or_not() -> None:
    settings = EngineSettings(seed=9, mean_output_tokens=20)
    request = {"messages": [{"role": "user", "content": "tell me"}]}
    wanted = "".join(expected_answers("chat", msgspec.json.encode(request), settings)[0])
    async with client_of(EngineTransport(settings)) as client:
        whole = (await client.post(CHAT, json=request)).json()["choices"][0]
        async with client.stream("POST", CHAT, json={**request, "stream": True}) as response:
            streamed = text_of(await read(response))
    assert whole["message"]["content"] == streamed == wanted
    assert whole["finish_reason"] == "stop"


@pytest.mark.parametrize("cut", [1, 24, 48, 49])
async def test_a_cut_answer_continues_at_the_exact_token(cut: int) -> None:
    settings = EngineSettings(seed=1, mean_output_tokens=30)
    question = [{"role": "user", "content": "continue me"}]
    (tokens,) = expected_answers("chat", msgspec.json.encode({"messages": question}), settings)
    assert len(tokens) == 49
    so_far = {"role": "assistant", "content": "".join(tokens[:cut])}
    request = {
        "messages": [*question, so_far],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    async with client_of(EngineTransport(settings)) as client:
        choice = (await client.post(CHAT, json=request)).json()["choices"][0]
    assert choice["message"]["content"] == "".join(tokens[cut:])
    assert choice["finish_reason"] == "stop"


async def test_keep_alive_comments_stop_at_the_first_event() -> None:
    transport = EngineTransport(slow(max_num_seqs=1, sse_keep_alive_s=1.0))
    async with client_of(transport) as client:
        first = asyncio.create_task(client.post(CHAT, json=body(tokens=25)))
        await asyncio.sleep(0)
        async with client.stream("POST", CHAT, json=body(tokens=15, stream=True)) as response:
            chunks = await read(response)
        await first
    assert chunks[:2] == [b": keep-alive\n\n"] * 2
    assert not any(chunk.startswith(b":") for chunk in chunks[2:])
    captured = (FIXTURES / "sse_keepalive_while_queued.body").read_bytes()
    assert captured.startswith(chunks[0])


# --- limits ---


async def test_a_full_queue_is_503_and_counted() -> None:
    transport = EngineTransport(slow(max_num_seqs=1, max_num_queued_reqs=2))
    async with client_of(transport) as client:
        calls = [asyncio.create_task(client.post(CHAT, json=body(str(i)))) for i in range(4)]
        statuses = [(await call).status_code for call in calls]
        page = (await client.get("/metrics")).text
    assert sorted(statuses) == [200, 200, 200, 503]
    assert 'admission_rejections_total{model_name="sim",reason="max_num_queued_reqs"} 1.0' in page
    assert transport.peak_waiting == 2


async def test_an_answer_ends_with_the_context() -> None:
    transport = EngineTransport(slow(max_model_len=50))
    async with client_of(transport) as client:
        answer = (await client.post(CHAT, json=body("x" * 80, tokens=1_000))).json()
    assert answer["usage"] == {
        "prompt_tokens": 20, "total_tokens": 50, "completion_tokens": 30,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_the_priority_header_wins_over_the_body() -> None:
    transport = EngineTransport(slow(max_num_seqs=1, priority_mode=True))
    done: list[str] = []

    async def call(name: str, header: str | None, priority: int) -> None:
        headers = {"X-Vllm-Priority": header} if header else {}
        await client.post(CHAT, json=body(name, 2, priority=priority), headers=headers)
        done.append(name)

    async with client_of(transport) as client, asyncio.TaskGroup() as group:
        group.create_task(call("first", None, 0))
        await pass_time(0.05)
        group.create_task(call("body", None, 5))
        group.create_task(call("header", "-7", 9))
        group.create_task(call("late", "8", -9))
    assert done == ["first", "header", "body", "late"]


async def test_an_observer_sees_every_state() -> None:
    transport = EngineTransport(slow())
    seen: list[Gauges] = []
    transport.observer = seen.append
    async with client_of(transport) as client:
        await asyncio.gather(*(client.post(CHAT, json=body(str(i), 2)) for i in range(3)))
    assert [(g.running, g.waiting, g.free_slots) for g in seen] == [
        (1, 0, 1), (1, 1, 1), (1, 2, 1),  # an idle engine starts the first at once
        (2, 1, 0), (2, 0, 0), (1, 0, 1), (0, 0, 2),
    ]  # fmt: skip


async def test_the_log_is_bounded_and_complete() -> None:
    transport = EngineTransport(slow(), log_size=2)
    async with client_of(transport) as client:
        for i in range(3):
            await client.post(CHAT, json=body(str(i), 1), headers={"X-Mark": str(i)})
    assert [received.headers["x-mark"] for received in transport.log] == ["1", "2"]
    assert msgspec.json.decode(transport.log[-1].body) == body("2", 1)
    assert transport.log[-1].at > transport.log[0].at


# --- aborts ---


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_a_request_frees_its_slot(stream: bool) -> None:
    transport = EngineTransport(slow(max_num_seqs=1))
    async with client_of(transport) as client:
        calls = [
            asyncio.create_task(client.post(CHAT, json=body(str(i), 100, stream=stream)))
            for i in range(2)
        ]
        await pass_time(0.55)
        assert (transport.running(), transport.waiting()) == (1, 1)
        calls[1].cancel()
        await asyncio.sleep(0)
        assert (transport.running(), transport.waiting()) == (1, 0)
        calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert (transport.running(), transport.waiting()) == (0, 0)
    assert transport.engine.stats.aborted == 2


async def test_closing_a_stream_aborts_all_its_choices() -> None:
    transport = EngineTransport(slow(max_num_seqs=8))
    async with client_of(transport) as client:
        async with client.stream("POST", CHAT, json=body(stream=True, n=3)) as response:
            await anext(response.aiter_raw())
            assert transport.running() == 3
        assert transport.running() == 0
    assert transport.engine.kv_usage() == 0.0


async def test_a_finished_answer_is_not_an_abort() -> None:
    transport = EngineTransport(slow())
    async with client_of(transport) as client:
        await client.post(CHAT, json=body())
    assert transport.engine.stats.aborted == 0


# --- faults ---


async def test_kill_breaks_what_is_open_and_revive_starts_afresh() -> None:
    transport = EngineTransport(slow())
    async with client_of(transport) as client:
        whole = asyncio.create_task(client.post(CHAT, json=body()))
        async with client.stream("POST", CHAT, json=body(stream=True)) as response:
            chunks = response.aiter_raw()
            assert len([await anext(chunks), await anext(chunks)]) == 2
            transport.kill()
            with pytest.raises(httpx.ReadError):
                await anext(chunks)
        with pytest.raises(httpx.ReadError):
            await whole
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        transport.revive()
        assert (await client.post(CHAT, json=body(tokens=2))).status_code == 200
    assert transport.engine.stats.generation_tokens == 2


async def test_freeze_stops_everything_and_revive_goes_on_where_it_was() -> None:
    transport = EngineTransport(slow())
    async with client_of(transport) as client:
        async with client.stream("POST", CHAT, json=body(tokens=4, stream=True)) as response:
            chunks = response.aiter_raw()
            await anext(chunks)
            transport.freeze()
            health = asyncio.create_task(client.get("/health"))
            await pass_time(60)
            assert not health.done()
            assert len([await anext(chunks)]) == 1  # written before the freeze
            transport.revive()
            assert len([chunk async for chunk in chunks]) == 4
            assert now() == pytest.approx(60.4)
        assert (await health).status_code == 200


async def test_a_read_timeout_counts_from_the_last_chunk() -> None:
    transport = EngineTransport(slow())
    limits = httpx.Timeout(None, read=0.15)
    async with client_of(transport) as client:
        await client.post(CHAT, json=body(tokens=20, stream=True), timeout=limits)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=body(tokens=20), timeout=limits)
    assert transport.running() == 0


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_refuse_answers_new_calls_only(status: int) -> None:
    transport = EngineTransport(slow())
    async with client_of(transport) as client:
        open_call = asyncio.create_task(client.post(CHAT, json=body()))
        await pass_time(0.05)
        transport.refuse(status)
        refused = await client.post(CHAT, json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, status)
        assert (await client.get("/health")).status_code == 200
        assert (await open_call).status_code == 200
        if status == 500:
            captured = (FIXTURES / "drain_new_post.http").read_bytes()
            assert captured.rstrip().endswith(refused.content)


async def test_crash_ends_streams_cleanly_with_an_error_event() -> None:
    transport = EngineTransport(slow())
    async with client_of(transport) as client:
        whole = asyncio.create_task(client.post(CHAT, json=body()))
        async with client.stream("POST", CHAT, json=body(stream=True)) as response:
            chunks = response.aiter_raw()
            assert len([await anext(chunks), await anext(chunks)]) == 2
            transport.crash()
            tail = [chunk async for chunk in chunks]
        answer = await whole
        assert (await client.get("/health")).status_code == 503
    captured = (FIXTURES / "enginekill_client_queued_chat_stream.raw").read_bytes()
    assert len(tail) == 2 and all(chunk in captured for chunk in tail)
    captured = (FIXTURES / "enginekill_client_chat_nonstream.raw").read_bytes()
    assert (answer.status_code, captured.endswith(answer.content)) == (500, True)
