"""Webhooks over real sockets: to whom they go, and to whom never."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from common.settings import GatewaySettings
from gateway.sender import HttpSender, NotSentError


class Receiver:
    """An HTTP server on the loopback that notes what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes, str]] = []
        self.status = 200
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.got.append((request.path, await request.read(), request.headers["webhook-id"]))
        if self.status == 302:
            raise web.HTTPFound(f"http://127.0.0.1:{self.port}/elsewhere")
        if self.status == 0:
            await asyncio.Event().wait()
        return web.Response(status=self.status, body=b"x" * 1_000_000)


@contextlib.asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    here = Receiver()
    app = web.Application()
    app.router.add_post("/{rest:.*}", here.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    here.port = runner.addresses[0][1]
    try:
        yield here
    finally:
        await runner.cleanup()


HEADERS = {"webhook-id": "msg_1"}


def settings(*, private: bool, timeout_s: float = 5.0) -> GatewaySettings:
    return GatewaySettings(webhook_private=private, webhook_timeout_s=timeout_s)


async def loopback(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


async def test_where_private_addresses_are_allowed() -> None:
    async with receiver() as here, HttpSender(settings(private=True), loopback) as sender:
        for host in ("127.0.0.1", "hooks.example"):
            url = f"http://{host}:{here.port}/hook?a=b"
            assert await sender.post(url, b"{}", HEADERS) == 200
        assert here.got == [("/hook", b"{}", "msg_1")] * 2
        here.status = 500
        assert await sender.post(f"http://127.0.0.1:{here.port}/", b"", HEADERS) == 500


async def test_a_redirect_is_not_followed() -> None:
    async with receiver() as here, HttpSender(settings(private=True)) as sender:
        here.status = 302
        assert await sender.post(f"http://127.0.0.1:{here.port}/a", b"{}", HEADERS) == 302
        assert [path for path, _, _ in here.got] == ["/a"]


async def test_never_to_a_private_address_whatever_its_name() -> None:
    answers = [["8.8.8.8"], ["127.0.0.1"]]

    async def rebinding(host: str, port: int) -> list[str]:
        """Public when it is first asked, and private from then on."""
        return answers.pop(0) if len(answers) > 1 else answers[0]

    await rebinding("hooks.example", 80)
    async with receiver() as here, HttpSender(settings(private=False), rebinding) as sender:
        for host in (
            "hooks.example", "127.0.0.1", "[::ffff:127.0.0.1]", "localhost", "127.1", "2130706433",
            "0x7f000001", "0177.0.0.1", "127.0.0.1.",
        ):  # fmt: skip
            with pytest.raises(NotSentError):
                await sender.post(f"http://{host}:{here.port}/", b"{}", HEADERS)
        assert here.got == []


async def test_names_are_looked_up_and_checked_by_default() -> None:
    async with receiver() as here, HttpSender(settings(private=False)) as sender:
        for host in ("127.1", "2130706433", "0x7f000001"):
            with pytest.raises(NotSentError):
                await sender.post(f"http://{host}:{here.port}/", b"{}", HEADERS)
        assert here.got == []


async def test_who_does_not_answer() -> None:
    limits = settings(private=True, timeout_s=0.3)
    async with receiver() as here, HttpSender(limits) as sender:
        here.status = 0
        url = f"http://127.0.0.1:{here.port}/"
        with pytest.raises(NotSentError, match="Timeout"):
            await sender.post(url, b"{}", HEADERS)
    async with HttpSender(limits) as sender:
        with pytest.raises(NotSentError):
            await sender.post(url, b"{}", HEADERS)
