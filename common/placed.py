"""Backends that were added or drained by HTTP: one hash in Redis, which every dispatcher reads.

Adding and draining are fields of their own, so that no change reads what another may be writing.
Once anything was changed the hash has the field `kept`, for good: where it is missing again, Redis
lost the hash, and a dispatcher that has read it before puts back what it knows.
"""

import logging

import msgspec

from common import keys
from common.broker import Broker
from common.errors import WireError
from common.settings import BackendSettings
from common.wire import VERSION, Placed, decode_placed, encode_placed

log = logging.getLogger("fairlane.placed")

PLACED_MAX = 256
"""Most backends added, and most drained."""
KEPT = b"kept"
_ADD, _DRAIN = b"add ", b"drain "


class Placements(msgspec.Struct, frozen=True):
    """What was changed by HTTP, as last read."""

    added: dict[str, BackendSettings] = {}
    """By address."""
    drained: frozenset[str] = frozenset()
    """Addresses that get no more jobs, whatever source they come from."""
    fields: dict[bytes, bytes] = {}
    """The hash as it is; empty where nothing was ever changed, or it is lost."""


async def read(broker: Broker) -> Placements:
    """The changes that hold. Raises BrokerError."""
    flat = await broker.command("HGETALL", keys.BACKENDS)
    return parse(dict(zip(flat[::2], flat[1::2], strict=True)))


def parse(fields: dict[bytes, bytes]) -> Placements:
    """Entries that cannot be read count as not there: a newer process may have made them."""
    added: dict[str, BackendSettings] = {}
    drained: set[str] = set()
    for field, data in sorted(fields.items()):
        try:
            if field.startswith(_ADD) and len(added) < PLACED_MAX:
                backend = decode_placed(data).backend
                if backend is not None:
                    added[backend.address] = backend
            elif field.startswith(_DRAIN) and len(drained) < PLACED_MAX:
                decode_placed(data)
                drained.add(field.removeprefix(_DRAIN).decode())
        except (WireError, UnicodeDecodeError) as e:
            log.debug("a backend added by HTTP: %s", e)
    return Placements(added, frozenset(drained), fields)


async def restore(broker: Broker, known: Placements) -> None:
    """Put back what Redis lost, unless somebody did meanwhile. Raises BrokerError."""
    for field, data in sorted(known.fields.items(), key=lambda item: item[0] == KEPT):
        await broker.command("HSETNX", keys.BACKENDS, field, data)


async def add(broker: Broker, backend: BackendSettings) -> str:
    """`added`, `known` (nothing was changed) or `full`. Raises BrokerError."""
    return await _put(broker, _ADD, backend.address, backend)


async def drain(broker: Broker, address: str) -> str:
    """No more jobs for it: `added`, `known` or `full`, of the drained. Raises BrokerError."""
    return await _put(broker, _DRAIN, address, None)


async def undrain(broker: Broker, address: str) -> bool:
    """Whether it was drained. Raises BrokerError."""
    return bool(await broker.command("HDEL", keys.BACKENDS, _DRAIN + address.encode()))


async def remove(broker: Broker, address: str) -> bool:
    """Whether it had been added. Raises BrokerError."""
    field = address.encode()
    await broker.command("HDEL", keys.BACKENDS, _DRAIN + field)
    return bool(await broker.command("HDEL", keys.BACKENDS, _ADD + field))


async def _put(broker: Broker, kind: bytes, address: str, backend: BackendSettings | None) -> str:
    field = kind + address.encode()
    data = encode_placed(Placed(VERSION, await broker.now_ms(), backend))
    await broker.command("HSETNX", keys.BACKENDS, KEPT, b"1")
    if not await broker.command("HSETNX", keys.BACKENDS, field, data):
        return "known"
    names = await broker.command("HKEYS", keys.BACKENDS)
    if sum(name.startswith(kind) for name in names) <= PLACED_MAX:
        return "added"
    await broker.command("HDEL", keys.BACKENDS, field)
    return "full"
