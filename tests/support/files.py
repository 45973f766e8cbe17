"""Forms that upload files, and a gateway that keeps them in a folder of the test's."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai

from common.key_settings import KeySettings
from common.service import bind, running, serve_asgi
from common.settings import GatewaySettings, Settings
from common.store_settings import StoreSettings
from tests.support.asgi import Exchange, ask
from tests.support.gateway import Site, site

BOUNDARY = "a-boundary-of-the-tests"
FORM = ("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
ALICE, BOB = "sk-test-alice", "sk-test-bob00"


def settings(folder: Path, gateway: GatewaySettings | None = None, **store: Any) -> Settings:
    """Two users, and a store in this folder."""
    return Settings(
        gateway=gateway or GatewaySettings(),
        keys=[KeySettings(secret=ALICE, user="alice"), KeySettings(secret=BOB, user="bob")],
        store=StoreSettings(**{"url": f"file://{folder}", **store}),
    )


@asynccontextmanager
async def keeping(folder: Path, **store: Any) -> AsyncIterator[Site]:
    """A gateway whose files are in this folder."""
    async with site(settings(folder, **store)) as s:
        yield s


def bearer(key: str) -> tuple[str, str]:
    """The header of a key."""
    return ("Authorization", f"Bearer {key}")


def form(content: bytes = b"hello\n", filename: str | bytes = "in.jsonl", **fields: str) -> bytes:
    """A form whose fields come first, as the official client's do."""
    return b"".join([*_fields(fields), file_part(content, filename), _end()])


def file_part(content: bytes, filename: str | bytes = "in.jsonl") -> bytes:
    """The part that is the file."""
    name = filename if isinstance(filename, bytes) else filename.encode()
    head = b'Content-Disposition: form-data; name="file"; filename="%s"' % name
    return b"--%s\r\n%s\r\n\r\n%s\r\n" % (BOUNDARY.encode(), head, content)


def field_part(name: str, value: str) -> bytes:
    """A part that is a field."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    return head.encode()


def _fields(fields: dict[str, str]) -> Iterator[bytes]:
    for name, value in ({"purpose": "batch"} | fields).items():
        yield field_part(name, value)


def _end() -> bytes:
    return f"--{BOUNDARY}--\r\n".encode()


async def upload(
    app: Any, key: str = ALICE, body: bytes | Sequence[bytes] | None = None
) -> Exchange:
    """The answer to an upload."""
    sent = form() if body is None else body
    async with Exchange(app, "POST", "/v1/files", sent, [bearer(key), FORM]) as e:
        return await e.until_over()


async def get(app: Any, path: str, key: str = ALICE, method: str = "GET") -> Exchange:
    """The answer to a request without a body."""
    return await ask(app, method, path, headers=[bearer(key)])


def kept(folder: Path) -> list[Path]:
    """All files below, hidden ones and unfinished uploads too."""
    return sorted(p for p in folder.rglob("*") if p.is_file())


@asynccontextmanager
async def official(app: Any, key: str = ALICE) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of the app, over a socket."""
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with (
        running(serve_asgi(app, listener)),
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client


def error(e: Exchange) -> Any:
    """The inside of an error."""
    return msgspec.json.decode(e.body)["error"]
