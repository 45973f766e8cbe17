"""The pages of engines: their bytes, within bounds of time and size, or why they cannot be read."""

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
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
PAGES_MAX = 32
"""Most pages of an engine that are shared: those asked for last. Keys may change."""


class Unreadable(FairlaneError):
    """A page could not be read; its text says why. `refused`: there was no connection."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class _Page:
    """One page of an engine, as it is told to one API key."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        """Held by who asks for it."""
        self.asked_at = -math.inf
        self.found: bytes | Unreadable = b""
        """What came last, where there are others to be told."""


class Pages:
    """What those share who read pages of the same engines, as the models of one engine do: each
    page is asked for once for all of them that have the same API key, and what is wrong is told
    once."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        """The transport stays the caller's."""
        self._transport = transport
        self._readers: Counter[str] = Counter()
        self._pages: defaultdict[str, dict[tuple[str, str | None], _Page]] = defaultdict(dict)
        """Of each engine that is read, by path and API key."""
        self._told: dict[tuple[str, str], float] = {}

    @contextlib.contextmanager
    def reading(self, url: str) -> Iterator[None]:
        """Be a reader of an engine's pages meanwhile."""
        self._readers[url] += 1
        try:
            yield
        finally:
            self._readers[url] -= 1
            if not self._readers[url]:
                del self._readers[url]
                self._pages.pop(url, None)

    async def read(
        self, backend: BackendSettings, host: str | None, path: str, since: float
    ) -> tuple[bytes, float]:
        """A page that was asked for after `since` by the loop's clock, by whichever reader, else
        now; and when that was. Others wait meanwhile, as an engine answers one at a time. Raises
        Unreadable, to all of them alike."""
        page = self._page(backend, path)
        async with page.lock:
            asked_at, found = page.asked_at, page.found
            if asked_at <= since:
                asked_at = asyncio.get_running_loop().time()
                page.asked_at, page.found = -math.inf, b""
                try:
                    found = await read_page(self._transport, backend, host, path)
                except Unreadable as e:
                    found = e
                if self._readers[backend.address] > 1:
                    page.asked_at, page.found = asked_at, found
        if isinstance(found, Unreadable):
            raise Unreadable(str(found), refused=found.refused)
        return found, asked_at

    def _page(self, backend: BackendSettings, path: str) -> _Page:
        pages, key = self._pages[backend.address], (path, backend.api_key)
        page = pages.pop(key, None) or _Page()
        while len(pages) >= PAGES_MAX:
            del pages[next(iter(pages))]
        pages[key] = page
        return page

    def tells(self, url: str, what: str, every_s: float) -> bool:
        """Whether this is to be told of an engine now: once in `every_s`, by whichever reader."""
        now = asyncio.get_running_loop().time()
        if now - self._told.get((url, what), -every_s) < every_s:
            return False
        self._told = {k: at for k, at in self._told.items() if now - at < every_s}
        self._told[url, what] = now
        return True


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
