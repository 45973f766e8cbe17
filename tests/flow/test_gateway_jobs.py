"""What becomes of a job when its client leaves, its time is over, the queue is full, or its gateway
ends."""

import asyncio
import contextlib
import json
from typing import Any, Literal

import pytest

from common import keys
from common.outcomes import Outcome
from common.settings import (
    ClassSettings,
    DispatcherSettings,
    GatewaySettings,
    ModelSettings,
    Settings,
)
from tests.support.asgi import Exchange, ask
from tests.support.gateway import MODEL, site
from tests.support.wait import pass_time, wait_until

CHAT = "/v1/chat/completions"
A, DONE = b'data: {"a":1}\n\n', b"data: [DONE]\n\n"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
                      ).encode()  # fmt: skip


STREAM = body(stream=True)


# --- clients that leave


@pytest.mark.looptime
@pytest.mark.parametrize("sent", [body(), STREAM], ids=["body", "stream"])
async def test_a_client_that_leaves_while_queued(sent: bytes) -> None:
    async with site() as s:
        async with Exchange(s.app, "POST", CHAT, sent) as e:
            await s.one_waits()
            left = asyncio.get_running_loop().time()
            e.leave()
            await e.until_over()
        await s.one_waits(0)
        assert asyncio.get_running_loop().time() - left < 1.0
        assert e.status == 0
        await s.at_rest()


@pytest.mark.looptime
@pytest.mark.parametrize("when", ["before the head", "within a body", "within a stream"])
async def test_a_client_that_leaves_while_its_job_runs(when: str) -> None:
    async with site() as s:
        sent = body() if when == "within a body" else STREAM
        async with Exchange(s.app, "POST", CHAT, sent) as e:
            run = await s.dispatcher.pop()
            if when == "within a stream":
                await run.start(run.head(), run.data(A))
                await e.until(A)
            if when == "within a body":
                await run.start(run.head(200, False), run.data(b"{"))
            left = asyncio.get_running_loop().time()
            e.leave()
            await wait_until(lambda: s.dispatcher.cancels(), what="a cancel for its dispatcher")
            assert asyncio.get_running_loop().time() - left < 1.0
            assert s.dispatcher.cancels()[0].job == run.lease.job
        assert await run.end(Outcome.CANCELLED) == "settled"
        await s.at_rest()


@pytest.mark.looptime
async def test_fifty_clients_that_leave_leave_nothing_behind() -> None:
    async with site() as s:
        for n in range(50):
            async with Exchange(s.app, "POST", CHAT, STREAM) as e:
                run = await s.dispatcher.pop()
                if n % 2:
                    await run.start(run.head(), run.data(A))
                    await e.until(A)
            await run.end(Outcome.CANCELLED)
        await s.at_rest()


async def test_a_cancelled_handler_cancels_its_job() -> None:
    """A server that shuts down cancels its handlers."""
    async with site() as s:
        exchange = Exchange(s.app, "POST", CHAT, STREAM)
        task = asyncio.ensure_future(exchange._run())
        await s.one_waits()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await s.one_waits(0)
        await s.at_rest()


# --- deadlines


async def test_a_deadline_by_the_clock_of_redis() -> None:
    settings = Settings(gateway=GatewaySettings(wait_standard_s=0.2))
    async with site(settings) as s, Exchange(s.app, "POST", CHAT, body()) as e:
        await e.until_over()
        assert e.status == 504 and e.json["error"]["code"] == "queue_timeout"
        assert 1 <= int(e.headers["retry-after"]) <= 60
        await s.at_rest()


@pytest.mark.parametrize("comments", [False, True], ids=["headers unsent", "headers sent"])
async def test_each_class_waits_as_long_as_its_model_says(comments: bool) -> None:
    waits: dict[Literal["interactive", "standard", "batch"], float]
    waits = {"interactive": 1.0, "standard": 0.2, "batch": 0.6}
    model = ModelSettings(class_={c: ClassSettings(wait_s=w) for c, w in waits.items()})
    first_s = 0.01 if comments else 60.0
    settings = Settings(
        gateway=GatewaySettings(comment_first_s=first_s, comment_first_interactive_s=first_s),
        models={MODEL: model},
    )
    async with site(settings) as s, contextlib.AsyncExitStack() as stack:
        asked = [Exchange(s.app, "POST", CHAT, STREAM, [("X-Fairlane-Class", c)]) for c in waits]
        for e in asked:
            await stack.enter_async_context(e)
        for e in asked:
            await e.until_over()
            if comments:
                assert e.status == 200 and e.body.startswith(b": queued") and e.complete
                assert e.body.endswith(DONE) and b"queue_timeout" in e.body
            else:
                assert e.status == 504 and e.json["error"]["code"] == "queue_timeout"
                assert 1 <= int(e.headers["retry-after"]) <= 60
        ends = [e.pieces[-1][0] for e in asked]
        assert ends[1] < ends[2] < ends[0], "standard, batch, interactive"
        await s.at_rest()


