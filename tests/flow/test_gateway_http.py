"""The gateway over ASGI, up to the queue: paths, methods, bodies, keys, models."""

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common import keys
from common.key_settings import KeySettings
from common.settings import GatewaySettings, ModelSettings, Settings
from gateway.app import Endpoint
from gateway.client import Client
from gateway.metrics import GatewayMetrics
from tests.support.asgi import Exchange, ask
from tests.support.gateway import MODEL, Dispatcher, Site, site
from tests.support.wait import wait_until

CHAT = "/v1/chat/completions"
ALICE = ("Authorization", "Bearer sk-test-alice")
KEYED = Settings(
    keys=[
        KeySettings(secret="sk-test-alice", user="alice"),
        KeySettings(secret="sk-test-bob00", user="bob", models=["m1"], classes=["batch"]),
    ],
    models={"org/m-2:beta": ModelSettings(aliases=["模型-3"])},
)


def body(**fields: Any) -> bytes:
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(sent, ensure_ascii=False).encode()


def refused(e: Exchange, status: int, **error: Any) -> Any:
    """Assert the shape of an error, and return its inside."""
    assert e.status == status and e.complete
    assert e.headers["content-type"] == "application/json"
    found = e.json["error"]
    assert set(found) == {"message", "type", "param", "code"}
    for name, value in error.items():
        assert found[name] == value
    if status in (429, 503, 504):
        assert 1 <= int(e.headers["retry-after"]) <= 60
    return found


async def nothing_was_queued(s: Site) -> None:
    assert not await s.broker.command("KEYS", "*lane*")
    assert not await s.broker.command("KEYS", "*:job:*")


async def test_health_and_readiness() -> None:
    async with site() as s:
        assert (await ask(s.app, "GET", "/healthz")).status == 200
        ready = await ask(s.app, "GET", "/readyz")
        assert ready.status == 200 and ready.json == {"ready": True, "reasons": []}
        head = await ask(s.app, "HEAD", "/readyz")
        assert head.status == 200 and head.body == b"" and int(head.headers["content-length"])


async def test_not_ready_while_no_backend_answers_and_jobs_are_not_to_wait() -> None:
    at_once = Settings(gateway=GatewaySettings(wait_for_backend=False))
    async with site(at_once, ready=False) as s:
        e = await ask(s.app, "GET", "/readyz")
        assert e.status == 503 and e.json["reasons"]
        assert (await ask(s.app, "GET", "/healthz")).status == 200
        refused(await ask(s.app, "POST", CHAT, body()), 503)


async def test_jobs_wait_while_no_backend_answers() -> None:
    """As long as a dispatcher leads their model; others may come and serve."""
    async with site(ready=False) as s:
        assert (await ask(s.app, "GET", "/readyz")).status == 200
        async with Exchange(s.app, "POST", CHAT, body()) as e:
            await s.one_waits()
            await (await s.dispatcher.pop()).answer(b"{}")
            assert (await e.until_over()).status == 200


async def test_not_ready_without_redis() -> None:
    async with site() as s:
        s.server.connected = False
        await s.broker.link.close()
        await wait_until(lambda: not s.broker.up.is_set())
        assert (await ask(s.app, "GET", "/readyz")).status == 503
        refused(await ask(s.app, "POST", CHAT, body()), 503, type="server_error")
        assert (await ask(s.app, "GET", "/healthz")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("POST", "/nope", 404), ("GET", "/v1", 404), ("POST", CHAT + "/", 404),
        ("POST", "/v1/%2e%2e/admin", 404), ("GET", CHAT, 405), ("PUT", CHAT, 405),
        ("HEAD", CHAT, 405), ("OPTIONS", CHAT, 405), ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/m1", 405), ("BREW", "/healthz", 405),
    ],
)  # fmt: skip
async def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    async with site() as s:
        e = await ask(s.app, method, path)
        assert e.status == status and e.headers["content-type"] == "application/json"
        if method == "HEAD":
            assert e.body == b""
        else:
            refused(e, status)
        assert ("allow" in e.headers) == (status == 405)


async def test_malformed_bodies_are_refused_and_queue_nothing() -> None:
    bad = [b"", b"{", b"null", b"[]", b"{}{}", b'{"model":}', b"\xff\xfe", b"[" * 100_000,
           b'{"model":"m1","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
           body()[:-1] + b',"model":"m1"}', body(max_tokens=0), body(user=1), body(messages=None),
           body(messages=7), body(priority="high"), body(n=0)]  # fmt: skip
    async with site() as s:
        for data in bad:
            error = refused(await ask(s.app, "POST", CHAT, data), 400, type="invalid_request_error")
            assert "Traceback" not in error["message"] and ".py" not in error["message"]
        await nothing_was_queued(s)


