"""Reported failures that need more than one request and its answer: errors of every kind,
connections that break, and what may stand in logs, keys and metrics."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from common.settings import Settings
from tests.support.fake_engine import DONE, HOST, Reply, chunk_event, player
from tests.support.live import ALICE, MODELS, ORIGIN, Faults, Lives, settings_for
from tests.support.wait import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")

T: dict[str, Any] = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**T, "stream": True}
SATURATED = {"backend_metrics": [{"at_ms": 0, "body": "vllm:num_requests_waiting{} 300\n"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def _lives() -> AsyncIterator[Lives]:
    async with Lives() as made:
        yield made


@pytest.fixture
def lives(_lives: Lives) -> Iterator[Lives]:
    """Redis, the fake engine, and a gateway for each set of settings; the engine as it was."""
    _lives.engine.reset({})
    _lives.engine.answer = None
    yield _lives


def script(*steps: dict[str, Any], always: bool = False, **more: Any) -> dict[str, Any]:
    """A case of nothing but what the engine does."""
    return {"backend_script": list(steps), "script_each_request": always, **more}


def settings(lives: Lives, gateway: dict[str, Any] | None = None, **dispatcher: Any) -> Settings:
    """The usual settings with a few others."""
    usual = settings_for(lives.engine.url, {})
    return msgspec.structs.replace(
        usual,
        gateway=msgspec.structs.replace(usual.gateway, **(gateway or {})),
        dispatcher=msgspec.structs.replace(usual.dispatcher, **dispatcher),
    )


def check_error(response: dict[str, Any], status: int) -> dict[str, Any]:
    """The one schema of all errors; returns the error."""
    assert response["status"] == status, response
    assert response["complete"]
    headers = response["headers"]
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(response["body"])
    body = json.loads(response["body"])
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"] != "None"
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    if status in (429, 503):
        assert 1 <= int(headers["retry-after"]) <= 60
        expected = "rate_limit_error" if status == 429 else "server_error"
        assert error["type"] == expected
    return error


REFUSED = [
    (400, {"body": "{"}),
    (400, {"body_json": {**T, "user": 7}}),
    (401, {"body_json": T, "auth": "sk-wrong-key"}),
    (401, {"body_json": T, "auth": ""}),
    (401, {"method": "GET", "path": "/v1/models", "auth": ""}),
    (404, {"body_json": {**T, "model": "nope"}}),
    (404, {"body_json": {**T, "model": "org/m-2:beta"}, "auth": "sk-test-bob"}),
    (404, {"method": "GET", "path": "/v1/models/nope"}),
    (404, {"path": "/v1/nothing"}),
    (404, {"path": "/v1/chat/completions/"}),
    (405, {"method": "GET"}),
    (405, {"method": "DELETE"}),
    (405, {"path": "/v1/models"}),
    (413, {"body_gen": {"prefix": '{"model":"m1","x":"', "unit": "x", "count": 2**20}}),
    (413, {"body_gen": {"unit": "x", "count": 2**21}, "chunked": 65536}),
    (415, {"body_json": T, "headers": {"Content-Encoding": "gzip"}}),
]  # fmt: skip


@pytest.mark.parametrize(("status", "request_"), REFUSED)
async def test_every_refusal_has_one_shape(
    lives: Lives, status: int, request_: dict[str, Any]
) -> None:
    live = await lives.get({"config": {"max_body_bytes": 1 << 20}})
    async with live.dispatching():
        check_error(await live.ask(request_), status)
        head = await live.ask({**request_, "method": "HEAD"}) if status == 405 else None
    assert head is None or (head["body"] == b"" and head["status"] in (200, 405))
    assert lives.engine.reqs == []


async def test_own_limit_is_429_and_no_dispatcher_is_503(lives: Lives) -> None:
    live = await lives.open(settings(lives, {"user_jobs_max": 1}))
    error = check_error(await live.ask({"body_json": T}), 503)
    assert error["code"] == "service_unavailable"
    lives.engine.reset(SATURATED)
    async with live.dispatching():
        first = asyncio.create_task(live.ask({"body_json": T}))
        await wait_until(lambda: live.sample("fairlane_gateway_open", model="m1") == 1)
        await wait_until(lambda: live.waiting("m1"))
        check_error(await live.ask({"body_json": STREAM}), 429)
        lives.engine.reset({})
        assert (await first)["status"] == 200


@pytest.mark.parametrize("body", [T, STREAM], ids=["json", "stream"])
async def test_failures_of_the_engine_have_the_shape_too(
    lives: Lives, body: dict[str, Any]
) -> None:
    live = await lives.open(settings(lives, first_byte_s=0.5))
    async with live.dispatching():
        lives.engine.reset(script({"sleep_ms_before_head": 5000}))
        error = check_error(await live.ask({"body_json": body}), 504)
        assert error["code"] == "engine_timeout"
    async with live.dispatching():
        head = {"status": 500, "headers": {"Content-Type": "text/plain"}}
        lives.engine.reset(script({"head": head}, {"send": "boom: Traceback"}))
        check_error(await live.ask({"body_json": body}), 500)
        assert len(lives.engine.reqs) == 1


@pytest.mark.parametrize("body", [T, STREAM], ids=["json", "stream"])
async def test_connections_that_are_closed_become_502_after_the_set_number_of_tries(
    lives: Lives, body: dict[str, Any]
) -> None:
    live = await lives.open(settings(lives, tries_max=2))
    lives.engine.reset(script({"head": {"raw": True}}, {"reset": True}, always=True))
    async with live.dispatching():
        error = check_error(await live.ask({"body_json": body}), 502)
        assert error["code"] == "engine_unreachable"
        # A try on a kept connection, such as a poll has left, is repeated on a new one.
        assert 2 <= len(lives.engine.reqs) <= 4


async def test_a_kept_connection_that_the_engine_closes_is_replaced(lives: Lives) -> None:
    live = await lives.get()
    served: dict[int, int] = {}

    async def answer(body: Any, reply: Reply) -> bool:
        n = served[reply.connection] = served.get(reply.connection, 0) + 1
        if n > 1:
            return False
        await reply.begin("application/json")
        await reply.send(b'{"choices":[{"index":0,"message":{"content":"ok"}}]}')
        await reply.end()
        return True

    lives.engine.answer = answer
    async with live.dispatching():
        for _ in range(40):
            response = await live.ask({"body_json": T}, 0.4)  # a breaker would stay open longer
            assert response["status"] == 200 and b"ok" in response["body"]
            if sum(n > 1 for n in served.values()) >= 3:
                break
        else:
            raise AssertionError("no connection was used twice")


WHEN = {
    "before-headers": [{"sleep_ms_before_head": 10_000}],
    "before-first-event": [{"send": ": waiting\n\n"}, {"sleep_ms": 10_000}],
    "mid-stream": [{"send": chunk_event("a").decode()}, {"sleep_ms": 10_000}],
}


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize("when", WHEN)
async def test_a_client_that_leaves_frees_the_engine(
    lives: Lives, when: str, stream: bool, how: str
) -> None:
    live = await lives.get()
    body = {**T, "stream": stream, "messages": [{"role": "user", "content": "a" * 2**21}]}
    kind = "text/event-stream" if stream else "application/json"
    lives.engine.reset(script({"head": {"headers": {"Content-Type": kind}}}, *WHEN[when]))
    request = {"body_json": body, "headers": {"Origin": ORIGIN}}
    head, sent = player.req_wire(request, live.port)
    async with live.dispatching():
        reader, writer = await asyncio.open_connection(HOST, live.port)
        try:
            writer.write(head + sent)
            await wait_until(lambda: lives.engine.reqs, what="the request at the engine")
            if when == "mid-stream" and stream:
                async with asyncio.timeout(5):
                    assert b"data: " in await reader.readuntil(b"\n\n")
        finally:
            if how == "rst":
                writer.transport.abort()
            else:
                writer.close()
        await wait_until(lambda: lives.engine.answering() == 0, timeout=1.0, what="hung up")
        gauge = "fairlane_gateway_open"
        await wait_until(lambda: live.sample(gauge, model="m1") == 0, timeout=1.0, what=gauge)
        await live.at_rest()
    assert len(lives.engine.reqs) == 1


async def test_line_ends_and_cuts_change_no_byte(lives: Lives) -> None:
    live = await lives.get()
    text = "zwei\u2028Wörter 👩‍👩‍👧"
    plain = b"".join((*(chunk_event(w) for w in text), chunk_event("", "stop"), DONE))
    crlf, cr = plain.replace(b"\n", b"\r\n"), plain.replace(b"\n", b"\r")
    mixed = b"".join(
        event.replace(b"\n", (b"\n", b"\r\n", b"\r")[n % 3])
        for n, event in enumerate(plain.replace(b"\n\n", b"\n\n\0").split(b"\0"))
    )
    got = []
    async with live.dispatching():
        for stream in (plain, crlf, cr, mixed):
            for size in (1 << 20, 7, 61):
                pieces = [stream[i : i + size] for i in range(0, len(stream), size)]

                async def answer(body: Any, reply: Reply, pieces: list[bytes] = pieces) -> bool:
                    await reply.begin("text/event-stream")
                    for piece in pieces:
                        await reply.send(piece)
                    await reply.end()
                    return True

                lives.engine.answer = answer
                got.append((await live.ask({"body_json": STREAM}))["body"])
    assert got == [plain] * len(got)


async def echo(body: Any, reply: Reply) -> bool:
    """Answers at once with the words of the prompt."""
    words = body["messages"][-1]["content"].split(" ")
    if body.get("stream"):
        await reply.begin("text/event-stream")
        await reply.send(b"".join(chunk_event(f"{w} ") for w in words) + chunk_event("", "stop"))
        await reply.send(DONE)
    else:
        await reply.begin("application/json")
        choice = {"index": 0, "message": {"content": " ".join(words)}, "finish_reason": "stop"}
        await reply.send(json.dumps({"choices": [choice]}).encode())
    await reply.end()
    return True


def text_of(response: dict[str, Any]) -> str:
    """The text of a whole answer, however it came."""
    assert response["status"] == 200 and response["complete"], response
    body: bytes = response["body"]
    if not body.startswith(b"data: "):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    deltas = [json.loads(e.removeprefix(b"data: "))["choices"][0]["delta"] for e in events]
    return "".join(d["content"] for d in deltas).strip()


async def test_an_engine_that_answers_at_once_loses_nothing(lives: Lives) -> None:
    live = await lives.get()
    lives.engine.answer = echo

    async def client(c: int) -> None:
        for n in range(30):
            prompt = f"client {c} request {n} end" + "x" * n
            body = {"model": MODELS[n % 3], "stream": (n + c) % 2 == 0,
                    "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
            assert text_of(await live.ask({"body_json": body})) == prompt

    async with live.dispatching():
        await asyncio.gather(*(client(c) for c in range(10)))


async def test_names_of_users_and_models_become_neither_keys_nor_series(lives: Lives) -> None:
    live = await lives.get()
    lives.engine.answer = echo
    async with live.dispatching(), aiohttp.ClientSession(
        f"http://127.0.0.1:{live.port}", headers={"Authorization": f"Bearer {ALICE}"}
    ) as session:  # fmt: skip

        async def ask(n: int) -> None:
            body = {**T, "user": f"user-{n}-" + "x" * 200}
            if n % 20:
                body["model"] = f"model-{n}"
            path = f"/v1/{n}" if n % 20 == 1 else "/v1/chat/completions"
            async with session.post(path, json=body) as response:
                assert response.status == (404 if n % 20 else 200)
                await response.read()

        async def page() -> str:
            async with session.get("/metrics") as response:
                return await response.text()

        async def many(numbers: range) -> None:
            for at in range(numbers.start, numbers.stop, 20):
                await asyncio.gather(*(ask(n) for n in range(at, at + 20)))

        await many(range(5_000))
        half = await page()
        await many(range(5_000, 10_000))
        full = await page()
        keys = [k.decode() for k in await live.broker.command("KEYS", "*")]
    series = [line for line in full.splitlines() if not line.startswith("#")]
    assert len(series) < 200
    assert len(full) < 1.05 * len(half)
    assert "user-" not in full and "model-" not in full
    assert not [k for k in keys if "user" in k or "model-" in k or len(k) > 200], keys


async def test_neither_prompts_nor_keys_are_logged(lives: Lives) -> None:
    usual = settings_for(lives.engine.url, {})
    secret = "sk-engine-marker-1"
    backend = msgspec.structs.replace(usual.models["m1"].backends[0], api_key=secret)
    models = {"m1": msgspec.structs.replace(usual.models["m1"], backends=[backend])}
    live = await lives.open(msgspec.structs.replace(usual, models=models))
    marked = {"model": "m1", "stream": True,
              "messages": [{"role": "user", "content": "prompt-marker-2"}]}  # fmt: skip
    echoed = json.dumps({"error": {"message": "bad prompt-marker-2", "type": "x"}})
    faults = [
        script({"head": {"status": 400, "headers": {}}}, {"send": echoed}),
        script({"send": chunk_event("a").decode() + "prompt-marker-2"}, {"reset": True}),
        script({"send": "prompt-marker-2 is no field"}),
        script({"head": {"status": 503, "headers": {}}}, {"send": echoed}),
        script({"head": {"status": 500, "headers": {}}}, {"send": "prompt-marker-2"}),
        script({"head": {"raw": True}}, {"send": "HTTP/9 prompt-marker-2\r\n\r\n"}),
        script({"head": {"raw": True}}, {"reset": True}),
    ]
    with Faults("", logging.INFO) as lines:
        for fault in faults:
            lives.engine.reset(fault)
            async with live.dispatching(["m1"]):
                response = await live.ask({"body_json": marked})
                assert response["status"] in (200, 400, 500, 502)
                assert any(secret in str(r["headers"]) for r in lives.engine.reqs)
        async with live.dispatching(["m1"]):
            await live.ask({"body": '{"model": "m1", "prompt-marker-2'})
            await live.ask({"body_json": marked, "auth": "sk-wrong-marker-3"})
            await live.broker.command("CONFIG", "SET", "maxmemory", "1mb")
            try:
                check_error(await live.ask({"body_json": marked}), 503)
            finally:
                await live.broker.command("CONFIG", "SET", "maxmemory", "0")
    assert any("enqueue" in text for _, text in lines.lines), "Redis' refusal was not logged"
    shown = [text for _, text in lines.lines if "marker" in text or ALICE in text]
    assert shown == []
