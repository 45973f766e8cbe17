"""One page of an engine: its bytes, within bounds of time and size, or why it cannot be read."""

import asyncio
from typing import Any

import aiohttp
import httpx

from common.errors import FairlaneError
from common.settings import BackendSettings
from dispatcher.engine import name_host, url_of

POLL_TIMEOUT_S = 2.0
CONNECT_S = 1.0
"""Shorter than the whole, so that a host that does not answer is known from a page that hangs."""
PAGE_BYTES_MAX = 2 << 20


class Unreadable(FairlaneError):
    """A page could not be read; its text says why. `refused`: there was no connection."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


async def read_page(
    transport: httpx.AsyncBaseTransport, backend: BackendSettings, host: str | None, path: str
) -> bytes:
    """A page of at most PAGE_BYTES_MAX within POLL_TIMEOUT_S. Raises Unreadable.

    `host`: the name and port to ask for, where the backend's url has one of its addresses.
    """
    headers = {"accept-encoding": "identity", "user-agent": "fairlane"}
    if backend.api_key is not None:
        headers["authorization"] = f"Bearer {backend.api_key}"
    extensions: dict[str, Any] = {"timeout": {"connect": CONNECT_S}}
    name_host(host, headers, extensions)
    try:
        url = url_of(backend.address, path)
        request = httpx.Request("GET", url, headers=headers, extensions=extensions)
        async with asyncio.timeout(POLL_TIMEOUT_S):
            return await _fetch(transport, request)
    except TimeoutError:
        raise Unreadable(f"no whole answer within {POLL_TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError, OSError, UnicodeError) as e:
        raise Unreadable(f"{type(e).__name__}: {e}", refused=_refused(e)) from None


async def _fetch(transport: httpx.AsyncBaseTransport, request: httpx.Request) -> bytes:
    response = await transport.handle_async_request(request)
    try:
        if response.status_code != 200:
            raise Unreadable(f"status {response.status_code}")
        parts, size = [], 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > PAGE_BYTES_MAX:
                raise Unreadable(f"more than {PAGE_BYTES_MAX} bytes")
        return b"".join(parts)
    finally:
        await response.aclose()


def _refused(error: Exception) -> bool:
    """Whether there was no connection; aiohttp's transport calls a broken one a time-out too.
    Names that cannot be encoded for a lookup are UnicodeErrors."""
    broken = isinstance(error.__cause__, aiohttp.ServerDisconnectedError)
    never = httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL | UnicodeError
    return isinstance(error, never) and not broken
