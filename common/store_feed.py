"""How the bytes of an upload reach obstore, which reads them in a task of its own."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

PIECE_BYTES = 1 << 20
"""Handed over at once: the threads' hand-over costs about as much as copying so many bytes."""


class Aborted(Exception):
    """Ends an upload without an object."""


class Feed:
    """Hands pieces over, one at a time. It always has an end for its reader, whom nobody else
    could end."""

    def __init__(self) -> None:
        self._piece: bytes | None = None
        self._failed = False
        self._over = False
        self._there = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def push(self, piece: bytes | None) -> bool:
        """The next piece, once the one before is taken; None: the end. False: the upload has ended
        already."""
        await self._room.wait()
        if self._over:
            return False
        self._piece = piece
        self._room.clear()
        self._there.set()
        return True

    def fail(self) -> None:
        """Let the upload end without an object."""
        self._failed = True
        self._there.set()

    def over(self, _: object) -> None:
        """The upload has ended, however it did: nobody waits for room any more."""
        self._over = True
        self._room.set()

    def __aiter__(self) -> "Feed":
        return self

    async def __anext__(self) -> bytes:
        await self._there.wait()
        if self._failed:
            raise Aborted
        if self._piece is None:
            raise StopAsyncIteration
        piece, self._piece = self._piece, None
        self._there.clear()
        self._room.set()
        return piece


async def pieces(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces of PIECE_BYTES or more, but for the last."""
    gathered: list[bytes] = []
    size = 0
    async for chunk in chunks:
        gathered.append(chunk)
        size += len(chunk)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if size:
        yield b"".join(gathered)
