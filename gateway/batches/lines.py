"""The input file of a batch, line by line: where each line is, and what it asks for.

What validation found is kept in the store as an index, so that any line can be read alone: of a
file that holds 50,000 lines it takes 600 KB.
"""

import struct
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from common.batch_input import LINES_MAX
from common.errors import StoreError
from common.store import Store
from gateway.files import FileRecord, Files

_ENTRY = struct.Struct("<QI")
READ_BYTES = 1 << 20
"""Lines that lie side by side are read together, up to so many bytes."""
GAP_BYTES = 16 << 10
"""Bytes between two lines that are read along with them."""


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_lines = msgspec.json.Decoder(_Line)


class InputGoneError(Exception):
    """The input file is no more."""


class IndexGoneError(StoreError):
    """The store has no index of this batch."""


def index_path(hex: str) -> str:
    """Where the index of a batch is."""
    return f"batches/{hex}/index"


def part_path(hex: str, name: str) -> str:
    """Where a part of its results is."""
    return f"batches/{hex}/{name}"


class IndexMaker:
    """Gathers where lines are."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, offset: int, size: int) -> None:
        """The next line."""
        self._data += _ENTRY.pack(offset, size)

    def bytes(self) -> bytes:
        """The index."""
        return bytes(self._data)


class Index:
    """Where each line is."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return min(LINES_MAX, len(self._data) // _ENTRY.size)

    def place(self, line: int) -> tuple[int, int]:
        """(offset, size) of a line."""
        found: tuple[int, int] = _ENTRY.unpack_from(self._data, line * _ENTRY.size)
        return found

    def size(self, line: int) -> int:
        """Bytes of a line."""
        return self.place(line)[1]

    def groups(self, lines: Iterable[int]) -> list[list[int]]:
        """Lines, in rising order, that are read together."""
        out: list[list[int]] = []
        begin = end = 0
        for line in lines:
            offset, size = self.place(line)
            if out and offset - end <= GAP_BYTES and offset + size - begin <= READ_BYTES:
                out[-1].append(line)
            else:
                out.append([line])
                begin = offset
            end = offset + size
        return out


class Line:
    """One line of the file."""

    __slots__ = ("body", "custom_id", "number")

    def __init__(self, number: int, custom_id: str, body: bytes) -> None:
        self.number = number
        self.custom_id = custom_id
        self.body = body


class Input:
    """The lines of one batch. Methods raise StoreError; InputGoneError where the file is gone."""

    def __init__(self, files: Files, owner: str, id: str, index: Index) -> None:
        self._files = files
        self._owner = owner
        self._id = id
        self.index = index
        self._record: FileRecord | None = None

    async def read(self, lines: Sequence[int]) -> AsyncIterator[list[Line]]:
        """These lines, in rising order, some at a time."""
        for group in self.index.groups(lines):
            yield await self._group(group)

    async def _group(self, group: list[int]) -> list[Line]:
        begin = self.index.place(group[0])[0]
        last, size = self.index.place(group[-1])
        data = await self._bytes(begin, last + size)
        out = []
        for number in group:
            offset, size = self.index.place(number)
            line = _lines.decode(data[offset - begin : offset - begin + size])
            out.append(Line(number, line.custom_id, bytes(line.body)))
        return out

    async def _bytes(self, begin: int, end: int) -> bytes:
        record = await self._found()
        try:
            blocks = [b async for b in self._files.read(record, begin, end)]
        except StoreError:
            self._record = None
            # Where the file, or its content alone, was deleted, that is what is wrong.
            if not await self._files.whole(await self._found()):
                raise InputGoneError from None
            raise
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def _found(self) -> FileRecord:
        if self._record is None:
            self._record = await self._files.find(self._owner, self._id)
            if self._record is None:
                raise InputGoneError
        return self._record


async def check_store(store: Store, hex: str) -> None:
    """Whether what a batch has in the store is there at all: without its index, which stays until
    it is over, the store is another for a while, as a folder on which nothing is mounted. What is
    not found in it then is not gone, and what is written to it is not kept. Raises StoreError,
    IndexGoneError."""
    if await store.size(index_path(hex)) is None:
        raise IndexGoneError("a batch's index is not in the store")


async def load_index(store: Store, hex: str) -> Index:
    """Raises StoreError, IndexGoneError."""
    data = await store.get(index_path(hex))
    if data is None:
        raise IndexGoneError("a batch's index is not in the store")
    return Index(data)
