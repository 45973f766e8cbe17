"""Which models there have been backends for, kept in Redis: a dispatcher that starts when none is
left leads them all the same, so that their jobs may wait."""

from collections.abc import Collection

from common import keys
from common.broker import Broker
from common.keys import ModelKeys

FORGOTTEN_MS = 86_400_000
"""A model that no dispatcher had a backend for since then is known no more."""
KNOWN_MAX = 256
"""Most models that are known; of more, those with backends most recently."""


async def remember(broker: Broker, served: Collection[str]) -> list[str]:
    """Note the models that have backends here; returns all that are known. Raises BrokerError."""
    now_ms = await broker.now_ms()
    flat = await broker.command("HGETALL", keys.KNOWN)
    known = {n.decode(): int(at) for n, at in zip(flat[::2], flat[1::2], strict=True)}
    known |= dict.fromkeys(served, now_ms)
    kept = sorted((n for n, at in known.items() if now_ms - at <= FORGOTTEN_MS),
                  key=lambda n: -known[n])[:KNOWN_MAX]  # fmt: skip
    gone = known.keys() - set(kept)
    if gone:
        await broker.command("HDEL", keys.KNOWN, *gone)
    fields = [part for name in served if name in kept for part in (name, now_ms)]
    if fields:
        await broker.command("HSET", keys.KNOWN, *fields)
    return kept


async def is_empty(broker: Broker, k: ModelKeys) -> bool:
    """Whether no job of a model waits or runs anywhere. Raises BrokerError."""
    return not (
        await broker.command("ZCARD", k.deadlines) or await broker.command("ZCARD", k.running)
    )
