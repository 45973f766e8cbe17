"""Gateways with their HTTP side in a world: real code from the request to the engine."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from common.settings import GatewaySettings, KeySettings
from gateway.sender import Sender
from gateway.server import Gateway
from tests.flow.world import Process, World
from tests.support.asgi import Exchange, ask
from tests.support.wait import wait_until

ALICE, BOB = "sk-alice-1", "sk-bob-12345"
CLASSES = ["standard", "interactive", "batch"]
KEYS = [
    KeySettings(secret=ALICE, user="alice", classes=CLASSES),  # type: ignore[arg-type]
    KeySettings(secret=BOB, user="bob"),
]


class Site:
    """One gateway replica."""

    def __init__(
        self, world: World, name: str, keys: list[KeySettings] | None = None,
        sender: Sender | None = None, **gateway: Any,
    ) -> None:  # fmt: skip
        self.settings = msgspec.structs.replace(
            world.settings, gateway=GatewaySettings(**gateway), keys=KEYS if keys is None else keys
        )
        self.process = Process(world.server, world.url)
        self.gateway = Gateway(self.settings, self.process.broker, name, sender=sender)
        self.app = self.gateway.app
        world.gateways.append((self.process, self.gateway.follower))

    async def start(self) -> "Site":
        """Until it serves."""
        self.process.start(self.process.broker.run(), self.gateway.run())
        await wait_until(lambda: not self.gateway.not_ready(), timeout=30, what="ready")
        return self

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str = ALICE,
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:  # fmt: skip
        """One request and its whole answer."""
        sent = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        return await ask(self.app, method, path, sent, headers=self._head(key, headers))

    def open(
        self, path: str, *, key: str = ALICE, headers: Mapping[str, str] | None = None,
        reads: bool = True,
    ) -> Exchange:  # fmt: skip
        """A stream, to be entered and read as it comes."""
        return Exchange(self.app, "GET", path, b"", self._head(key, headers), reads=reads)

    def _head(self, key: str, headers: Mapping[str, str] | None) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {key}"), *(headers or {}).items()]


def chat(output: int = 5, *, stream: bool = False, text: str = "hello") -> dict[str, Any]:
    """A chat request of so many tokens."""
    return {
        "model": "m1", "messages": [{"role": "user", "content": text}], "max_tokens": output,
        "ignore_eos": True, "stream": stream,
    }  # fmt: skip


def job(
    output: int = 5, *, stream: bool = False, text: str = "hello", **more: Any
) -> dict[str, Any]:
    """A job of that."""
    body = chat(output, stream=stream, text=text)
    return {"path": "/v1/chat/completions", "body": body, **more}


def events(stream: bytes) -> bytes:
    """A stream without its comments."""
    pieces = stream.split(b"\n\n")
    return b"\n\n".join(p for p in pieces if not p.startswith(b":"))
