"""What a client may send without getting anywhere is bounded, in bytes and in time."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from common import http_limits
from common.service import bind, running, serve_asgi
from tests.support.wait import wait_until

Message = dict[str, Any]
SENT_MAX = 8 << 20
"""Far more than may be taken before the connection is closed; sockets hold some of it."""


async def echo(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Any], Any]
) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        size += len(message["body"])
        more = message.get("more_body", False)
    body = b"%d" % size
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0)
    number = listener.getsockname()[1]
    async with running(serve_asgi(echo, listener)):
        yield number


async def pour(port: int, start: bytes, unit: bytes) -> bytes:
    """Send `start`, then `unit` without end; what came back when the server hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    sent = 0
    try:
        while sent < SENT_MAX:
            writer.write(unit)
            sent += len(unit)
            async with asyncio.timeout(5):
                await writer.drain()
        raise AssertionError(f"{sent} bytes were taken")
    except (ConnectionError, TimeoutError):
        pass
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b""
    finally:
        writer.close()


ENDLESS = {
    "header": (b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"b" * 16_384),
    "headers": (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 2_000),
    "url": (b"GET /", b"a" * 16_384),
    "extension": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;",
        b"e" * 16_384,
    ),
    "trailers": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n",
        b"a: b\r\n" * 2_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_does_not_end_is_cut_off(port: int, what: str) -> None:
    start, unit = ENDLESS[what]
    answer = await pour(port, start, unit)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


async def test_a_head_that_does_not_come_to_its_end_in_time(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost:")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 431")
    writer.close()


RUBBISH = {
    "bytes": b"\x16\x03\x01\x02\x00\x01",
    "length": b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "both": b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
}


@pytest.mark.parametrize("what", RUBBISH)
async def test_what_is_no_http_is_told_as_every_error_is(port: int, what: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(RUBBISH[what])
    answer = await asyncio.wait_for(reader.read(), 5)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\ncontent-length: %d" % len(body) in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    writer.close()


async def test_nothing_is_written_into_an_answer_that_is_under_way() -> None:
    async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await _gone(receive)

    listener = bind("127.0.0.1", 0)
    number = listener.getsockname()[1]
    async with running(serve_asgi(app, listener)):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"begun\r\n")
        writer.write(b"\0\0\0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_large_body_in_small_chunks_is_none_of_this(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + b"7\r\n1234567\r\n" * 50_000 + b"0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.endswith(b"\r\n\r\n350000")
    writer.close()


async def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def _endless(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Any], Any]
) -> None:
    """An answer without end, until its client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(_gone(receive))
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})


async def _gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("leaves_it", [False, True])
async def test_a_client_that_takes_nothing_is_cut_off(
    leaves_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its application has given it up: a close would wait for the client."""
    monkeypatch.setattr(http_limits, "UNTAKEN_S", 0.3)
    ends = asyncio.Event()

    async def app(scope: Message, receive: Any, send: Any) -> None:
        try:
            async with asyncio.timeout(0.1 if leaves_it else None):
                await _endless(scope, receive, send)
        except TimeoutError:
            pass
        finally:
            ends.set()

    listener = bind("127.0.0.1", 0)
    number = listener.getsockname()[1]
    async with running(serve_asgi(app, listener)):
        _, writer = await asyncio.open_connection("127.0.0.1", number, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(ends.wait(), 10)
        await wait_until(lambda: _cut(writer), timeout=10)
        writer.close()


def _cut(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end hung up, found out by writing: what it sent is not to be read."""
    writer.write(b"x")
    return writer.transport.is_closing()


async def test_a_client_that_takes_it_slowly_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "UNTAKEN_S", 0.3)
    size, got = 16 << 20, 0

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    async def whole() -> bool:
        nonlocal got
        data = await reader.read(1 << 16)
        got += len(data)
        assert data, f"cut off after {got} bytes"
        return got > size

    listener = bind("127.0.0.1", 0)
    number = listener.getsockname()[1]
    async with running(serve_asgi(app, listener)):
        reader, writer = await asyncio.open_connection("127.0.0.1", number, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        began = asyncio.get_running_loop().time()
        await wait_until(whole, timeout=60)
        assert asyncio.get_running_loop().time() - began > 3 * http_limits.UNTAKEN_S
        writer.close()
