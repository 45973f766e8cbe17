"""An object store in a dict, for tests in virtual time: no thread, and no time passes."""

import asyncio
from collections.abc import AsyncIterator

from common.errors import StoreError
from common.store import LIST_MAX, Found, Store


class MemoryStore(Store):
    """What several processes of a world share."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__("memory:///")
        self.objects = objects

    async def put(self, path: str, data: bytes) -> None:
        await asyncio.sleep(0)
        self.objects[path] = data

    async def write(self, path: str, chunks: AsyncIterator[bytes]) -> int:
        data = b"".join([c async for c in chunks])
        await self.put(path, data)
        return len(data)

    async def get(self, path: str) -> bytes | None:
        await asyncio.sleep(0)
        return self.objects.get(path)

    async def size(self, path: str) -> int | None:
        data = await self.get(path)
        return None if data is None else len(data)

    async def read(self, path: str, start: int, end: int) -> AsyncIterator[bytes]:
        data = await self.get(path)
        if data is None or len(data) < end:
            raise StoreError("an object is gone")
        if start < end:
            yield data[start:end]

    async def delete(self, path: str) -> bool:
        await asyncio.sleep(0)
        return self.objects.pop(path, None) is not None

    async def list(self, prefix: str, after: str = "", limit: int = LIST_MAX) -> list[Found]:
        await asyncio.sleep(0)
        names = sorted(n for n in self.objects if n.startswith(prefix + "/") and n > after)
        return [Found(n, len(self.objects[n]), 0.0) for n in names[:limit]]

    async def sweep_parts(self, older_than: float, limit: int = 1_000) -> int:
        return 0
