"""From the queue to the client: streams, bodies, comments, failures, slow readers."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from common.key_settings import KeySettings
from common.outcomes import Outcome
from common.settings import GatewaySettings, Settings
from common.wire import decode_meta
from tests.support.asgi import Exchange
from tests.support.gateway import MODEL, site
from tests.support.wait import pass_time, wait_until

CHAT = "/v1/chat/completions"
A, B, DONE = b'data: {"a":1}\n\n', b'data: {"b":2}\n\n', b"data: [DONE]\n\n"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
                      ).encode()  # fmt: skip


STREAM = body(stream=True)


def naive_events(data: bytes) -> Iterator[bytes]:
    """What a parser sees that dispatches on every blank line."""
    for block in data.split(b"\n\n")[:-1]:
        yield b"\n".join(
            line.removeprefix(b"data: ") for line in block.split(b"\n") if line[:1] != b":"
        )


def error_of(e: Exchange) -> Any:
    """The error event that ends a stream."""
    *_, error, done = naive_events(e.body)
    assert done == b"[DONE]" and e.complete
    return json.loads(error)["error"]


async def test_a_stream() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        meta = decode_meta(run.lease.meta)
        assert (meta.path, meta.dialect, meta.stream, meta.wants_usage) == (
            CHAT,
            "chat",
            True,
            False,
        )
        assert (meta.choices, meta.max_output > 10_000) == (1, True)
        assert run.body == {**json.loads(STREAM), "stream_options": {"include_usage": True}}
        await run.start(run.head(), run.data(A))
        await e.until(A)
        assert not e.complete
        await run.send(run.data(B), run.data(DONE))
        await run.end()
        await e.until_over()
        assert e.body == A + B + DONE and e.complete
        assert e.headers == {
            "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache",
            "x-accel-buffering": "no", "x-fairlane-job": run.lease.job,
            "x-fairlane-queue-ms": e.headers["x-fairlane-queue-ms"],
        }  # fmt: skip
        assert int(e.headers["x-fairlane-queue-ms"]) >= 0


@pytest.mark.parametrize(
    ("path", "sent", "dialect", "edited"),
    [
        (CHAT, {"stream": False}, "chat", False),
        (CHAT, {"stream": None, "n": None}, "chat", False),
        ("/v1/completions", {"prompt": "x"}, "completions", False),
        ("/v1/completions", {"prompt": "x", "stream": True}, "completions", True),
        ("/v1/embeddings", {"input": ["a", "b"]}, "embeddings", False),
    ],
)
async def test_every_path(path: str, sent: Any, dialect: str, edited: bool) -> None:
    async with site() as s, Exchange(s.app, "POST", path, body(**sent)) as e:
        run = await s.dispatcher.pop()
        meta = decode_meta(run.lease.meta)
        assert (meta.path, meta.dialect) == (path, dialect)
        assert (run.lease.body != body(**sent)) == edited
        await run.answer(b'{"ok":1}')
        await e.until_over()
        assert (e.status, e.body, e.headers["content-length"]) == (200, b'{"ok":1}', "8")


async def test_an_instant_answer_loses_nothing() -> None:
    async with site() as s:
        for n in range(20):
            async with Exchange(s.app, "POST", CHAT, STREAM) as e:
                run = await s.dispatcher.pop()
                await run.stream(b'data: {"n":%d}\n\n' % n, DONE)
                await e.until_over()
                assert e.body == b'data: {"n":%d}\n\n' % n + DONE


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_own_error_is_passed_on_unchanged(status: int, stream: bool) -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body(stream=stream)) as e:
        run = await s.dispatcher.pop()
        own = b'{"error": {"message": "too long", "code": 400}, "x": 1.0}'
        await run.answer(own, status, [("content-type", "application/json"), ("x-engine", "1")])
        await e.until_over()
        assert (e.status, e.body) == (status, own)
        assert e.headers["content-type"] == "application/json" and e.headers["x-engine"] == "1"
        assert e.headers["x-fairlane-job"] == run.lease.job


async def test_a_long_body_in_pieces() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body()) as e:
        run = await s.dispatcher.pop()
        part = b"x" * 200_000
        await run.start(run.head(200, False), run.data(part, more=True))
        await run.send(run.data(part))
        await e.until(part * 2)
        assert e.status == 200 and "content-length" not in e.headers and not e.complete
        what = "what the client took is told"
        await wait_until(lambda: s.dispatcher.taken(run.lease.job) == 400_000, what=what)
        await run.send(run.data(b"end"))
        await run.end()
        await e.until_over()
        assert e.body == part * 2 + b"end" and e.complete


async def test_a_long_body_that_breaks_is_cut_off() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body()) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(200, False), run.data(b"x" * 300_000))
        await e.until(b"x" * 300_000)
        await run.end(Outcome.FAILED)
        await e.until_over()
        assert not e.complete, "the server cuts a connection whose answer is not complete"


async def test_a_short_body_that_breaks_becomes_an_error() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body()) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(200, False), run.data(b'{"half'))
        await run.end(Outcome.FAILED, "The engine stopped.")
        await e.until_over()
        assert e.status == 502 and e.json["error"]["message"] == "The engine stopped."


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(Outcome.TRIES, 502), (Outcome.TIMEOUT, 504), (Outcome.DEADLINE, 504), (Outcome.FAILED, 502)],
)
async def test_a_failure_before_the_first_byte(outcome: Outcome, status: int) -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        await run.end(outcome)
        await e.until_over()
        assert e.status == status and e.headers["content-type"] == "application/json"
        assert set(e.json["error"]) == {"message", "type", "param", "code"}
        assert ("retry-after" in e.headers) == (status == 504)


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.ORPHANED, Outcome.GATEWAY_DEAD])
async def test_a_failure_after_the_first_byte_is_an_event(outcome: Outcome) -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        await e.until(A)
        await run.end(outcome)
        await e.until_over()
        assert e.status == 200 and e.body.startswith(A) and error_of(e)["code"]


async def test_a_failure_that_the_dispatcher_told_is_told_once() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        await run.send(run.data(b'data: {"error":{"code":500}}\n\n' + DONE))
        await run.end(Outcome.FAILED)
        await e.until_over()
        assert e.body == A + b'data: {"error":{"code":500}}\n\n' + DONE and e.complete


# --- comments

QUICK = Settings(
    gateway=GatewaySettings(comment_first_interactive_s=4, comment_first_s=10, comment_every_s=15)
)


@pytest.mark.looptime
@pytest.mark.parametrize(("cls", "first"), [("interactive", 4.0), ("standard", 10.0)])
async def test_comments_while_waiting_and_in_silences(cls: str, first: float) -> None:
    async with (
        site(QUICK) as s,
        Exchange(s.app, "POST", CHAT, STREAM, [("X-Fairlane-Class", cls)]) as e,
    ):
        start = asyncio.get_running_loop().time()
        await wait_until(lambda: e.body.count(b": queued position=1 eta=") == 2, timeout=60)
        run = await s.dispatcher.pop(cls)
        await e.until(b"\n: waiting\n")
        await run.start(run.head(), run.data(A))
        await e.until(A)
        at = e.pieces[-1][0]
        await e.until(A + b": waiting\n")
        assert 15 <= e.pieces[-1][0] - at < 15.6
        await run.send(run.data(DONE))
        await run.end()
        await e.until_over()
        times = [round(t - start, 1) for t, _ in e.pieces]
        assert first <= times[0] < first + 0.6
        assert first + 15 <= times[1] < first + 16
        assert list(naive_events(e.body)) == [b'{"a":1}', b"[DONE]"]
        assert e.status == 200 and e.headers["content-type"].startswith("text/event-stream")
        assert e.headers["x-fairlane-job"] and "x-fairlane-queue-ms" not in e.headers


@pytest.mark.looptime
async def test_positions_follow_the_queue() -> None:
    async with site(QUICK) as s, Exchange(s.app, "POST", CHAT, STREAM) as first:
        await wait_until(lambda: s.broker.command("KEYS", "*:job:*"))
        async with Exchange(s.app, "POST", CHAT, STREAM) as second:
            await second.until(b": queued position=2 eta=")
            await (await s.dispatcher.pop()).stream(DONE)
            await first.until_over()
            await second.until(b": queued position=1 eta=")
            await (await s.dispatcher.pop()).stream(A, DONE)
            await second.until_over()


@pytest.mark.looptime
@pytest.mark.parametrize("stream", [False, True])
async def test_no_comments_where_they_are_off(stream: bool) -> None:
    """For a key that wants none, and for whoever did not ask for a stream."""
    key = KeySettings(secret="sk-test-alice", user="alice", comments=not stream)
    auth = [("Authorization", "Bearer sk-test-alice")]
    async with (
        site(Settings(keys=[key])) as s,
        Exchange(s.app, "POST", CHAT, body(stream=stream), auth) as e,
    ):
        run = await s.dispatcher.pop()
        await pass_time(100)
        assert e.status == 0
        await run.answer(b"{}")
        await e.until_over()
        assert e.body == b"{}"


@pytest.mark.looptime
async def test_no_comment_inside_an_event() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(b'data: {"a":', more=True))
        await e.until(b'data: {"a":')
        await pass_time(60)
        assert e.body == b'data: {"a":'
        await run.send(run.data(b"1}\n\n"))
        await e.until(A + b": waiting\n")
        await run.send(run.data(DONE))
        await run.end()
        await e.until_over()


@pytest.mark.looptime
async def test_an_engines_error_after_comments_is_an_event() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        await e.until(b": queued position=1 eta=")
        run = await s.dispatcher.pop()
        await run.answer(b'{"error":{"message":"too long","code":400}}', 400)
        await e.until_over()
        assert e.status == 200 and error_of(e) == {"message": "too long", "code": 400}


# --- slow readers


async def test_a_slow_client_holds_up_its_own_job_alone() -> None:
    part = b"data: " + b"x" * 99_990 + b"\n\n"
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM, reads=False) as slow:
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(part))
        for _ in range(5):
            await run.send(run.data(part))
        async with Exchange(s.app, "POST", CHAT, STREAM) as quick:
            other = await s.dispatcher.pop()
            await other.stream(A, DONE)
            await quick.until_over()
        assert slow.pieces == [] and s.dispatcher.taken(run.lease.job) == 0
        slow.read_all()
        await slow.until(part * 6)
        what = "what the client took is told"
        await wait_until(lambda: s.dispatcher.taken(run.lease.job) >= 256 << 10, what=what)
        await run.send(run.data(DONE))
        await run.end()
        await slow.until_over()


@pytest.mark.looptime
async def test_a_client_that_never_reads_is_given_up() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM, reads=False) as stuck:
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        await stuck.until_over(130)
        assert not stuck.complete
        await wait_until(lambda: s.dispatcher.cancels(), what="a cancel for its dispatcher")
        assert s.dispatcher.cancels()[0].job == run.lease.job
