"""An ASGI server of a few lines: one exchange at a time, driven by the test that reads it."""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec


class Exchange:
    """One request to an ASGI app and what comes of it, as it comes.

    `async with Exchange(app, "POST", path, body) as e:` runs the app beside the test. With
    `reads=False` the client takes nothing until `read_all` is called: every send blocks.
    """

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes | Sequence[bytes] = b"",
        headers: Iterable[tuple[str, str]] = (),
        *,
        client: str = "127.0.0.1",
        reads: bool = True,
        stalls: bool = False,
    ) -> None:
        chunks = [body] if isinstance(body, bytes) else list(body)
        sent = [(k.lower().encode(), v.encode("latin-1")) for k, v in headers]
        if isinstance(body, bytes) and body:
            sent.append((b"content-length", str(len(body)).encode()))
        elif not isinstance(body, bytes):
            sent.append((b"transfer-encoding", b"chunked"))
        path, _, query = path.partition("?")
        self._scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": sent, "client": (client, 1), "root_path": "",
            "scheme": "http", "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        self._app = app
        self._chunks = chunks
        self._stalls = stalls
        self._gone = asyncio.Event()
        self._changed = asyncio.Condition()
        self._reading = asyncio.Event()
        if reads:
            self._reading.set()
        self._task: asyncio.Task[None] | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        """(time on the loop's clock, bytes) of each send."""
        self.complete = False
        """Whether the app sent the last part of the body."""
        self.received = 0
        """Parts of the request's body that the app asked for."""
        self.received_before = 0
        """Of these, before it sent its status."""

    @property
    def body(self) -> bytes:
        """All bytes so far."""
        return b"".join(data for _, data in self.pieces)

    @property
    def json(self) -> Any:
        """The body so far, as JSON."""
        return msgspec.json.decode(self.body)

    @property
    def over(self) -> bool:
        """Whether the app has returned."""
        return self._task is not None and self._task.done()

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self.leave()
        self._reading.set()
        async with asyncio.timeout(60):
            await self._task

    def leave(self) -> None:
        """The client goes away."""
        self._gone.set()

    def read_all(self) -> None:
        """From now on the client takes what comes."""
        self._reading.set()

    async def until_over(self, seconds: float = 60.0) -> Self:
        """Wait for the app to return; raises what it raised."""
        assert self._task is not None
        async with asyncio.timeout(seconds):
            await asyncio.shield(self._task)
        return self

    async def until(self, text: bytes, seconds: float = 60.0) -> Self:
        """Wait until the body holds this text."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: text in self.body)
        return self

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._chunks and not self._gone.is_set():
            self.received += 1
            chunk = self._chunks.pop(0)
            return {
                "type": "http.request",
                "body": chunk,
                "more_body": bool(self._chunks) or self._stalls,
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        reading = asyncio.ensure_future(self._reading.wait())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((reading, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            gone.cancel()
        if self._gone.is_set():
            return
        async with self._changed:
            if message["type"] == "http.response.start":
                assert self.status == 0, "a second status"
                self.status, self.received_before = message["status"], self.received
                for k, v in message["headers"]:
                    assert k.decode() not in self.headers, f"the header {k!r} twice"
                    self.headers[k.decode()] = v.decode("latin-1")
            else:
                assert self.status and not self.complete, "a body before a status or after its end"
                self.pieces.append((asyncio.get_running_loop().time(), message.get("body", b"")))
                self.complete = not message.get("more_body", False)
            self._changed.notify_all()


async def ask(app: Any, method: str, path: str, body: bytes = b"", **kwargs: Any) -> Exchange:
    """A whole exchange."""
    async with Exchange(app, method, path, body, **kwargs) as exchange:
        return await exchange.until_over()
