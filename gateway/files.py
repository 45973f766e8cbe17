"""The files that users keep: their content and what is known of them, both in the object store.

A file is there once its record is, which is written last; content without one is of an upload that
was cut off, and swept. Everything of an owner is below one folder, whose name no name can choose:
other owners' files are not looked at, so they cannot be found. Nothing is kept in a process.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Literal

import msgspec

from common.clock import wall
from common.errors import StoreError
from common.store import Found, Store, TooLargeError
from common.store_settings import StoreSettings

log = logging.getLogger("fairlane.gateway")

PAGE_MAX = 1_000
"""Most files of a page."""
ORPHAN_S = 86_400.0
"""Content without a record is removed after so long: no upload takes longer."""
SWEEP_MAX = 1_000
"""Most objects looked at in one sweep."""
_ROOT = "files"
_ID = re.compile(r"file-[0-9a-f]{44}\Z")
_RECORD = ".json"
_AT_ONCE = 32
"""Records read at once."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file."""

    id: str
    owner: str
    """A user as `keys.path` names them; for people who look into the store."""
    bytes: int
    created_at: int
    """Seconds since the epoch, as `expires_at`."""
    filename: str
    """As it was given: nothing is ever opened by it."""
    purpose: str
    expires_at: int | None = None

    def live(self, now: float) -> bool:
        """Whether it is still there for its owner."""
        return self.expires_at is None or now < self.expires_at


class Page(msgspec.Struct, frozen=True):
    """Some of an owner's files."""

    files: list[FileRecord]
    more: bool
    """Whether others come after them."""


class QuotaError(Exception):
    """An owner's files are too many, or too large together; the text says which, and the limit."""


