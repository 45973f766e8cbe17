"""A dispatcher's own HTTP port: metrics and health, nothing else."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

Message = MutableMapping[str, Any]


class StatusApp:
    """`GET /metrics`, `/healthz` (the process), `/readyz` (it can serve)."""

    def __init__(self, registry: CollectorRegistry, ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._ready = ready

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        status, body = self._answer(scope["path"])
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": body})

    def _answer(self, path: str) -> tuple[int, bytes]:
        if path == "/metrics":
            return 200, generate_latest(self._registry)
        if path == "/healthz":
            return 200, b"ok\n"
        if path == "/readyz":
            return (200, b"ready\n") if self._ready() else (503, b"not ready\n")
        return 404, b"not found\n"
