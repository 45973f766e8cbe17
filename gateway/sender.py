"""Sends webhooks over HTTP: to checked addresses alone, without following anybody elsewhere."""

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from types import TracebackType
from typing import Protocol, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from common import names
from common.names import Resolve
from common.settings import GatewaySettings
from gateway.webhook import check_url, public


class NotSentError(Exception):
    """A webhook got no answer; the text says of what kind the failure was, and no more."""


class Sender(Protocol):
    """How webhooks are sent; to be entered first."""

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """The status of the answer. Raises NotSentError."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class HttpSender:
    """Over the network."""

    def __init__(self, settings: GatewaySettings, resolve: Resolve | None = None) -> None:
        """`resolve`: a host's addresses, as the machine knows them where there is none."""
        self._settings = settings
        self._private = settings.webhook_private
        self._resolver = _Checked(resolve or names.resolve, self._private)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                force_close=True,
                limit=self._settings.webhooks_max,
            ),
            timeout=aiohttp.ClientTimeout(total=self._settings.webhook_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """As `Sender`. The URL is checked again: it may be older than the settings. A redirect is
        an answer like any other, and of an answer's body nothing is read."""
        assert self._session is not None
        try:
            check_url(url, self._private)
            target = URL(url)
            _check_literal(target.host or "", self._private)
            async with self._session.post(
                target, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return answer.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as e:
            raise NotSentError(type(e).__name__) from None


def _check_literal(host: str, private: bool) -> None:
    """Raises OSError for an address that is written in the URL, as aiohttp reads it, and may not be
    connected to: it is not looked up."""
    try:
        address = ip_address(host)
    except ValueError:
        return
    if not (private or public(address)):
        raise OSError("a webhook's address is not public")


class _Checked(AbstractResolver):
    """Looks names up, and gives the addresses that may be connected to: to these alone aiohttp then
    connects, whatever the name means a moment later."""

    def __init__(self, resolve: Resolve, private: bool) -> None:
        self._resolve = resolve
        self._private = private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found: list[ResolveResult] = []
        for text in await self._resolve(host, port):
            address = ip_address(text.partition("%")[0])
            if not (self._private or public(address)):
                raise OSError("the name of a webhook has an address that is not public")
            kind = socket.AF_INET if address.version == 4 else socket.AF_INET6
            found.append(
                ResolveResult(
                    hostname=host, host=text, port=port, family=kind, proto=0,
                    flags=socket.AI_NUMERICHOST,
                )
            )  # fmt: skip
        return found

    async def close(self) -> None:
        """It holds nothing."""
