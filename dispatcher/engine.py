"""The HTTP call to one engine: a request out, a stream of bytes in, errors in our own terms.

The transport is called directly, without httpx's client around it: that halves the cost of a
request. No time-out is set here; `dispatcher/runs.py` watches every run.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx_aiohttp
import msgspec

from common.errors import FairlaneError

CONNECT_S = 5.0
KEEPALIVE_S = 4.0
"""Shorter than the 5 s after which vLLM's server closes an idle connection."""
BODY_MAX = 32 << 20
"""The most of a body that is held whole (an error, or JSON in answer to `stream: true`)."""
STALE_S = 1.0
"""A kept connection that breaks so soon after a request was written had been closed before."""
PIECE_BYTES = 256 << 10
"""A larger request is written in pieces: other runs go on between them, and while the engine is
slow to take it."""


class Refused(FairlaneError):
    """The engine did not take the request: nothing was sent, or it said so. Backpressure."""


class Broken(FairlaneError):
    """The connection broke after the request was written."""


class Answer(msgspec.Struct):
    """The start of an engine's answer. Close it, or the engine goes on generating."""

    status: int
    content_type: str
    headers: list[tuple[str, str]]
    """Those worth passing on."""
    response: httpx.Response
    _chunks: AsyncIterator[bytes] | None = None

    async def read(self) -> bytes:
        """The next bytes, empty at a proper end. Raises Broken."""
        try:
            if self._chunks is None:
                self._chunks = self._iterate()
            return await anext(self._chunks, b"")
        except (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError) as e:
            raise Broken(f"the connection to the engine broke: {type(e).__name__}") from None

    def _iterate(self) -> AsyncIterator[bytes]:
        encoded = "content-encoding" in self.response.headers
        if encoded or not isinstance(self.response.stream, httpx.AsyncByteStream):
            return self.response.aiter_bytes()
        return aiter(self.response.stream)

    async def rest(self) -> bytes:
        """The whole body. Raises Broken, also where it is larger than BODY_MAX."""
        parts, size = [], 0
        while data := await self.read():
            parts.append(data)
            size += len(data)
            if size > BODY_MAX:
                raise Broken("the engine's answer is too large")
        return b"".join(parts)

    async def close(self) -> None:
        """Hang up: an engine stops generating for a client that is gone."""
        try:
            await self.response.aclose()
        except (httpx.HTTPError, aiohttp.ClientError, OSError):
            return  # it is hung up either way


_PASSED_ON = ("content-type", "x-request-id", "retry-after", "openai-processing-ms")


class _Call:
    """One request on a connection of the pool."""

    def __init__(self) -> None:
        self.reused = False
        """Whether the connection had served another request before."""
        self._began = asyncio.get_running_loop().time()

    def age(self) -> float:
        """Seconds since it began."""
        return asyncio.get_running_loop().time() - self._began


_current: ContextVar[_Call | None] = ContextVar("_current", default=None)
"""The call of the present task: httpx's transport has no other way to say what aiohttp did."""


async def _note_reuse(
    session: aiohttp.ClientSession, _: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    call = _current.get()
    if call is not None:
        call.reused = True


def _session(tls: ssl.SSLContext, *, keep: bool) -> aiohttp.ClientSession:
    """As many connections as there are runs, and no cookies: what an engine sets for one client
    is none of the next one's."""
    if keep:
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=KEEPALIVE_S)
    else:
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, force_close=True)
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trace_configs=[trace]
    )


class EngineTransport(httpx.AsyncBaseTransport):
    """httpx over aiohttp's connections, several times as fast as httpx's own.

    An engine may close a kept connection just as the next request is written to it. That request
    is sent again, once, on a new connection. Its stream must be one that can be read twice.
    """

    def __init__(self) -> None:
        tls = httpx.create_ssl_context(trust_env=False)  # made once: it reads a large file
        kept, new = partial(_session, tls, keep=True), partial(_session, tls, keep=False)
        self._kept = httpx_aiohttp.AiohttpTransport(verify=tls, client=kept)
        self._new = httpx_aiohttp.AiohttpTransport(verify=tls, client=new)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises what httpx and aiohttp raise."""
        call = _Call()
        _current.set(call)
        try:
            return await self._kept.handle_async_request(request)
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as e:
            if not (_closed(e) and call.reused and call.age() < STALE_S):
                raise
            try:
                return await self._new.handle_async_request(request)
            except (httpx.HTTPError, aiohttp.ClientError, OSError):
                raise e from e.__cause__  # for something was written

    async def aclose(self) -> None:
        """Close all connections."""
        await self._kept.aclose()
        await self._new.aclose()


def open_transport() -> httpx.AsyncBaseTransport:
    """The way to real engines."""
    return EngineTransport()


@lru_cache(maxsize=1024)
def url_of(base: str, path: str) -> httpx.URL:
    """A path of a backend. Parsing it anew would take a tenth of a short request's time."""
    return httpx.URL(base + path)


class EngineClient:
    """Sends requests to backends over one transport."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(
        self, url: str, path: str, body: bytes, *, stream: bool, api_key: str | None, job: str,
        priority: int | None = None, host: str | None = None,
    ) -> Answer:  # fmt: skip
        """POST a body. Returns at the response's head; raises Refused or Broken.

        `host`: the name and port to ask for, where `url` has one of its addresses.

        `priority`: for engines that order their own queue by it (vLLM takes it from a header on
        all paths, and that one over the body's).
        """
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream" if stream else "application/json",
            "accept-encoding": "identity",
            "user-agent": "fairlane",
            "x-request-id": job,
            "content-length": str(len(body)),
        }
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        if priority is not None:
            headers["x-vllm-priority"] = str(priority)
        extensions: dict[str, Any] = {"timeout": {"connect": CONNECT_S}}
        name_host(host, headers, extensions)
        content = body if len(body) <= PIECE_BYTES else _Pieces(body)
        try:
            request = httpx.Request(
                "POST", url_of(url, path), headers=headers, extensions=extensions, content=content
            )
            response = await self._transport.handle_async_request(request)
        except (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, OSError, UnicodeError) as e:
            if _nothing_sent(e):
                raise Refused("the engine refuses the connection") from None
            raise Broken("the engine closed the connection without an answer") from None
        passed = [(n, v) for n, v in response.headers.items() if n in _PASSED_ON]
        content_type = response.headers.get("content-type", "")
        # 600 and above are no statuses, and servers of HTTP refuse to send them.
        status = response.status_code if response.status_code < 600 else 502
        return Answer(status, content_type, passed, response)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


def name_host(host: str | None, headers: dict[str, str], extensions: dict[str, Any]) -> None:
    """Let a request to an address be one to the name and port in `host`, for TLS too."""
    if host is not None:
        headers["host"] = host
        extensions["sni_hostname"] = urlsplit(f"//{host}").hostname


def _closed(error: Exception) -> bool:
    """Whether the other end closed the connection, before any answer."""
    cause = error.__cause__ or error
    return isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | OSError)


class _Pieces(httpx.AsyncByteStream):
    """A large body on its way out; may be read again."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), PIECE_BYTES):
            yield self._body[at : at + PIECE_BYTES]


def _nothing_sent(error: Exception) -> bool:
    """Whether the connection was never made (aiohttp's transport maps several errors to one)."""
    cause = error.__cause__ or error
    if isinstance(cause, aiohttp.ClientError):
        return isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    never = httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol
    return isinstance(error, never | httpx.InvalidURL | UnicodeError)  # no name to look up
