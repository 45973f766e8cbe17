"""The case player's fake engine, and what it can answer beside the scripts of the cases."""

import asyncio
import importlib.util
import json
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.redis_server import free_port

CASES = Path(__file__).parent.parent / "cases"
HOST = "127.0.0.1"


def _load_player() -> types.ModuleType:
    """`tests/cases/_tools/play.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("play", CASES / "_tools" / "play.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


player = _load_player()


class Engine(player.Backend):  # type: ignore[misc,name-defined]
    """The player's fake engine, which can also be stopped, and knows what it still answers."""

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.answer: Callable[[Any, Reply], Awaitable[bool]] | None = None
        """Answers a POST, given its decoded body, instead of the script of a case; whether the
        connection is kept."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._posts: dict[asyncio.Task[Any], tuple[list[dict[str, Any]], int]] = {}

    @property
    def url(self) -> str:
        """Its address as a backend's setting."""
        return f"http://{HOST}:{self.port}"

    async def begin(self) -> None:
        """Listen on a free port."""
        self.port = free_port()
        await self.start(self.port)

    async def conn(self, rd: asyncio.StreamReader, wr: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await super().conn(rd, wr)
        except asyncio.CancelledError:
            return  # the server's own task: it is `end` that cancels it
        finally:
            self._tasks.discard(task)
            wr.close()

    async def post(self, *args: Any) -> bool:
        """One POST request; whether the connection is kept."""
        task = asyncio.current_task()
        assert task is not None
        self._posts[task] = (self.reqs, len(self.reqs))  # where `serve` will note the request
        try:
            return bool(await self.serve(*args))
        finally:
            del self._posts[task]

    async def serve(self, *args: Any) -> bool:
        """Answer one POST: (path, headers, body, reader, writer)."""
        if self.answer is None:
            return bool(await super().post(*args))
        record = {"body": args[2], "headers": args[1], "gone": None}
        self.reqs.append(record)
        try:
            return await self.answer(json.loads(args[2]), Reply(args[3], args[4]))
        finally:
            record["gone"] = 0.0

    def answering(self) -> int:
        """POST requests that are being answered and whose client has not hung up."""
        records = [reqs[n] for reqs, n in self._posts.values() if n < len(reqs)]
        return sum(1 for r in records if r["gone"] is None)

    async def hang_up(self) -> None:
        """Close all connections: the rest of a script is not for the next case."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close_port(self) -> None:
        """As vLLM does at SIGTERM: connections are neither taken nor kept, but for those of the
        requests that are being answered."""
        self.srv.close()
        for task in self._tasks - self._posts.keys():
            task.cancel()

    async def end(self) -> None:
        """Close everything."""
        self.srv.close()
        await self.hang_up()


class Reply:
    """What the fake engine sends, chunk by chunk."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def connection(self) -> int:
        """The other end's port: the same for requests on one connection."""
        return int(self._writer.get_extra_info("peername")[1])

    async def begin(self, content_type: str, status: int = 200) -> None:
        """Status and headers."""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\n"
        self._writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        """A chunk; none where there is no data."""
        if data:
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await self._writer.drain()

    async def until_gone(self) -> None:
        """Wait until the other end hangs up. Raises ConnectionError where it resets."""
        await self._reader.read(1)

    async def end(self) -> None:
        """The proper end of the body."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()


def chunk_event(content: str, finish: str | None = None) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m1",
             "choices": [choice]}  # fmt: skip
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
