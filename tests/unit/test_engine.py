"""The HTTP call to an engine, over real sockets: what a pool of connections may do wrong."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

import dispatcher.engine
from dispatcher.engine import PIECE_BYTES, Broken, EngineClient, Refused, open_transport
from tests.support.redis_server import free_port
from tests.support.wait import wait_until

Handler = Callable[[int, bytes, bytes, asyncio.StreamWriter], Awaitable[bool]]
"""(which request of its connection, head, body, writer) -> whether the connection is kept."""

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n%s\r\n{}"


class Engine:
    """A few lines of HTTP server."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests = 0
        self.port = 0
        self.server: asyncio.Server

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for n in range(1_000):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                )
                body = await reader.readexactly(length)
                self.requests += 1
                if not await self._handler(n, head, body, writer):
                    break
        writer.close()


@contextlib.asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[tuple[Engine, EngineClient]]:
    made = Engine(handler)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=1 << 20, backlog=512)
    made.server = server
    made.port = server.sockets[0].getsockname()[1]
    client = EngineClient(open_transport())
    try:
        yield made, client
    finally:
        await client.close()
        server.close()


async def ask(made: Engine, client: EngineClient, body: bytes = b"{}", job: str = "j") -> bytes:
    answer = await client.send(
        f"http://127.0.0.1:{made.port}", "/v1/x", body, stream=False, api_key=None, job=job
    )
    data = await answer.rest()
    await answer.close()
    return data


async def test_as_many_connections_as_there_are_runs() -> None:
    open_ = asyncio.Event()

    async def slow(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        await open_.wait()
        writer.write(OK % b"")
        return False

    async with engine(slow) as (made, client):
        asking = [asyncio.create_task(ask(made, client)) for _ in range(250)]
        await wait_until(lambda: made.requests == 250, timeout=20, what="all at the engine")
        open_.set()
        assert set(await asyncio.gather(*asking)) == {b"{}"}


async def test_no_cookie_of_one_request_goes_out_with_the_next() -> None:
    heads: list[bytes] = []

    async def cookies(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        heads.append(head)
        writer.write(OK % b"set-cookie: session=secret\r\n")
        return True

    async with engine(cookies) as (made, client):
        url = f"http://localhost:{made.port}"  # cookies of bare addresses are dropped anyway
        for _ in range(2):
            answer = await client.send(url, "/", b"{}", stream=False, api_key=None, job="j")
            await answer.rest()
            await answer.close()
    assert len(heads) == 2
    assert not any(b"secret" in head for head in heads)


@pytest.mark.parametrize("size", [2, PIECE_BYTES, PIECE_BYTES + 1, 5_000_000])
async def test_a_body_arrives_as_it_is_with_its_length(size: int) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def keep(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        seen.append((head.lower(), body))
        writer.write(OK % b"")
        return True

    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    async with engine(keep) as (made, client):
        assert await ask(made, client, body) == b"{}"
    [(head, got)] = seen
    assert got == body
    assert head.count(b"content-length:") == 1
    assert b"transfer-encoding" not in head


def closes_second() -> Handler:
    """Answers the first request of each connection, and closes it on receipt of the second."""

    async def handler(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if n == 0:
            writer.write(OK % b"")
        return n == 0

    return handler


async def test_a_stale_kept_connection_is_no_failure() -> None:
    async with engine(closes_second()) as (made, client):
        for _ in range(3):
            assert await ask(made, client, b"x" * (PIECE_BYTES + 1)) == b"{}"
        assert made.requests == 4  # new, stale, its replacement, new


async def test_a_fresh_connection_that_is_closed_is_a_failure_at_once() -> None:
    async def closes(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        return False

    async with engine(closes) as (made, client):
        with pytest.raises(Broken):
            await ask(made, client)
        assert made.requests == 1


async def test_a_kept_connection_that_breaks_late_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher.engine, "STALE_S", 0.0)  # late: the engine died of the request
    async with engine(closes_second()) as (made, client):
        await ask(made, client)
        with pytest.raises(Broken):
            await ask(made, client)
        assert made.requests == 2


async def test_a_stale_connection_is_replaced_by_a_new_one_and_once_only() -> None:
    release = asyncio.Event()

    async def closes_kept(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if n == 0 and b"warm" in body:
            await release.wait()
        if n > 0 or b"poison" in body:
            return False
        writer.write(OK % b"")
        return True

    async with engine(closes_kept) as (made, client):
        warm = [asyncio.create_task(ask(made, client, b"warm")) for _ in range(10)]
        await wait_until(lambda: made.requests == 10)
        release.set()
        await asyncio.gather(*warm)  # ten kept connections, all of them stale
        assert await ask(made, client) == b"{}"
        assert made.requests == 12
        with pytest.raises(Broken):
            await ask(made, client, b"poison")
        assert made.requests == 14


async def test_a_stale_connection_of_an_engine_that_is_gone_counts_as_broken() -> None:
    servers: list[asyncio.Server] = []

    async def goes(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if n == 0:
            writer.write(OK % b"")
            return True
        servers[0].close()
        return False

    async with engine(goes) as (made, client):
        servers.append(made.server)
        await ask(made, client)
        with pytest.raises(Broken):  # it may have been that request which ended it
            await ask(made, client)


async def test_a_closed_port_refuses() -> None:
    client = EngineClient(open_transport())
    try:
        with pytest.raises(Refused):
            await client.send(
                f"http://127.0.0.1:{free_port()}", "/", b"{}", stream=False, api_key=None, job="j"
            )
    finally:
        await client.close()


@pytest.mark.parametrize(("status", "seen"), [(200, 200), (599, 599), (600, 502), (999, 502)])
async def test_a_status_that_is_none_is_a_bad_gateway(status: int, seen: int) -> None:
    async def handler(n: int, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\n\r\n" % status)
        return True

    async with engine(handler) as (made, client):
        url = f"http://127.0.0.1:{made.port}"
        answer = await client.send(url, "/", b"{}", stream=False, api_key=None, job="j")
        await answer.close()
        assert answer.status == seen


@pytest.mark.parametrize("url", ["http://a..b", "http://999.1.1.1", "http://h\0"])
async def test_an_address_that_is_none_refuses(url: str) -> None:
    client = EngineClient(open_transport())
    try:
        with pytest.raises(Refused):
            await client.send(url, "/", b"{}", stream=False, api_key=None, job="j")
    finally:
        await client.close()
