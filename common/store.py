"""The object store: a local directory, S3, Google Cloud Storage or Azure, through obstore.

An object is whole or absent: it appears at the end of its upload, by a rename or by the store's own
completion. Whoever is cancelled within a call waits for it to end, so that nothing happens after
it. All that is held in memory is one part of an upload beside the one that is sent, and one
block of a download.
"""

import asyncio
import contextlib
import heapq
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from common.config import state_folder
from common.errors import ConfigError, StoreError
from common.store_feed import Feed, pieces
from common.store_text import NO_BUCKET, error_text

PART_BYTES = 5 << 20
"""Of an upload in parts: the least that S3 takes."""
BLOCK_BYTES = 1 << 20
"""Read at once."""
LIST_MAX = 25_000
"""Most objects in one answer of `list`."""
LIST_CHUNK = 1_000
"""Of a listing, asked for at once."""
SMALL_BYTES_MAX = 1 << 20
"""Largest object that `get` takes."""
_CLEAN_S = 10.0
"""Who is cancelled waits at most so long for a call to end."""
_CALL_S = 30.0
"""A store that is silent for so long is not there."""
_SILENT = "the store does not answer"
_RETRY: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
_STAGED = re.compile(r".*#\d+\Z")
"""Names under which obstore keeps parts of a local upload; no listing shows them."""

T = TypeVar("T")


class TooLargeError(StoreError):
    """The object is none of those that `get` takes."""


class Found(msgspec.Struct, frozen=True):
    """One object of a listing."""

    path: str
    size: int
    """Bytes."""
    modified: float
    """Seconds since the epoch, by the store's clock."""


