"""Which models there have been backends or jobs for, kept in Redis: a dispatcher that starts when
no source names one leads it all the same, so that its jobs may wait, and end at their deadlines."""

from collections.abc import Collection

from common import keys
from common.broker import Broker
from common.keys import ModelKeys

FORGOTTEN_MS = 86_400_000
"""A model that was not noted since then, and of which nothing waits or runs, is known no more."""
KNOWN_MAX = 256
"""Most models that are known; of more, those noted most recently."""


async def remember(broker: Broker, names: Collection[str]) -> list[str]:
    """Note models that have backends or jobs; returns all that are known. Raises BrokerError."""
    now_ms = await broker.now_ms()
    flat = await broker.command("HGETALL", keys.KNOWN)
    known = {n.decode(): int(at) for n, at in zip(flat[::2], flat[1::2], strict=True)}
    known |= dict.fromkeys(names, now_ms)
    latest = sorted(known, key=lambda n: -known[n])[:KNOWN_MAX]
    kept = [
        n for n in latest
        if now_ms - known[n] <= FORGOTTEN_MS or not await is_empty(broker, ModelKeys(n))
    ]  # fmt: skip
    gone = known.keys() - set(kept)
    if gone:
        await broker.command("HDEL", keys.KNOWN, *gone)
    fields = [part for name in names if name in kept for part in (name, now_ms)]
    if fields:
        await broker.command("HSET", keys.KNOWN, *fields)
    return kept


async def is_empty(broker: Broker, k: ModelKeys) -> bool:
    """Whether no job of a model waits or runs anywhere. Raises BrokerError."""
    return not (
        await broker.command("ZCARD", k.deadlines) or await broker.command("ZCARD", k.running)
    )
