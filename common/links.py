"""The two ways to a broker: one multiplexed connection to a real Redis, or one in this process.

`RedisLink` writes commands to one connection as they come and hands the replies out in order, so
a cancelled caller leaves no half-read reply behind: its reply is read and dropped. Commands given
within one turn of the event loop leave in one write. redis-py makes the connection (TLS, AUTH,
SELECT); its streams are then read with hiredis here, for its own per-command path costs several
times as much.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import fakeredis
import hiredis
import redis.asyncio
import redis.exceptions

from common.errors import BrokerDown, BrokerRefused, BrokerUncertain, ConfigError

log = logging.getLogger("fairlane.broker")

Argument = str | bytes | int | float
Reply = Any
"""bytes, int, None or a list of these, as Redis sent it."""
Message = tuple[bytes, bytes]
"""(channel, data)."""

_READ_BYTES = 1 << 16
_SUSPECT_S = 0.05


class Link(Protocol):
    """What the two have in common."""

    async def connect(self) -> None:
        """Make the connection. Raises BrokerDown."""

    async def serve(self) -> None:
        """Read replies until the connection is lost; then every waiting command fails."""

    async def execute(self, args: Sequence[Argument]) -> Reply:
        """Raises BrokerDown, BrokerUncertain or BrokerRefused."""

    def follow(self, channels: Sequence[str]) -> AsyncIterator[list[Message]]:
        """Messages as they come, on a connection of its own; an empty list once subscribed."""

    async def close(self) -> None:
        """Drop the connection."""


class RedisLink:
    """One multiplexed connection to a real Redis."""

    def __init__(self, url: str, *, timeout_s: float, pending_max: int = 10_000) -> None:
        try:
            self._pool = redis.asyncio.ConnectionPool.from_url(
                url, socket_connect_timeout=timeout_s, client_name="fairlane"
            )
        except ValueError as e:
            raise ConfigError(f"redis.url: {e}") from None
        self._timeout_s = timeout_s
        self._pending_max = pending_max
        self._pending: deque[tuple[asyncio.Future[Reply], float]] = deque()
        self._out: list[bytes] = []
        self._connection: Any = None
        self._flushing = False

    async def connect(self) -> None:
        self._connection = await self._dial()

    async def _dial(self) -> Any:
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as e:
            await connection.disconnect(nowait=True)
            raise BrokerDown(f"no connection to Redis: {e or 'timed out'}") from None
        return connection

    async def serve(self) -> None:
        reader, connection = hiredis.Reader(), self._connection
        stream = connection._reader
        self._watch(connection)
        try:
            while data := await stream.read(_READ_BYTES):
                if connection is not self._connection:
                    break  # closed meanwhile: nobody waits for what was still on its way
                reader.feed(data)
                while (reply := reader.gets()) is not False:
                    future, _ = self._pending.popleft()
                    if not future.done():
                        future.set_result(reply)
        except (OSError, hiredis.HiredisError) as e:
            log.debug("redis connection lost: %s", e)
        finally:
            await self.close()

    def _watch(self, connection: Any, suspect: object = None) -> None:
        """Cut the connection once the oldest command has waited too long for its reply.

        Found too old, it is looked at once more a little later: where this process was the one
        that stood still, its reply has come by then.
        """
        if connection is not self._connection:
            return
        loop = asyncio.get_running_loop()
        oldest = self._pending[0] if self._pending else None
        if oldest is None or loop.time() - oldest[1] <= self._timeout_s:
            loop.call_later(self._timeout_s / 4, self._watch, connection)
        elif oldest is suspect:
            connection._writer.transport.abort()
        else:
            loop.call_later(_SUSPECT_S, self._watch, connection, oldest)

    async def execute(self, args: Sequence[Argument]) -> Reply:
        if self._connection is None:
            raise BrokerDown("no connection to Redis")
        if len(self._pending) >= self._pending_max:
            raise BrokerDown("too many commands wait for Redis")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        self._out.append(hiredis.pack_command(tuple(args)))  # type: ignore[arg-type]
        self._pending.append((future, loop.time()))
        if not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        reply = await future
        if isinstance(reply, hiredis.ReplyError):
            text = str(reply)
            if "READONLY" in text:  # within a script's error it is not the first word
                await self.close()  # a demoted master: the next connection finds the new one
            raise BrokerRefused(text)
        return reply

    def _flush(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        if self._connection is None or not out:
            return
        writer = self._connection._writer
        if not writer.transport.is_closing():  # then `serve` is about to fail who waits
            writer.writelines(out)

    async def follow(self, channels: Sequence[str]) -> AsyncIterator[list[Message]]:
        connection = await self._dial()
        try:
            command = hiredis.pack_command(("SUBSCRIBE", *channels))  # type: ignore[arg-type]
            connection._writer.write(command)
            reader, stream, subscribed = hiredis.Reader(), connection._reader, 0
            while True:
                data = await stream.read(_READ_BYTES)
                if not data:
                    raise BrokerDown("Redis closed the subscription")
                reader.feed(data)
                messages: list[Message] = []
                while (reply := reader.gets()) is not False:
                    if reply[0] == b"message":
                        messages.append((reply[1], reply[2]))
                    elif reply[0] == b"subscribe":
                        subscribed += 1
                        if subscribed == len(channels):
                            yield []
                if messages:
                    yield messages
        except (OSError, hiredis.HiredisError) as e:
            raise BrokerDown(f"the subscription broke: {e}") from None
        finally:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        pending, self._pending = self._pending, deque()
        self._out.clear()
        for future, _ in pending:
            if not future.done():
                future.set_exception(BrokerUncertain("Redis did not answer"))
        if connection is not None:
            await connection.disconnect(nowait=True)


class EmbeddedLink:
    """A Redis inside this process (fakeredis): for trying and for tests, never for speed."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        self._server = server
        self._client: Any = None
        self._gone = asyncio.Event()

    async def connect(self) -> None:
        if not self._server.connected:
            raise BrokerDown("the embedded broker is off")
        self._gone.clear()
        self._client = fakeredis.FakeAsyncRedis(server=self._server)
        self._client.response_callbacks.clear()  # replies as Redis sends them

    async def serve(self) -> None:
        await self._gone.wait()

    async def execute(self, args: Sequence[Argument]) -> Reply:
        if self._client is None:
            raise BrokerDown("the embedded broker is off")
        try:
            return await self._client.execute_command(*args)
        except redis.exceptions.ResponseError as e:
            raise BrokerRefused(str(e)) from None
        except redis.exceptions.ConnectionError as e:
            await self.close()
            raise BrokerUncertain(str(e)) from None

    async def follow(self, channels: Sequence[str]) -> AsyncIterator[list[Message]]:
        client = fakeredis.FakeAsyncRedis(server=self._server)
        pubsub = client.pubsub()
        try:
            await pubsub.subscribe(*channels)
            subscribed = 0
            while True:
                message = await pubsub.parse_response(block=True)
                if message[0] == b"message":
                    yield [(message[1], message[2])]
                else:
                    subscribed += 1
                    if subscribed == len(channels):
                        yield []
        except redis.exceptions.ConnectionError as e:
            raise BrokerDown(str(e)) from None
        finally:
            # Closing alone leaves the channels subscribed in fakeredis.
            with contextlib.suppress(redis.exceptions.ConnectionError):
                await pubsub.unsubscribe()
            await pubsub.aclose()  # type: ignore[no-untyped-call]
            await client.aclose()

    async def close(self) -> None:
        client, self._client = self._client, None
        self._gone.set()
        if client is not None:
            await client.aclose()