async def test_the_limit_on_bodies_holds_while_reading() -> None:
    async with site(Settings(gateway=GatewaySettings(body_max_bytes=2_048))) as s:
        whole = await ask(s.app, "POST", CHAT, body(user="x" * 3_000))
        refused(whole, 413)
        assert whole.headers["connection"] == "close"
        chunks = [b"x" * 1_000] * 9
        async with Exchange(s.app, "POST", CHAT, chunks) as e:
            refused(await e.until_over(), 413)
        data = body(user="x" * 1_900)
        pieces = [data[i : i + 7] for i in range(0, len(data), 7)]
        async with Exchange(s.app, "POST", CHAT, pieces) as e:
            run = await s.dispatcher.pop()
            assert run.lease.body == data
            await run.answer(b"{}")
            assert (await e.until_over()).status == 200


async def test_the_answer_to_a_long_body_comes_before_its_end() -> None:
    async with (
        site(Settings(gateway=GatewaySettings(body_max_bytes=2_048))) as s,
        Exchange(s.app, "POST", CHAT, [b"x" * 3_000, *[b"y" * 1_000] * 20]) as e,
    ):
        refused(await e.until_over(), 413)
        assert e.received_before == 1
        assert e.received == 21, "the rest is read and dropped, so that no reset is sent"


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "zstd"])
async def test_compressed_bodies_are_refused(encoding: str) -> None:
    async with site() as s:
        e = await ask(s.app, "POST", CHAT, body(), headers=[("Content-Encoding", encoding)])
        refused(e, 415)


async def test_a_client_that_leaves_within_its_body() -> None:
    async with site() as s:
        async with Exchange(s.app, "POST", CHAT, [b'{"model":', b"", b""]) as e:
            e.leave()
            await e.until_over()
            assert e.status == 0
        await nothing_was_queued(s)


@pytest.mark.looptime
async def test_a_body_that_never_ends() -> None:
    async with site() as s:
        start = asyncio.get_running_loop().time()
        async with Exchange(s.app, "POST", CHAT, [b'{"model":'], stalls=True) as e:
            refused(await e.until_over(400), 408, code="request_timeout")
            assert e.headers["connection"] == "close"
            assert asyncio.get_running_loop().time() - start < 310
        await nothing_was_queued(s)


# --- keys


async def test_the_key_is_looked_at_before_the_body() -> None:
    async with site(KEYED) as s:
        wrong: list[list[tuple[str, str]]] = [
            [], [("Authorization", "Bearer")], [("Authorization", "Basic x")],
            [("Authorization", "Bearer \xff\xfe")], [("Authorization", "Bearer " + "x" * 8_192)],
        ]  # fmt: skip
        bodies = set()
        for headers in wrong:
            async with Exchange(s.app, "POST", CHAT, [b"{", b"}"], headers) as e:
                await e.until_over()
            assert e.received_before == 0
            assert e.headers["www-authenticate"] == "Bearer"
            refused(e, 401, code="invalid_api_key")
            bodies.add(e.body)
        assert len(bodies) == 1
        refused(await ask(s.app, "GET", "/v1/models"), 401)
        refused(await ask(s.app, "GET", "/v1/models/m1"), 401)


async def test_a_key_decides_user_weight_and_class() -> None:
    async with site(KEYED) as s:
        sent = body(user="somebody else", service_tier="priority")
        headers = [("Authorization", "bearer sk-test-bob00")]
        async with Exchange(s.app, "POST", CHAT, sent, headers) as e:
            run = await s.dispatcher.pop("batch")
            assert (run.lease.user, run.lease.cls) == ("bob", "batch")
            await run.answer(b"{}")
            await e.until_over()


async def test_an_unknown_class_is_refused() -> None:
    async with site() as s:
        e = await ask(s.app, "POST", CHAT, body(), headers=[("X-Fairlane-Class", "urgent")])
        assert "interactive" in refused(e, 400, param="X-Fairlane-Class")["message"]


@pytest.mark.parametrize(
    ("sent", "headers", "user"),
    [
        ({"user": "ann"}, [("Authorization", "Bearer t")], "ann"),
        ({"user": "u" * 10_000}, [], keys.encode("u" * 10_000)),
        ({"user": "a}{b:*\r\n\0"}, [], keys.encode("a}{b:*\r\n\0")),
        ({"user": ""}, [], "10.1.2.3"),
        ({}, [], "10.1.2.3"),
    ],
)
async def test_without_keys(sent: Any, headers: Any, user: str) -> None:
    async with (
        site() as s,
        Exchange(s.app, "POST", CHAT, body(**sent), headers, client="10.1.2.3") as e,
    ):
        run = await s.dispatcher.pop()
        assert run.lease.user == user
        await run.answer(b"{}")
        await e.until_over()
        assert "u" * 100 not in (await ask(s.app, "GET", "/metrics")).body.decode()


