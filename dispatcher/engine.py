"""The HTTP call to one engine: a request out, a stream of bytes in, errors in our own terms.

The transport is called directly, without httpx's client around it: that halves the cost of a
request. No time-out is set here; `dispatcher/runs.py` watches every run.
"""

from collections.abc import AsyncIterator

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


def open_transport() -> httpx.AsyncBaseTransport:
    """httpx over aiohttp's connections, several times as fast as httpx's own."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S)
    return httpx_aiohttp.AiohttpTransport(limits=limits, trust_env=False)


class EngineClient:
    """Sends requests to backends over one transport."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(
        self, url: str, path: str, body: bytes, *, stream: bool, api_key: str | None, job: str
    ) -> Answer:
        """POST a body. Returns at the response's head; raises Refused or Broken."""
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream" if stream else "application/json",
            "accept-encoding": "identity",
            "user-agent": "fairlane",
            "x-request-id": job,
        }
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        request = httpx.Request(
            "POST", url + path, headers=headers, content=body,
            extensions={"timeout": {"connect": CONNECT_S}},
        )  # fmt: skip
        try:
            response = await self._transport.handle_async_request(request)
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as e:
            if _nothing_sent(e):
                raise Refused("the engine refuses the connection") from None
            raise Broken("the engine closed the connection without an answer") from None
        passed = [(n, v) for n, v in response.headers.items() if n in _PASSED_ON]
        content_type = response.headers.get("content-type", "")
        return Answer(response.status_code, content_type, passed, response)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()


def _nothing_sent(error: Exception) -> bool:
    """Whether the connection was never made (aiohttp's transport maps several errors to one)."""
    cause = error.__cause__ or error
    if isinstance(cause, aiohttp.ClientError):
        return isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
