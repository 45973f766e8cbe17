"""`/v1/files`: OpenAI's Files API over the object store.

Bytes are never gathered: an upload goes to the store as it comes, a download as its client takes
it. How many of both may be open is limited, for each holds a few MiB.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from urllib.parse import quote

from common.errors import StoreError
from common.intake.answers import (
    RETRY_S_MIN,
    Answer,
    Headers,
    Refusal,
    bad_request,
    unavailable,
)
from gateway.auth import Keys, own_path
from gateway.client import Client
from gateway.files import FileRecord, Files, QuotaError
from gateway.files_form import LISTED, Form, check_purpose
from gateway.pages import json_page, listed
from gateway.query import header, limit, order, query

log = logging.getLogger("fairlane.gateway")

TRANSFERS_MAX = 16
"""Uploads and downloads open at once. An upload holds at most three parts of the store."""
USER_TRANSFERS_MAX = 4
"""Of one user."""
UPLOAD_S = 3_600.0
"""An upload may take so long."""
BATCH_EXPIRES_S = 30 * 86_400
"""Files of purpose `batch` expire after so long where their upload does not say, as OpenAI's do."""
SWEEP_S = 600.0
_FORM_BYTES_MAX = 1 << 20
"""What a form may have beside its file."""
_LIMIT_MAX = 10_000
_NAME_CHARS_MAX = 200
"""A longer name is not repeated in a header of its download."""

NO_FILE = Answer(status=404, message="No such File object.", param="id")
"""The same for one that never was and for another's."""
_BUSY = Answer(
    status=429,
    message=f"You have {USER_TRANSFERS_MAX} uploads and downloads of files open.",
    type="rate_limit_error",
    code="too_many_transfers",
    retry_after_s=RETRY_S_MIN,
)
_NO_STORE = "Files cannot be reached just now. Try again later."
_RETRY_S = 10


class FilesApi:
    """Its handlers. They raise Refusal and ClientGone."""

    def __init__(self, keys: Keys, files: Files, file_bytes_max: int) -> None:
        self._keys = keys
        self._files = files
        self._most = file_bytes_max
        self._open: Counter[str] = Counter()
        """Transfers by owner."""
        self._ends: set[asyncio.Timeout] = set()
        """What ends each of them."""

    async def collection(self, client: Client) -> None:
        """`/v1/files`: list or upload."""
        owner = self._owner(client)
        with _store_errors(client):
            if client.method == "POST":
                await self._upload(client, owner)
            else:
                await self._list(client, owner)

    async def item(self, client: Client) -> None:
        """`/v1/files/{id}`: look or delete."""
        owner, id = self._owner(client), _id(client)
        with _store_errors(client):
            if client.method == "DELETE":
                if not await self._files.delete(owner, id):
                    raise Refusal(NO_FILE)
                await json_page(client, {"id": id, "object": "file", "deleted": True})
            else:
                await json_page(client, shown(await self._found(owner, id)))

    async def content(self, client: Client) -> None:
        """`/v1/files/{id}/content`: download."""
        owner, id = self._owner(client), _id(client)
        with _store_errors(client):
            async with self._transfer(client, owner):
                await self._download(client, owner, id)

    def shut_down(self) -> None:
        """End the transfers that are open."""
        for end in self._ends:
            end.reschedule(asyncio.get_running_loop().time())

    async def sweep(self) -> None:
        """Remove what has expired or was left behind, now and then, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                removed = await self._files.sweep()
            except StoreError as e:
                log.warning("cannot sweep files: %s", e)
            else:
                log.debug("swept %d files", removed)

    async def _download(self, client: Client, owner: str, id: str) -> None:
        record = await self._found(owner, id)
        await client.start(200, _content_head(record))
        if client.method == "HEAD" or not record.bytes:
            await client.write(b"", False)
            return
        client.watch(lambda: None)
        try:
            await self._send(client, record)
        finally:
            await client.unwatch()

    async def _send(self, client: Client, record: FileRecord) -> None:
        sent = 0
        async with contextlib.aclosing(self._files.read(record)) as blocks:  # type: ignore[type-var]
            async for block in blocks:
                if client.gone:
                    return
                sent += len(block)
                await client.write(block, sent < record.bytes)

    async def _upload(self, client: Client, owner: str) -> None:
        form = Form(header(client, b"content-type"), self._most)
        parts = client.parts(self._most + _FORM_BYTES_MAX, UPLOAD_S)
        try:
            async with self._transfer(client, owner), self._files.uploading(owner) as upload:
                await upload.take(_file_bytes(form, parts))
                asked = form.finish()
                expires = asked.expires_after_s
                if expires is None and asked.purpose == "batch":
                    expires = BATCH_EXPIRES_S
                record = await upload.commit(asked.filename, asked.purpose, expires)
        except QuotaError as e:
            raise bad_request(str(e), "file", "storage_limit_exceeded") from None
        await json_page(client, shown(record))

    async def _list(self, client: Client, owner: str) -> None:
        asked = query(client)
        purpose = asked.get("purpose")
        if purpose is not None:
            check_purpose(purpose, LISTED)
        found = await self._files.page(
            owner,
            after=asked.get("after", ""),
            limit=limit(asked, _LIMIT_MAX, _LIMIT_MAX),
            order=order(asked),
            purpose=purpose,
        )
        data = [shown(f) for f in found.files]
        await json_page(client, listed(data, found.more))

    def _owner(self, client: Client) -> str:
        principal = self._keys.principal(client.authorization)
        return own_path(principal, client.headers, client.authorization, client.peer)

    async def _found(self, owner: str, id: str) -> FileRecord:
        record = await self._files.find(owner, id)
        if record is None:
            raise Refusal(NO_FILE)
        return record

    @contextlib.asynccontextmanager
    async def _transfer(self, client: Client, owner: str) -> AsyncGenerator[None, None]:
        if self._open[owner] >= USER_TRANSFERS_MAX:
            raise Refusal(_BUSY)
        if self._open.total() >= TRANSFERS_MAX:
            raise Refusal(unavailable(RETRY_S_MIN))
        self._open[owner] += 1
        end = asyncio.timeout(None)
        try:
            async with end:
                self._ends.add(end)
                yield
        except TimeoutError:
            if not end.expired():
                raise
            if not client.started:  # else the answer stays incomplete
                raise Refusal(unavailable(RETRY_S_MIN, close=True)) from None
        finally:
            self._ends.discard(end)
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]


def shown(record: FileRecord) -> dict[str, str | int | None]:
    """A file as OpenAI's API shows it."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


@contextlib.contextmanager
def _store_errors(client: Client) -> Iterator[None]:
    """A store that fails is a 503; once the status is sent, an answer that stays incomplete."""
    try:
        yield
    except StoreError as e:
        log.warning("the store of files: %s", e)
        if not client.started:
            raise Refusal(unavailable(_RETRY_S, _NO_STORE)) from None


async def _file_bytes(form: Form, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for part in parts:
        for data in form.feed(part):
            yield data


def _id(client: Client) -> str:
    id: str = client.scope["path_params"]["id"]
    return id


def _content_head(record: FileRecord) -> Headers:
    disposition = "attachment"
    if record.filename.isprintable() and len(record.filename) <= _NAME_CHARS_MAX:
        disposition += f"; filename*=UTF-8''{quote(record.filename, safe='')}"
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", b"%d" % record.bytes),
        (b"content-disposition", disposition.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
    ]