# --- models


async def test_models_are_listed_and_found_under_every_name() -> None:
    async with site(KEYED) as s:
        listed = (await ask(s.app, "GET", "/v1/models", headers=[ALICE])).json
        assert listed["object"] == "list"
        names = [m["id"] for m in listed["data"]]
        assert names == ["m1", "org/m-2:beta", "模型-3"]
        for name in names:  # a server decodes the percent signs of a path
            one = await ask(s.app, "GET", f"/v1/models/{name}", headers=[ALICE])
            assert one.status == 200 and one.json["id"] == name and one.json["object"] == "model"
        for name in ("nope", "org", "", "org/m-2:beta/x"):
            e = await ask(s.app, "GET", f"/v1/models/{name}", headers=[ALICE])
            refused(e, 404, code="model_not_found")


async def test_a_forbidden_model_is_as_unknown() -> None:
    bob = [("Authorization", "Bearer sk-test-bob00")]
    async with site(KEYED) as s:
        for name in ("nope", "org/m-2:beta", "模型-3"):
            for stream in (False, True):
                sent = body(model=name, stream=stream)
                e = await ask(s.app, "POST", CHAT, sent, headers=bob)
                error = refused(e, 404, code="model_not_found", param="model")
                usable = error["message"].partition("Available")[2]
                assert "`m1`" in usable and "beta" not in usable
        listed = await ask(s.app, "GET", "/v1/models", headers=bob)
        assert [m["id"] for m in listed.json["data"]] == ["m1"]
        assert not await s.broker.command("KEYS", "*nope*")
        await nothing_was_queued(s)


async def test_a_configured_model_that_nobody_serves() -> None:
    async with site(KEYED) as s:
        e = await ask(s.app, "POST", CHAT, body(model="模型-3"), headers=[ALICE])
        refused(e, 503)


async def test_an_alias_reaches_its_model() -> None:
    async with (
        site(aliases=["gpt-4o-mini"]) as s,
        Exchange(s.app, "POST", CHAT, body(model="gpt-4o-mini", seed=1)) as e,
    ):
        run = await s.dispatcher.pop()
        assert run.body == json.loads(body(seed=1))
        await run.answer(b"{}")
        await e.until_over()


async def test_a_model_whose_dispatcher_is_gone_is_not_unknown() -> None:
    async with site() as s:
        await s.broker.command("DEL", keys.MODELS)
        await s.gateway.models.refresh()
        refused(await ask(s.app, "POST", CHAT, body()), 503)
        again = Dispatcher(s.broker, name="dispatcher-test-2")
        await again.announce()
        await s.gateway.models.refresh()
        async with Exchange(s.app, "POST", CHAT, body()) as e:
            await (await again.pop()).answer(b"{}")
            assert (await e.until_over()).status == 200


# --- browsers


async def test_browsers_of_allowed_origins() -> None:
    settings = Settings(keys=KEYED.keys, gateway=GatewaySettings(cors_origins=["https://ui"]))
    ask_first = [("Origin", "https://ui"), ("Access-Control-Request-Method", "POST"),
                 ("Access-Control-Request-Headers", "authorization,content-type")]  # fmt: skip
    async with site(settings) as s:
        e = await ask(s.app, "OPTIONS", CHAT, headers=ask_first)
        assert e.status in (200, 204)
        assert e.headers["access-control-allow-origin"] == "https://ui"
        assert "POST" in e.headers["access-control-allow-methods"]
        assert "authorization" in e.headers["access-control-allow-headers"]
        late = await ask(s.app, "POST", CHAT, body(), headers=[("Origin", "https://ui")])
        refused(late, 401)
        assert late.headers["access-control-allow-origin"] == "https://ui"
        other = await ask(s.app, "POST", CHAT, body(), headers=[("Origin", "https://evil")])
        assert "access-control-allow-origin" not in other.headers


# --- faults of our own


@pytest.mark.parametrize("begun", [False, True])
async def test_an_internal_error_tells_nothing(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(client: Client) -> None:
        if begun:
            await client.start(200, [])
        raise KeyError("sk-secret prompt")

    endpoint = Endpoint(GatewayMetrics(CollectorRegistry()), ("GET",), broken)
    e = await ask(endpoint, "GET", "/x")
    if begun:
        assert e.status == 200 and not e.complete, "cut off: it must not look like success"
    else:
        refused(e, 500, type="server_error")
        assert "KeyError" not in e.body.decode()
    assert "KeyError" in caplog.text and "broken" in caplog.text
    assert "sk-secret" not in caplog.text and "prompt" not in caplog.text