class Store:
    """Objects by path. Paths are the caller's own: segments of `[A-Za-z0-9._-]` with slashes
    between. Every method may raise StoreError."""

    def __init__(
        self, url: str | None = None, options: Mapping[str, str] | None = None, *, make: bool = True
    ) -> None:
        """As in StoreSettings. A local directory is made for the first object, with access for its
        owner alone; not `make`: one that is not there is a StoreError in every method. Raises
        ConfigError where these make no store."""
        self._store: Any = None
        self._make = make
        self._local = url is None or url.startswith("file:")
        self._url = url
        if url is None or self._local:
            return
        plain = any(v.startswith("http://") for v in (options or {}).values())
        client = {"timeout": "1h", "read_timeout": f"{_CALL_S:g}s", "connect_timeout": "5s"}
        how: Any = {
            "config": dict(options or {}), "retry_config": _RETRY,
            "client_options": client | ({"allow_http": True} if plain else {}),
        }  # fmt: skip
        try:
            self._store = from_url(url, **({} if url.startswith("memory:") else how))
        except (BaseError, ValueError) as e:
            raise ConfigError(f"the store cannot be used: {error_text(e)}") from None

    async def put(self, path: str, data: bytes) -> None:
        """Store an object, over any of that path."""
        await self._settled(obstore.put_async(self._opened(True), path, data, use_multipart=False))

    async def write(self, path: str, chunks: AsyncIterator[bytes]) -> int:
        """Store an object as its bytes come; its size. What `chunks` raises is raised, and then
        there is no object, nor where this is cancelled."""
        first: list[bytes] = []
        size = 0
        async with contextlib.aclosing(pieces(chunks)) as rest:
            async for piece in rest:
                first.append(piece)
                size += len(piece)
                if size >= PART_BYTES:
                    return await self._write_parts(path, first, rest)
        await self.put(path, b"".join(first))
        return size

    async def _write_parts(self, path: str, first: list[bytes], rest: AsyncIterator[bytes]) -> int:
        feed = Feed()
        work = obstore.put_async(
            self._opened(True), path, feed, chunk_size=PART_BYTES, max_concurrency=1
        )
        upload = asyncio.ensure_future(work)
        upload.add_done_callback(feed.over)
        size = 0
        try:
            while first:
                size += len(first[0])
                await feed.push(first.pop(0))
            async for piece in rest:
                size += len(piece)
                if not await feed.push(piece):
                    break
            await feed.push(None)
        except BaseException:
            feed.fail()
            await _ended(upload)
            raise
        await self._settled(upload)
        return size

    async def get(self, path: str) -> bytes | None:
        """A small object; None: there is none. Raises TooLargeError."""
        try:
            return await self._settled(_small(self._opened(), path), missing=True)
        except FileNotFoundError:
            return None

    async def size(self, path: str) -> int | None:
        """Bytes of an object; None: there is none."""
        try:
            meta = await self._settled(obstore.head_async(self._opened(), path), missing=True)
        except FileNotFoundError:
            await self.get(path)  # this answer has no text: it may be the bucket that is not there
            return None
        return int(meta["size"])

    async def read(self, path: str, start: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from `start` up to `end` of an object, in blocks. Raises StoreError where it
        is not there, or ends before `end`."""
        while start < end:
            stop = min(end, start + BLOCK_BYTES)
            try:
                found = await self._settled(
                    obstore.get_range_async(self._opened(), path, start=start, end=stop),
                    missing=True,
                )
            except FileNotFoundError:
                raise StoreError("an object is gone") from None
            block = bytes(found)
            if len(block) != stop - start:
                raise StoreError("an object is shorter than it was")
            yield block
            start = stop

    async def delete(self, path: str) -> bool:
        """Remove an object; False where it is known that there was none."""
        try:
            await self._settled(obstore.delete_async(self._opened(), path), missing=True)
        except FileNotFoundError:
            return False
        return True

    async def list(self, prefix: str, after: str = "", limit: int = LIST_MAX) -> list[Found]:
        """The first objects below `prefix` (whole segments) in the order of their paths, after
        the path `after`."""
        limit = min(limit, LIST_MAX)
        found: list[Found] = []
        try:
            stream = obstore.list(
                self._opened(), prefix, offset=after or None, chunk_size=LIST_CHUNK
            ).__aiter__()
            async with asyncio.timeout(_CALL_S):
                async for batch in stream:
                    found += (
                        Found(m["path"], m["size"], m["last_modified"].timestamp()) for m in batch
                    )
                    if len(found) >= limit:  # a directory is not read in order
                        found = heapq.nsmallest(limit, found, key=lambda f: f.path)
                        if not self._local:
                            break
        except FileNotFoundError:
            return []
        except TimeoutError:
            raise StoreError(_SILENT) from None
        except (BaseError, OSError) as e:
            raise StoreError(error_text(e)) from None
        return heapq.nsmallest(limit, found, key=lambda f: f.path)

    async def sweep_parts(self, older_than: float, limit: int = 1_000) -> int:
        """Remove what uploads left that ended with their process: of a local directory, parts last
        written before this time. Of others nothing: their own rules do that. How many."""
        if not self._local:
            return 0
        try:
            return await asyncio.to_thread(_remove_parts, self._folder(), older_than, limit)
        except OSError as e:
            raise StoreError(error_text(e)) from None

    def _folder(self) -> Path:
        try:
            return state_folder() / "store" if self._url is None else _path(self._url)
        except ConfigError as e:
            raise StoreError(str(e)) from None

    def _opened(self, make: bool = False) -> Any:
        """obstore's store. Raises FileNotFoundError where there is no directory, and this is not
        to make it. `make`: obstore would make it with access for everybody, where it was removed
        meanwhile too."""
        if self._store is not None and not (self._local and (make or not self._make)):
            return self._store
        folder = self._folder()
        try:
            there = folder.exists()
            if there and not folder.is_dir():
                raise StoreError(f"the store's directory is none: {folder}")
            if not self._make and not there:
                raise StoreError(f"the store's directory is not there: {folder}")
            if make and self._make:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif not there:
                raise FileNotFoundError
            if self._store is None:
                self._store = LocalStore(folder)
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as e:
            raise StoreError(error_text(e)) from None
        return self._store

    async def _settled(self, work: Awaitable[T], *, missing: bool = False) -> T:
        """Raises StoreError; with `missing` FileNotFoundError too, of an object in a bucket that is
        there. Who is cancelled here waits for the end."""
        call = asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(_CALL_S):
                return await asyncio.shield(call)
        except TimeoutError:
            call.cancel()
            raise StoreError(_SILENT) from None
        except (BaseError, OSError) as e:
            if missing and isinstance(e, FileNotFoundError) and not NO_BUCKET.search(str(e)):
                raise
            raise StoreError(error_text(e)) from None
        except asyncio.CancelledError:
            await _ended(call)
            raise


async def _small(store: Any, path: str) -> bytes:
    found = await obstore.get_async(store, path)
    if found.meta["size"] > SMALL_BYTES_MAX:
        raise TooLargeError("an object is larger than it may be")
    return bytes(await found.bytes_async())


async def _ended(call: asyncio.Future[Any]) -> None:
    await asyncio.wait((call,), timeout=_CLEAN_S)
    if not call.done():
        call.cancel()
    elif not call.cancelled():
        call.exception()  # looked at: who is cancelled has no use for it


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _remove_parts(folder: Path, older_than: float, limit: int) -> int:
    removed = 0
    for path in folder.rglob("*#*"):
        if removed >= limit:
            break
        if _STAGED.match(path.name) and path.is_file() and path.stat().st_mtime < older_than:
            path.unlink(missing_ok=True)
            removed += 1
    return removed
