"""`/admin/backends`: which backends there are, and adding, draining and removing them.

What is changed is kept in Redis (`common/placed.py`), where every dispatcher reads it each second.
It is answered at once; the listing shows when dispatchers have followed.
"""

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from common import keys, placed
from common.broker import Broker
from common.config import converted
from common.errors import BrokerError, ConfigError, WireError
from common.intake.answers import JSON_TYPE, RETRY_S_MIN, Answer, Refusal, bad_request, unavailable
from common.intake.models import STALE_MS
from common.placed import PLACED_MAX, Placements
from common.settings import BackendSettings
from common.wire import ServedBackend, decode_announcement
from gateway.auth import Keys
from gateway.client import Client
from gateway.pages import page

log = logging.getLogger("fairlane.admin")

BODY_MAX = 64 << 10
ANSWER_S = 2.0
_FROM_ELSEWHERE = (b"origin", b"forwarded", b"x-forwarded-for", b"x-real-ip")
"""What browsers and proxies add. Without keys the caller has to be on this machine itself."""
_SOURCES = {"config": "the configuration", "file": "the file of backends"}

T = TypeVar("T")


class _Address(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One backend, over all dispatchers that use it."""

    object: str = "backend"
    url: str
    name: str
    """The url as its source has it."""
    source: str
    """`config`, `file`, `admin`; empty for one that is leaving."""
    state: str
    """`pending` (no dispatcher uses it yet), `active`, `draining`, `leaving`."""
    models: list[str] = []
    reachable: bool = False
    """Whether it takes connections from at least one of them."""
    running: int = 0
    """Jobs that run there."""
    dispatchers: int = 0


class Admin:
    """The handlers. Each raises Refusal: 401 and 403 for who may not, 503 without Redis."""

    def __init__(self, broker: Broker, api_keys: Keys) -> None:
        self._broker = broker
        self._keys = api_keys

    async def backends(self, client: Client) -> None:
        """GET lists all; POST adds one (the settings of a backend), 201 with its entry."""
        self._allow(client)
        if client.method == "POST":
            await self._add(client, await _read(client, BackendSettings))
            return
        async with _redis():
            entries = await self._entries(await placed.read(self._broker))
        shown = [entries[url] for url in sorted(entries)]
        body = msgspec.json.encode({"object": "list", "data": shown})
        await page(client, 200, JSON_TYPE, body)

    async def drain(self, client: Client) -> None:
        """POST {"url"}: it gets no more jobs; those it runs end."""
        await self._change(client, self._drain)

    async def undrain(self, client: Client) -> None:
        """POST {"url"}: it gets jobs again."""
        await self._change(client, lambda url: placed.undrain(self._broker, url))

    async def remove(self, client: Client) -> None:
        """POST {"url"}: one that was added gets no more jobs, and is gone when the last ended."""
        await self._change(client, self._remove)

    async def _add(self, client: Client, backend: BackendSettings) -> None:
        address, word = backend.address, "known"
        async with _redis():
            there = (await self._entries(await placed.read(self._broker))).get(address)
            if there is None or there.state == "leaving":
                word = await placed.add(self._broker, backend)
        if word == "known":
            raise Refusal(_conflict(f"There is a backend {address} already.", "backend_exists"))
        if word == "full":
            raise Refusal(_full("added"))
        log.info("backend %s is added", address)
        entry = Entry(url=address, name=address, source="admin", state="pending")
        await page(client, 201, JSON_TYPE, msgspec.json.encode(entry))

    async def _change(self, client: Client, change: Callable[[str], Awaitable[object]]) -> None:
        self._allow(client)
        url = (await _read(client, _Address)).url.rstrip("/")
        async with _redis():
            known = await self._entries(await placed.read(self._broker))
            mine = {u: e for u, e in known.items() if url in (u, e.name)}
            if not mine:
                raise Refusal(_unknown(url, list(known)))
            await change(url)
            after = await self._entries(await placed.read(self._broker))
        shown = [after[u] for u in sorted(mine) if u in after]
        body = msgspec.json.encode({"object": "list", "data": shown})
        await page(client, 200, JSON_TYPE, body)

    async def _drain(self, url: str) -> None:
        if await placed.drain(self._broker, url) == "full":
            raise Refusal(_full("drained"))
        log.info("backend %s is drained", url)

    async def _remove(self, url: str) -> None:
        known = await self._entries(await placed.read(self._broker))
        source = next((e.source for u, e in known.items() if url in (u, e.name)), "")
        if source in _SOURCES:
            text = f"{url} is in {_SOURCES[source]}: remove it there, or drain it."
            raise Refusal(_conflict(text, "backend_configured"))
        await placed.remove(self._broker, url)
        log.info("backend %s is removed", url)

    async def _entries(self, placements: Placements) -> dict[str, Entry]:
        """All backends by address: what dispatchers say, and what was added since."""
        flat = await self._broker.command("HGETALL", keys.MODELS)
        now_ms = await self._broker.now_ms()
        entries: dict[str, Entry] = {}
        for data in flat[1::2]:
            try:
                announcement = decode_announcement(data)
            except WireError:
                continue
            if now_ms - announcement.at_ms <= STALE_MS:
                for served in announcement.backends:
                    entries[served.url] = _joined(entries.get(served.url), served)
        return _with_placed(entries, placements)

    def _allow(self, client: Client) -> None:
        """Raises Refusal where the caller is no administrator."""
        if self._keys.open:
            if not _is_here(client):
                text = "Without API keys this is for the gateway's own machine alone."
                raise Refusal(_forbidden(text))
        elif not self._keys.principal(client.authorization).admin:
            raise Refusal(_forbidden("This needs a key whose role is `admin`."))


def _joined(old: Entry | None, new: ServedBackend) -> Entry:
    """What one dispatcher more says of a backend."""
    if old is None:
        old = Entry(url=new.url, name=new.name, source=new.source, state=new.state)
    better = old if old.source else new
    return Entry(
        url=new.url, name=better.name, source=better.source, state=better.state,
        models=sorted({*old.models, *new.models}), reachable=old.reachable or new.reachable,
        running=old.running + new.running, dispatchers=old.dispatchers + 1,
    )  # fmt: skip


def _with_placed(entries: dict[str, Entry], placements: Placements) -> dict[str, Entry]:
    """As they are wanted, whether dispatchers know it yet or not."""
    names = {entry.name for entry in entries.values() if entry.source}
    for address in placements.added:
        old = entries.get(address)
        if address not in names and (old is None or not old.source):
            entries[address] = Entry(url=address, name=address, source="admin", state="pending")
    for url, entry in entries.items():
        gone = entry.source == "admin" and entry.name not in placements.added
        drained = url in placements.drained or entry.name in placements.drained
        state = "draining" if drained else entry.state
        if entry.state == "draining" and not drained:
            state = "active"
        if gone or not entry.source:
            state = "leaving"
        source = "" if gone else entry.source
        entries[url] = msgspec.structs.replace(entry, state=state, source=source)
    return entries


@asynccontextmanager
async def _redis() -> AsyncIterator[None]:
    """What is asked of Redis inside is a Refusal where it does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except (BrokerError, TimeoutError) as e:
        log.debug("admin: %s", e)
        raise Refusal(unavailable(RETRY_S_MIN)) from None


async def _read(client: Client, struct: type[T]) -> T:
    """The body as a struct. Raises Refusal, 400, naming what is wrong."""
    body = await client.read_body(BODY_MAX)
    try:
        data = msgspec.json.decode(body)
        if not isinstance(data, Mapping):
            raise bad_request("The body must be a JSON object with a `url`.")
        return converted(struct, data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise bad_request("The body is not valid JSON.") from None
    except ConfigError as e:
        text = str(e)[:500]
        mark = "" if text.endswith((".", "?")) else "."
        raise bad_request(text + mark, "url" if "url" in str(e) else None) from None


def _is_here(client: Client) -> bool:
    """Whether the request was made on this machine, and by no page of a browser."""
    if any(name in _FROM_ELSEWHERE for name, _ in client.headers):
        return False
    try:
        return ipaddress.ip_address(client.peer).is_loopback
    except ValueError:
        return False


def _forbidden(message: str) -> Answer:
    return Answer(status=403, message=message, code="insufficient_permissions")


def _conflict(message: str, code: str) -> Answer:
    return Answer(status=409, message=message, param="url", code=code)


def _full(what: str) -> Answer:
    return _conflict(
        f"{PLACED_MAX} backends are {what} already, which is the most.", "too_many_backends"
    )


def _unknown(url: str, known: list[str]) -> Answer:
    shown = ", ".join(sorted(known)[:50]) or "none"
    message = f"There is no backend {url[:200]}. Known: {shown}."
    return Answer(status=404, message=message, param="url", code="backend_not_found")
