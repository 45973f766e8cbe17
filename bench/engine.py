"""A paced engine for the throughput parts: it sends tokens and does nothing else.

It shares loop and core with the load that asks it. A simulated engine that schedules, counts and
renders costs more than a token through Fairlane does, so it would be what is measured; this one
costs one write a token. Its events have the bytes of vLLM's. A stream whose reader lags gets no
tokens until it has caught up, so nothing is buffered without bound.
"""

import asyncio
from typing import cast

import msgspec

from sim.metrics import render
from sim.openai import Call, parse
from sim.replies import StreamReply, models_body, whole_body
from sim.settings import EngineSettings
from sim.stats import EngineStats

REQUEST_MAX = 1 << 20
_HEAD = b"HTTP/1.1 200 OK\r\n"
_STREAM = _HEAD + b"content-type: text/event-stream; charset=utf-8\r\n" + (
    b"transfer-encoding: chunked\r\n\r\n"
)  # fmt: skip
_END = b"0\r\n\r\n"
_TEXT = " token"
_SAMPLE = b'{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":1}'


class Asked(msgspec.Struct):
    """What is read of a request."""

    stream: bool = False
    max_tokens: int = 16


class Engine:
    """One engine server on a port of the loopback; a step every `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self.url = ""
        self.tokens = 0
        """Tokens sent."""
        self.streams: dict[EngineProtocol, None] = {}
        """Those with an answer under way."""
        self.step_s = step_s
        """May be changed at any time."""
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._settings = EngineSettings(model="sim", max_num_seqs=100_000)
        call = parse("chat", _SAMPLE, self._settings)
        stream = msgspec.structs.replace(call, stream=True, include_usage=True)
        reply = StreamReply(stream, "0123456789abcdef0123456789abcdef", 1_795_977_357)
        self.begin = b"".join(map(chunk, reply.begin()))
        self.token = chunk(reply.token(0, _TEXT, 1, None))
        self.final = chunk(reply.token(0, _TEXT, 1, "length"))
        self._reply, self._call = reply, call

    async def start(self) -> None:
        """Listen on a free port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: EngineProtocol(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._timer = loop.call_later(self.step_s, self._step, loop.time() + self.step_s)

    async def close(self) -> None:
        """Stop, and cut what is open."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in tuple(self.streams):
            stream.abort()
        if self._server is not None:
            self._server.close()

    def end(self, produced: int) -> bytes:
        """What follows a stream's last token."""
        return b"".join(map(chunk, self._reply.end(produced))) + _END

    def page(self, path: str) -> bytes:
        """The answer to a GET."""
        if path == "/metrics":
            return render(self._settings, EngineStats(), None, 0.0)
        return models_body(self._settings, 0)

    def whole(self, tokens: int) -> bytes:
        """A body that is not streamed."""
        call: Call = self._call
        return whole_body(call, "0123456789abcdef", 0, [_TEXT * tokens], [tokens], ["length"])

    def _step(self, due: float) -> None:
        for stream in tuple(self.streams):
            stream.step()
        loop = asyncio.get_running_loop()
        # A step that took too long is not made up for: an engine would not either.
        following = max(due + self.step_s, loop.time())
        self._timer = loop.call_at(following, self._step, following)


class EngineProtocol(asyncio.Protocol):
    """One connection; HTTP/1.1 as far as a dispatcher and the load here speak it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._read = bytearray()
        self._asked = Asked()
        self._produced = 0
        self._paused = False

    def step(self) -> None:
        """Send the next token."""
        transport, engine = self._transport, self._engine
        if self._paused or transport is None:
            return
        self._produced += 1
        engine.tokens += 1
        last = self._produced >= self._asked.max_tokens
        if not self._asked.stream:
            if last:
                del engine.streams[self]
                transport.write(with_length(engine.whole(self._produced)))
        elif last:
            del engine.streams[self]
            before = engine.begin if self._produced == 1 else b""
            transport.write(before + engine.final + engine.end(self._produced))
        else:
            transport.write(engine.token if self._produced > 1 else engine.begin + engine.token)

    def abort(self) -> None:
        """Cut the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        self._transport = None
        self._engine.streams.pop(self, None)

    def pause_writing(self) -> None:
        """Part of asyncio.Protocol."""
        self._paused = True

    def resume_writing(self) -> None:
        """Part of asyncio.Protocol."""
        self._paused = False

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol. One request at a time; a body has a length."""
        self._read += data
        end = self._read.find(b"\r\n\r\n")
        if end < 0 or self._transport is None:
            return
        head = bytes(self._read[:end])
        at = head.lower().find(b"\r\ncontent-length:")
        size = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if size > REQUEST_MAX:
            self.abort()
        if len(self._read) < end + 4 + size:
            return
        body = bytes(self._read[end + 4 : end + 4 + size])
        del self._read[: end + 4 + size]
        if head.startswith(b"GET"):
            page = self._engine.page(head.split(b" ", 2)[1].decode("latin-1"))
            self._transport.write(with_length(page))
            return
        self._asked = msgspec.json.decode(body, type=Asked)
        self._produced = 0
        self._engine.streams[self] = None
        if self._asked.stream:
            self._transport.write(_STREAM)


def chunk(data: bytes) -> bytes:
    """Data as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def with_length(body: bytes) -> bytes:
    """A whole answer of JSON, or of text that is read as such."""
    return (
        _HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