class Upload:
    """A file that is being stored; it is one once `commit` has returned."""

    def __init__(self, store: Store, owner: str, now: float, quota: "_Quota | None") -> None:
        self._store = store
        self._owner = owner
        self._created = now
        self._quota = quota
        self.id = new_id(now)
        self.size = 0
        self.committed = False

    async def take(self, chunks: AsyncIterator[bytes]) -> int:
        """Store the content; its size. What `chunks` raises is raised. Raises StoreError;
        QuotaError as soon as the content is too much."""
        if self._quota is not None:
            chunks = self._quota.bounded(chunks)
        self.size = await self._store.write(content_path(self._owner, self.id), chunks)
        return self.size

    async def commit(
        self, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> FileRecord:
        """Make it a file. Raises QuotaError where it is too much, with what came meanwhile by
        whichever replica; StoreError."""
        if self._quota is not None:
            await self._quota.check()
        created = int(self._created)
        record = FileRecord(
            id=self.id, owner=self._owner, bytes=self.size, created_at=created, filename=filename,
            purpose=purpose,
            expires_at=None if expires_after_s is None else created + expires_after_s,
        )  # fmt: skip
        await self._store.put(record_path(self._owner, self.id), msgspec.json.encode(record))
        self.committed = True
        return record


class Files:
    """All owners' files. `owner` is a user as `keys.path` names them. Methods raise StoreError."""

    def __init__(
        self, store: Store, settings: StoreSettings, now: Callable[[], float] = wall
    ) -> None:
        """`now`: seconds since the epoch; lifetimes are of hours and days."""
        self._store = store
        self._settings = settings
        self._now = now
        self._swept = ""
        """The path after which the next sweep goes on."""

    @contextlib.asynccontextmanager
    async def uploading(self, owner: str, *, limited: bool = True) -> AsyncGenerator[Upload, None]:
        """A new file; a block that ends without its commit leaves nothing. Raises QuotaError where
        there is no room for one more; not `limited`: there always is, as for results."""
        quota = _Quota(self._store, self._settings, owner) if limited else None
        if quota is not None:
            await quota.check()
        upload = Upload(self._store, owner, self._now(), quota)
        try:
            yield upload
        finally:
            if not upload.committed:
                with contextlib.suppress(StoreError):  # swept later
                    await self._remove(owner, upload.id)

    async def find(self, owner: str, id: str) -> FileRecord | None:
        """A file of the owner's; None where it is unknown, expired, or another's."""
        if not _ID.match(id):
            return None
        record = await self._record(record_path(owner, id))
        if record is None or record.live(self._now()):
            return record
        await self._remove(owner, id)
        return None

    def read(
        self, record: FileRecord, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """A file's content, or the bytes from `start` up to `end`, in blocks."""
        stop = record.bytes if end is None else min(end, record.bytes)
        return self._store.read(content_path(record.owner, record.id), start, stop)

    async def whole(self, record: FileRecord) -> bool:
        """Whether a file's content is there, as long as it was: somebody else, such as a rule of
        the bucket, may have removed it and left the record."""
        return await self._store.size(content_path(record.owner, record.id)) == record.bytes

    async def delete(self, owner: str, id: str) -> bool:
        """Remove a file; False: there was none."""
        if await self.find(owner, id) is None:
            return False
        await self._remove(owner, id)
        return True

    async def page(
        self,
        owner: str,
        *,
        after: str = "",
        limit: int = PAGE_MAX,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Page:
        """At most PAGE_MAX of an owner's files by the time of their making, behind the one whose
        id is `after`. Expired ones that are come upon are removed."""
        limit = min(limit, PAGE_MAX)
        names = sorted(_record_names(await self._store.list(_folder(owner))))
        if order == "desc":
            names.reverse()
        if after:
            names = [n for n in names if (n > after if order == "asc" else n < after)]
        files: list[FileRecord] = []
        expired: list[str] = []
        for start in range(0, len(names), _AT_ONCE):
            paths = [record_path(owner, n) for n in names[start : start + _AT_ONCE]]
            live, dead = await self._sorted(paths)
            files += (r for r in live if purpose is None or r.purpose == purpose)
            expired += dead
            if len(files) > limit:
                break
        await self._discard(expired[:_AT_ONCE])
        return Page(files[:limit], len(files) > limit)

    async def sweep(self) -> int:
        """Look at the next SWEEP_MAX objects of all owners, and remove files that have expired and
        what uploads left that were cut off; how many. After the last it begins again."""
        found = await self._store.list(_ROOT, self._swept, SWEEP_MAX)
        self._swept = found[-1].path if len(found) >= SWEEP_MAX else ""
        now = self._now()
        removed = await self._store.sweep_parts(now - ORPHAN_S)
        records = [f.path for f in found if f.path.endswith(_RECORD)]
        for start in range(0, len(records), _AT_ONCE):
            _, expired = await self._sorted(records[start : start + _AT_ONCE])
            await self._discard(expired)
            removed += len(expired)
        for f in found:
            old = f.modified < now - ORPHAN_S
            if old and not f.path.endswith(_RECORD) and await self._orphan(f.path):
                removed += await self._store.delete(f.path)
        return removed

    async def _orphan(self, path: str) -> bool:
        return await self._store.size(path + _RECORD) is None

    async def _sorted(self, paths: Sequence[str]) -> tuple[list[FileRecord], list[str]]:
        """The records at these paths that are live, in order, and the paths of those that have
        expired."""
        now = self._now()
        found = list(zip(paths, await asyncio.gather(*map(self._record, paths)), strict=True))
        live = [r for _, r in found if r is not None and r.live(now)]
        return live, [p for p, r in found if r is not None and not r.live(now)]

    async def _discard(self, paths: Sequence[str]) -> None:
        for path in paths:
            await self._store.delete(path)
            await self._store.delete(path.removesuffix(_RECORD))

    async def _record(self, path: str) -> FileRecord | None:
        try:
            data = await self._store.get(path)
            return None if data is None else msgspec.json.decode(data, type=FileRecord)
        except (TooLargeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            log.warning("the store has a record that is none: %s", path)
            return None

    async def _remove(self, owner: str, id: str) -> None:
        await self._discard([record_path(owner, id)])


class _Quota:
    """What one owner may have."""

    def __init__(self, store: Store, settings: StoreSettings, owner: str) -> None:
        self._store = store
        self._settings = settings
        self._owner = owner
        self._room = 0

    async def check(self) -> None:
        """Look at all there is of the owner's, with what is not committed yet. Raises QuotaError
        where it is too much; StoreError."""
        settings = self._settings
        found = await self._store.list(_folder(self._owner))
        files = len(_record_names(found))
        if files >= settings.user_files_max:
            most = settings.user_files_max
            raise QuotaError(f"You have {files} files, and may have {most}: delete some first.")
        used = sum(f.size for f in found if not f.path.endswith(_RECORD))
        self._room = settings.user_files_max_bytes - used
        if self._room < 0:
            raise self._full()

    async def bounded(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same chunks, while there was room for them at the last check. Raises QuotaError."""
        left = self._room
        async for chunk in chunks:
            left -= len(chunk)
            if left < 0:
                raise self._full()
            yield chunk

    def _full(self) -> QuotaError:
        most = self._settings.user_files_max_bytes
        return QuotaError(f"Your files may have {most} bytes together: delete some first.")


def new_id(now: float) -> str:
    """The time comes first, so that names are in the order of their making; 128 random bits."""
    return f"file-{int(now * 1000):012x}{secrets.token_hex(16)}"


def content_path(owner: str, id: str) -> str:
    """Where a file's bytes are. `id` is one that was made here."""
    return f"{_folder(owner)}/{id}"


def record_path(owner: str, id: str) -> str:
    """Where what is known of it is."""
    return content_path(owner, id) + _RECORD


def _folder(owner: str) -> str:
    """A digest, for file systems differ in which names they take and which are the same."""
    return f"{_ROOT}/{hashlib.sha256(owner.encode()).hexdigest()[:32]}"


def _record_names(found: Iterable[Found]) -> list[str]:
    names = (f.path.rpartition("/")[2] for f in found if f.path.endswith(_RECORD))
    return [n.removesuffix(_RECORD) for n in names]
