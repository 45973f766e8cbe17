"""Names of machines, looked up as this machine does."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to its addresses. Raises OSError."""


async def resolve(host: str, port: int) -> list[str]:
    """A host's addresses, each once. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
