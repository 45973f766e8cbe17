"""The gateway on a real socket: what only a server and a connection show."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest

from common.errors import ConfigError
from common.key_settings import KeySettings
from common.outcomes import Outcome
from common.settings import GatewaySettings, Settings
from gateway.server import listen, serve
from tests.support.gateway import MODEL, Site, site
from tests.support.wait import wait_until

BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = BODY[:-1] + b',"stream":true}'
A, DONE = b'data: {"a":1}\n\n', b"data: [DONE]\n\n"


class Connection:
    """A client that writes its own HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def post(self, body: bytes, *headers: str, path: str = "/v1/chat/completions") -> None:
        """Send a whole request."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer."""
        text = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
        first, *lines = text.strip().split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        return int(first.split()[1]), {k.lower(): v for k, _, v in pairs}

    async def whole(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer, whose body has a length or comes in chunks."""
        status, headers = await self.head()
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return status, headers, body

    async def chunk(self) -> bytes:
        """The next chunk of a body; empty: the last."""
        size = int((await asyncio.wait_for(self.reader.readline(), 10)).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def closed(self) -> bool:
        """Whether the server ends the connection, and sends nothing more before."""
        try:
            return await asyncio.wait_for(self.reader.read(), 10) == b""
        except ConnectionResetError:
            return True


class Served:
    """A served site."""

    def __init__(self, s: Site, port: int, stop: asyncio.Event, task: "asyncio.Task[None]") -> None:
        self.site = s
        self.port = port
        self.stop = stop
        self.task = task

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def served(settings: Settings | None = None) -> AsyncIterator[Served]:
    async with site(settings) as s:
        listener = listen(Settings(gateway=GatewaySettings(port=0)))
        port = listener.getsockname()[1]
        stop = asyncio.Event()
        task = asyncio.ensure_future(serve(s.gateway, listener, stop))
        try:
            yield Served(s, port, stop, task)
        finally:
            stop.set()
            async with asyncio.timeout(20):
                await task


async def test_several_requests_on_one_connection() -> None:
    async with served() as here, here.connect() as c:
        for n in range(3):
            c.post(BODY)
            await (await here.site.dispatcher.pop()).answer(b'{"n":%d}' % n)
            status, headers, body = await c.whole()
            assert (status, body) == (200, b'{"n":%d}' % n)
            assert "server" not in headers and headers["date"]
        c.post(b"{")
        assert (await c.whole())[0] == 400
        c.post(STREAM)
        await (await here.site.dispatcher.pop()).stream(A, DONE)
        status, headers, body = await c.whole()
        assert (status, body) == (200, A + DONE) and "content-length" not in headers


async def test_each_piece_leaves_at_once() -> None:
    async with served() as here, here.connect() as c:
        c.post(STREAM)
        run = await here.site.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        await c.head()
        for _ in range(5):
            assert await c.chunk() == A
            await run.send(run.data(A))
        assert await c.chunk() == A
        await run.end()


async def test_a_client_that_hangs_up_stops_its_job() -> None:
    async with served() as here:
        async with here.connect() as c:
            c.post(BODY)
            run = await here.site.dispatcher.pop()
        start = asyncio.get_running_loop().time()
        await wait_until(lambda: here.site.dispatcher.cancels(), what="a cancel")
        assert asyncio.get_running_loop().time() - start < 1.0
        assert here.site.dispatcher.cancels()[0].job == run.lease.job


async def test_a_cut_answer_does_not_look_whole() -> None:
    async with served() as here, here.connect() as c:
        c.post(BODY)
        run = await here.site.dispatcher.pop()
        await run.start(run.head(200, False), run.data(b"x" * 300_000))
        assert (await c.head())[0] == 200
        await run.end()  # the engine's answer is whole: now one that is not
        while await c.chunk():
            pass
        c.post(BODY)
        run = await here.site.dispatcher.pop()
        await run.start(run.head(200, False), run.data(b"x" * 300_000))
        await c.head()
        await c.chunk()
        await run.end(Outcome.FAILED)
        assert await c.closed(), "no last chunk"


async def test_expecting_to_be_asked_for_the_body() -> None:
    settings = Settings(keys=[KeySettings(secret="sk-test-alice", user="alice")])
    head = ("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            f"Content-Length: {len(BODY)}\r\nAuthorization: Bearer ")  # fmt: skip
    async with served(settings) as here:
        async with here.connect() as c:
            c.writer.write(f"{head}sk-test-alice\r\n\r\n".encode())
            assert (await c.head())[0] == 100
            c.writer.write(BODY)
            await (await here.site.dispatcher.pop()).answer(b"{}")
            assert (await c.whole())[0] == 200
        async with here.connect() as c:
            c.writer.write(f"{head}sk-wrong\r\n\r\n".encode())
            status, headers, _ = await c.whole()
            assert (status, headers["connection"]) == (401, "close"), "without a 100 before"
            c.writer.write_eof()
            assert await c.closed()


@pytest.mark.parametrize("size", [3_000, 3_000_000])
async def test_an_upload_that_is_too_large_gets_its_answer(size: int) -> None:
    settings = Settings(gateway=GatewaySettings(body_max_bytes=2_048))
    async with served(settings) as here, here.connect() as c:
        c.post(b"x" * size)
        status, headers, body = await c.whole()
        assert (status, headers["connection"]) == (413, "close") and b"request_too_large" in body
        await c.writer.drain()
        assert await c.closed()
        async with here.connect() as chunked:
            chunked.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                                 b"Transfer-Encoding: chunked\r\n\r\n"
                                 + b"400\r\n" + b"x" * 0x400 + b"\r\n")  # fmt: skip
            for _ in range(2):
                chunked.writer.write(b"400\r\n" + b"x" * 0x400 + b"\r\n")
            assert (await chunked.whole())[0] == 413


async def test_a_body_in_chunks_of_any_size() -> None:
    async with served() as here, here.connect() as c:
        c.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                       b"Transfer-Encoding: chunked\r\n\r\n")  # fmt: skip
        for i in range(0, len(BODY), 7):
            part = BODY[i : i + 7]
            c.writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await c.writer.drain()
        c.writer.write(b"0\r\n\r\n")
        run = await here.site.dispatcher.pop()
        assert run.lease.body == BODY
        await run.answer(b"{}")
        assert (await c.whole())[0] == 200


async def test_model_names_in_percent_signs() -> None:
    async with served() as here, here.connect() as c:
        for name, expected in (("m1", 200), ("%6D1", 200), ("a%2Fb", 404)):
            c.writer.write(f"GET /v1/models/{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await c.whole())[0] == expected
        c.writer.write(b"HEAD /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers = await c.head()
        assert status == 405 and int(headers["content-length"]) > 0
        c.writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await c.whole())[2] == b"ok\n", "no body came after HEAD"


async def test_stopping_lets_open_answers_end() -> None:
    async with served() as here, here.connect() as c, here.connect() as idle:
        c.post(STREAM)
        run = await here.site.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        assert (await c.head())[0] == 200 and await c.chunk() == A
        here.stop.set()
        idle.post(BODY)
        status, headers, _ = await idle.whole()
        assert (status, headers["connection"]) == (503, "close")
        await run.send(run.data(DONE))
        await run.end()
        assert await c.chunk() == DONE and await c.chunk() == b""
        async with asyncio.timeout(10):
            await here.task
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", here.port)


def test_a_taken_port_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            listen(Settings(gateway=GatewaySettings(port=port)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_open_to_others_without_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="keys"):
        listen(Settings(gateway=GatewaySettings(host=host, port=0)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_open_to_this_machine_alone(host: str) -> None:
    listen(Settings(gateway=GatewaySettings(host=host, port=0))).close()


def test_open_to_others_on_purpose() -> None:
    key = KeySettings(secret="sk-test-alice", user="alice")
    for settings in (
        Settings(gateway=GatewaySettings(host="0.0.0.0", port=0, insecure=True)),
        Settings(gateway=GatewaySettings(host="0.0.0.0", port=0), keys=[key]),
    ):
        listen(settings).close()
