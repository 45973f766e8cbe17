"""What a client may send without getting anywhere is bounded, in bytes and in time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from common import http_limits
from common.service import bind, running, serve_asgi

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


async def test_a_large_body_in_small_chunks_is_none_of_this(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + b"7\r\n1234567\r\n" * 50_000 + b"0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.endswith(b"\r\n\r\n350000")
    writer.close()