@pytest.mark.looptime
async def test_a_deadline_while_redis_is_silent() -> None:
    settings = Settings(gateway=GatewaySettings(wait_standard_s=30))
    async with site(settings) as s, Exchange(s.app, "POST", CHAT, body()) as e:
        await s.one_waits()
        start = asyncio.get_running_loop().time()
        s.server.connected = False
        await s.broker.link.close()
        await e.until_over(60)
        assert e.status == 504
        assert 30 <= asyncio.get_running_loop().time() - start < 35
        s.server.connected = True
        await s.broker.up.wait()
        await s.at_rest()  # its cancel is told as soon as Redis is back


@pytest.mark.looptime
async def test_a_job_that_runs_at_its_deadline_may_go_on() -> None:
    settings = Settings(gateway=GatewaySettings(wait_standard_s=5))
    async with site(settings) as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        await pass_time(200)
        await run.stream(A, DONE)
        await e.until_over()
        assert e.body.endswith(A + DONE)


@pytest.mark.looptime
async def test_a_job_that_runs_for_ever_without_a_byte_is_given_up() -> None:
    settings = Settings(
        gateway=GatewaySettings(wait_standard_s=5),
        dispatcher=DispatcherSettings(first_byte_s=5, tries_max=1),
    )
    async with site(settings) as s, Exchange(s.app, "POST", CHAT, body()) as e:
        run = await s.dispatcher.pop()
        await e.until_over(60)
        assert e.status == 504
        await wait_until(lambda: s.dispatcher.cancels(), what="a cancel for its dispatcher")
        assert s.dispatcher.cancels()[0].job == run.lease.job


# --- limits


@pytest.mark.parametrize(
    ("limit", "status", "kind"),
    [("user_jobs_max", 429, "rate_limit_error"), ("model_jobs_max", 503, "server_error")],
)
async def test_a_full_queue(limit: str, status: int, kind: str) -> None:
    settings = Settings(gateway=GatewaySettings(**{limit: 2}))  # type: ignore[arg-type]
    async with (
        site(settings) as s,
        Exchange(s.app, "POST", CHAT, body(user="a")),
        Exchange(s.app, "POST", CHAT, body(user="a")),
    ):
        await s.one_waits(2)
        e = await ask(s.app, "POST", CHAT, body(user="a"))
        assert e.status == status and e.json["error"]["type"] == kind
        assert int(e.headers["retry-after"]) == 1, "two jobs ahead, two end each second"
        assert await s.queued() == 2


async def test_bodies_kept_are_limited() -> None:
    settings = Settings(gateway=GatewaySettings(bodies_max_bytes=2_048))
    async with site(settings) as s:
        async with Exchange(s.app, "POST", CHAT, body(user="x" * 1_500)) as e:
            await s.one_waits()
            assert (await ask(s.app, "POST", CHAT, body(user="x" * 1_500))).status == 503
            run = await s.dispatcher.pop()
            await run.answer(b"{}")
            await e.until_over()
        async with Exchange(s.app, "POST", CHAT, body(user="x" * 1_500)) as again:
            await (await s.dispatcher.pop()).answer(b"{}")
            assert (await again.until_over()).status == 200
        await s.at_rest()


async def test_open_requests_are_limited() -> None:
    settings = Settings(gateway=GatewaySettings(connections_max=1))
    async with site(settings) as s, Exchange(s.app, "POST", CHAT, body()):
        await s.one_waits()
        assert (await ask(s.app, "POST", CHAT, body())).status == 503
        assert (await ask(s.app, "GET", "/healthz")).status == 200


async def test_refused_requests_take_no_place() -> None:
    settings = Settings(gateway=GatewaySettings(connections_max=1, user_jobs_max=1))
    async with site(settings) as s:
        for bad in (b"{", body(model="nope"), body(n=0)):
            assert (await ask(s.app, "POST", CHAT, bad)).status in (400, 404)
        async with Exchange(s.app, "POST", CHAT, body()) as e:
            await (await s.dispatcher.pop()).answer(b"no", 400)
            assert (await e.until_over()).status == 400
        async with Exchange(s.app, "POST", CHAT, body()) as e:
            await (await s.dispatcher.pop()).answer(b"{}")
            assert (await e.until_over()).status == 200


# --- the gateway ends


@pytest.mark.looptime
async def test_draining() -> None:
    async with (
        site() as s,
        Exchange(s.app, "POST", CHAT, STREAM) as first,
        Exchange(s.app, "POST", CHAT, STREAM) as second,
    ):
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        await wait_until(lambda: first.body or second.body)
        started, other = (first, second) if first.body else (second, first)
        draining = asyncio.ensure_future(s.gateway.drain())
        await pass_time(1)
        late = await ask(s.app, "POST", CHAT, body())
        assert late.status == 503 and late.headers["connection"] == "close"
        assert (await ask(s.app, "GET", "/readyz")).status == 503
        await run.send(run.data(DONE))
        await run.end()
        await started.until_over()
        assert started.body.endswith(A + DONE) and not draining.done()
        await draining
        assert other.over and b"service_unavailable" in other.body
        await s.at_rest()


@pytest.mark.looptime
async def test_a_gateway_that_waits_for_nothing_drains_at_once() -> None:
    async with site() as s:
        start = asyncio.get_running_loop().time()
        await s.gateway.drain()
        assert asyncio.get_running_loop().time() - start < 0.1


async def test_the_heartbeat_stands_in_redis() -> None:
    async with site() as s:
        assert await s.broker.command("ZSCORE", keys.GATEWAYS, s.replica)
