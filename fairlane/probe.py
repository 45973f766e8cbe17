"""What `fairlane check` looks at: Redis, the store of files, each backend and its models."""

import asyncio
from pathlib import Path

import httpx

from common.config import parse_backends
from common.errors import BrokerError, ConfigError, StoreError
from common.names import resolve
from common.settings import BackendSettings, Settings
from common.store import Store
from common.watched import read
from dispatcher.engines.facts import NOTHING
from dispatcher.engines.kinds import NONE
from dispatcher.engines.models import read_models
from dispatcher.engines.reading import PATHS, Reading
from dispatcher.pages import PAGE_BYTES_MAX, Unreadable
from dispatcher.sources.wanted import endpoint
from fairlane.roles import NO_BACKEND, connected

PROBE_S = 5.0

Finding = tuple[str, bool, str]
"""(what, whether it is well, what there is to say)."""


async def probe(settings: Settings) -> list[Finding]:
    """Everything that is looked at, in order."""
    found = [await _redis(settings), await _store(settings)]
    for name, model in settings.models.items():
        if not model.backends:
            found.append((f"model {name}", True, "waits for a backend that lists or names it"))
    wanted: dict[BackendSettings, list[str]] = {}
    listed = await _file(settings, found)
    for backend in (*settings.backends, *listed):
        wanted.setdefault(backend, []).extend(backend.models)
    for name, model in settings.models.items():
        for backend in model.backends:
            wanted.setdefault(backend, []).append(name)
    if not wanted:
        text = f"there are none until one is added: {NO_BACKEND}"
        found.append(("backends", bool(settings.models or settings.backends_file), text))
    for backend in wanted:
        if backend.resolve:
            found.append(await _name(backend))
    async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as client:
        for backend, names in wanted.items():
            found.append(await _models(client, backend, names))
            if backend.engine != NONE:
                found.append(await _metrics(client, backend))
    return found


async def _file(settings: Settings, found: list[Finding]) -> list[BackendSettings]:
    """The backends of the file of backends, if there is to be one."""
    if settings.backends_file is None:
        return []
    path = Path(settings.backends_file)
    try:
        listed = parse_backends(await asyncio.to_thread(read, path), path)
    except (OSError, ConfigError) as e:
        text = str(e) if isinstance(e, ConfigError) else f"cannot be read: {e.strerror}"
        found.append((f"file {path}", False, text.removeprefix(f"{path}: ")))
        return []
    found.append((f"file {path}", True, f"{len(listed)} backends"))
    return listed


async def _name(backend: BackendSettings) -> Finding:
    host, port = endpoint(backend.url)
    try:
        async with asyncio.timeout(PROBE_S):
            found = sorted(set(await resolve(host, port)))
    except (OSError, UnicodeError) as e:  # a TimeoutError is an OSError
        return f"name {host}", False, f"cannot be looked up ({_text(e)})"
    return f"name {host}", bool(found), ", ".join(found) or "has no address"


async def _redis(settings: Settings) -> Finding:
    try:
        async with connected(settings, None) as broker:
            await broker.now_ms()
    except (BrokerError, ConfigError) as e:
        return "redis", False, str(e)
    return "redis", True, "answers, is new enough, and evicts nothing"


async def _store(settings: Settings) -> Finding:
    try:
        url = settings.store.url
        await Store(url, settings.store.options, make=url is None).list("files", limit=1)
    except (StoreError, ConfigError) as e:
        return "store", False, str(e)
    return "store", True, "can be read"


async def _get(client: httpx.AsyncClient, backend: BackendSettings, path: str) -> tuple[int, bytes]:
    """A page's status and bytes, as much as a dispatcher would read. Raises Unreadable."""
    headers = {"authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
    try:
        async with (
            asyncio.timeout(PROBE_S),
            client.stream("GET", backend.address + path, headers=headers) as response,
        ):
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > PAGE_BYTES_MAX:
                    raise Unreadable(f"more than {PAGE_BYTES_MAX} bytes")
            return response.status_code, bytes(body)
    except TimeoutError:
        raise Unreadable(f"no whole answer within {PROBE_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as e:
        raise Unreadable(f"no answer ({_text(e)})") from None


def _text(e: Exception) -> str:
    return str(e) or type(e).__name__


async def _models(client: httpx.AsyncClient, backend: BackendSettings, names: list[str]) -> Finding:
    what = f"{backend.address}/v1/models"
    try:
        status, body = await _get(client, backend, "/v1/models")
    except Unreadable as e:
        return what, False, str(e)
    served = read_models(body)
    if served is None:
        return what, False, f"status {status}, not a list of models"
    missing = [n for n in names if n not in served]
    if missing:
        text = f"serves {', '.join(served) or 'nothing'}, not {', '.join(missing)}"
        return what, False, text
    return what, True, f"serves {', '.join(served)}"


async def _metrics(client: httpx.AsyncClient, backend: BackendSettings) -> Finding:
    """Its page, at the paths where a dispatcher looks for it; what the first of them says where
    none tells anything."""
    reading, first = Reading(backend.engine), None
    for _ in PATHS:
        path = reading.path or PATHS[0]
        what = backend.address + path
        try:
            status, body = await _get(client, backend, path)
        except Unreadable as e:
            return what, False, str(e)
        there = status == 200
        if there and reading.read(body, None) != NOTHING:
            return what, True, f"the metrics of a {reading.kind}"
        if not there:
            reading.missed()
        unknown = ", but nothing of a known engine" if there else ""
        first = first or (what, there, f"status {status}{unknown}")
    assert first is not None
    return first
