"""Batches in Redis: who asked for what, how each stands, and who runs it.

Ownership: after `create` a batch is nobody's; whoever `take`s it may run it until its lease ends,
and its heir is then any other. What a runner has done is `commit`ted as a whole under its fencing
number, so one that lost its lease without noticing changes nothing.

Every method raises BrokerError. Times are of the Redis server's clock; `now_ms` 0 asks for it.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from common import keys
from common.batch_state import About, State, read_state
from common.broker import Broker

LEASE_MS = 8_000
"""A batch whose runner says nothing for so long is another's to run."""
OWN_MAX = 10_000
"""Most batches listed for a user: the newest."""
PARTS_PAGE = 1_000
SPARE_MS = 86_400_000
"""A batch that nobody runs any more expires this long after its window and time of keeping."""


class Held(msgspec.Struct, frozen=True):
    """What a verb says of the lease. `yours`: `fence`, `status` and `version` are of it."""

    word: Literal["yours", "done", "changed", "held", "over", "lost", "gone"]
    now_ms: int
    status: str = ""
    version: int = 0
    fence: int = 0


class Batches:
    """All batches. `keep_ms`: a batch stays so long after its end."""

    def __init__(self, broker: Broker, keep_ms: int) -> None:
        self._broker = broker
        self.keep_ms = keep_ms

    async def create(self, about: About) -> None:
        """Let a batch begin: afterwards any worker may take it. After BrokerUncertain it has begun,
        or there is nothing of it. May be repeated."""
        await self._broker.call(
            "batch_create", batch=keys.BATCH + about.id, own=keys.BATCHES_OF + about.owner,
            active=keys.BATCHES, id=about.id, member=f"{about.id}:{about.owner}",
            about=msgspec.msgpack.encode(about), created_ms=about.created_ms,
            keep_ms=about.window_ms + self.keep_ms + SPARE_MS, own_max=OWN_MAX,
        )  # fmt: skip

    async def find(self, id: str) -> tuple[About, State] | None:
        """A batch; None where there is none. Whose it is, is the caller's to check."""
        flat = await self._broker.command("HGETALL", keys.BATCH + id)
        if not flat:
            return None
        names = (name.decode() for name in flat[::2])
        fields = dict(zip(names, flat[1::2], strict=True))
        if "about" not in fields:
            return None
        return msgspec.msgpack.decode(fields["about"], type=About), read_state(fields)

    async def own(
        self, owner: str, after: str, limit: int
    ) -> tuple[list[tuple[About, State]], bool]:
        """At most `limit` of a user's batches, the newest first, behind the one whose id is
        `after`; whether more follow."""
        key, at = keys.BATCHES_OF + owner, 0
        if after:
            found = await self._broker.command("ZREVRANK", key, after)
            if found is None:
                return [], False
            at = int(found) + 1
        ids = await self._broker.command("ZREVRANGE", key, at, at + limit)
        batches = await asyncio.gather(*(self.find(i.decode()) for i in ids[:limit]))
        gone = [i for i, b in zip(ids, batches, strict=False) if b is None]
        if gone:
            await self._broker.command("ZREM", key, *gone)
        return [b for b in batches if b is not None], len(ids) > limit

    async def cancel(self, id: str) -> str:
        """Ask that it be given up; the status it has then, empty where there is none."""
        reply = await self._broker.call("batch_cancel", batch=keys.BATCH + id, now_ms=0)
        return reply.decode()  # type: ignore[no-any-return]

    async def active(self, most: int) -> list[tuple[str, str]]:
        """(batch, owner) of those that are not over, the oldest first."""
        found = await self._broker.command("ZRANGE", keys.BATCHES, 0, most - 1)
        pairs = (member.decode().partition(":") for member in found)
        return [(id, owner) for id, _, owner in pairs]

    async def idle(self, ids: Sequence[str], now_ms: int) -> list[tuple[str, int]]:
        """(batch, last fencing number) of those of them that nobody runs."""
        found = await asyncio.gather(
            *(self._broker.command("HMGET", keys.BATCH + i, "until", "fence") for i in ids)
        )
        return [
            (i, int(fence or 0))
            for i, (until, fence) in zip(ids, found, strict=True)
            if int(until or 0) <= now_ms
        ]

    async def take(
        self, op: Literal["take", "renew", "give"], id: str, owner: str, fence: int = 0,
        *, now_ms: int = 0,
    ) -> Held:  # fmt: skip
        """Take, renew or give up the right to run a batch."""
        reply = await self._broker.call(
            "batch_take", batch=keys.BATCH + id, now_ms=now_ms, op=op, owner=owner, fence=fence,
            lease_ms=LEASE_MS,
        )  # fmt: skip
        word, now = reply[0].decode(), int(reply[1])
        if word == "yours":
            return Held(word, now, reply[3].decode(), int(reply[4]), int(reply[2]))
        return Held(word, now, reply[2].decode() if len(reply) > 2 else "")

    async def commit(
        self,
        id: str,
        owner: str,
        fence: int,
        mark: str,
        *,
        expect: str = "",
        lines: Iterable[int] = (),
        parts: Sequence[str] = (),
        fields: Mapping[str, str | int | bytes] | None = None,
        keep_ms: int,
        now_ms: int = 0,
    ) -> Held:
        """Write down what its runner has done: `lines` whose results are in `parts`, and fields.

        May be repeated with the same `mark`. `changed`: its status is not `expect`, and nothing was
        written. `lost`: it is another's to run."""
        key, done = keys.BATCH + id, list(lines)
        given = fields or {}
        reply = await self._broker.call(
            "batch_commit", batch=key, done=key + ":done", parts=key + ":parts", now_ms=now_ms,
            owner=owner, fence=fence, lease_ms=LEASE_MS, mark=mark, expect=expect,
            keep_ms=keep_ms, lines=len(done), names=len(parts),
            items=[*done, *parts, *(v for pair in given.items() for v in pair)],
        )  # fmt: skip
        word, now = reply[0].decode(), int(reply[1])
        if len(reply) < 4:
            return Held(word, now)
        return Held(word, now, reply[2].decode(), int(reply[3]), fence)

    async def done(self, id: str) -> bytes:
        """The bitmap of lines whose results are in parts, as SETBIT makes it."""
        return await self._broker.command("GET", f"{keys.BATCH}{id}:done") or b""

    async def parts(self, id: str) -> list[str]:
        """The names of all parts, in the order of their commits."""
        names: list[str] = []
        while True:
            at = len(names)
            page = await self._broker.command(
                "LRANGE", f"{keys.BATCH}{id}:parts", at, at + PARTS_PAGE - 1
            )
            names += (n.decode() for n in page)
            if len(page) < PARTS_PAGE:
                return names

    async def gone(self, id: str, most: int) -> None:
        """There is nothing of it any more, as where no worker ran for as long as it is kept: it
        counts no more. Looked for among as many as may be under way."""
        for listed, owner in await self.active(most):
            if listed == id:
                await self._broker.command("ZREM", keys.BATCHES, f"{id}:{owner}")

    async def finished(self, id: str, owner: str, model: str) -> None:
        """It is over: it counts no more, and what it left is to be removed later."""
        now_ms = await self._broker.now_ms()
        if model:
            await self._broker.command(
                "ZADD", keys.BATCHES_OVER, now_ms, f"{id}:{keys.encode(model)}"
            )
        await self._broker.command("ZREM", keys.BATCHES, f"{id}:{owner}")
        await self._broker.command("DEL", f"{keys.BATCH}{id}:done", f"{keys.BATCH}{id}:parts")

    async def over_since(self, before_ms: int, most: int) -> list[tuple[str, str]]:
        """(batch, encoded model) of those that ended before this time."""
        found = await self._broker.command(
            "ZRANGEBYSCORE", keys.BATCHES_OVER, "-inf", before_ms, "LIMIT", 0, most
        )
        pairs = (member.decode().partition(":") for member in found)
        return [(id, model) for id, _, model in pairs]

    async def removed(self, id: str, model: str) -> None:
        """What it left is removed, but for the list that its jobs told of their ends."""
        k = keys.ended_of(model, "b-" + id.removeprefix("batch_"))
        await self._broker.command("DEL", k)
        await self._broker.command("ZREM", keys.BATCHES_OVER, f"{id}:{model}")
