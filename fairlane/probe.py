"""What `fairlane check` looks at: Redis, each backend, and the models it serves."""

import asyncio
from pathlib import Path

import httpx
import msgspec

from common.config import parse_backends
from common.errors import BrokerError, ConfigError
from common.settings import BackendSettings, Settings
from dispatcher.sources.names import resolve
from dispatcher.sources.wanted import endpoint
from fairlane.roles import NO_BACKEND, connected

PROBE_S = 5.0

Finding = tuple[str, bool, str]
"""(what, whether it is well, what there is to say)."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def probe(settings: Settings) -> list[Finding]:
    """Everything that is looked at, in order."""
    found = [await _redis(settings)]
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
            found.append(await _metrics(client, backend))
    return found


async def _file(settings: Settings, found: list[Finding]) -> list[BackendSettings]:
    """The backends of the file of backends, if there is to be one."""
    if settings.backends_file is None:
        return []
    path = Path(settings.backends_file)
    try:
        listed = parse_backends(await asyncio.to_thread(path.read_bytes), path)
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
    except OSError as e:  # a TimeoutError is one
        return f"name {host}", False, f"cannot be looked up ({e or type(e).__name__})"
    return f"name {host}", bool(found), ", ".join(found) or "has no address"


async def _redis(settings: Settings) -> Finding:
    try:
        async with connected(settings, None) as broker:
            await broker.now_ms()
    except (BrokerError, ConfigError) as e:
        return "redis", False, str(e)
    return "redis", True, "answers, is new enough, and evicts nothing"


async def _get(client: httpx.AsyncClient, backend: BackendSettings, path: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
    return await client.get(backend.address + path, headers=headers)


async def _models(client: httpx.AsyncClient, backend: BackendSettings, names: list[str]) -> Finding:
    what = f"{backend.address}/v1/models"
    try:
        response = await _get(client, backend, "/v1/models")
        served = [m.id for m in msgspec.json.decode(response.content, type=_Models).data]
    except httpx.HTTPError as e:
        return what, False, f"no answer ({e or type(e).__name__})"
    except msgspec.MsgspecError:
        return what, False, f"status {response.status_code}, not a list of models"
    missing = [n for n in names if n not in served]
    if missing:
        text = f"serves {', '.join(served) or 'nothing'}, not {', '.join(missing)}"
        return what, False, text
    return what, True, f"serves {', '.join(served)}"


async def _metrics(client: httpx.AsyncClient, backend: BackendSettings) -> Finding:
    what = f"{backend.address}/metrics"
    try:
        response = await _get(client, backend, "/metrics")
    except httpx.HTTPError as e:
        return what, False, f"no answer ({e or type(e).__name__})"
    return what, response.status_code == 200, f"status {response.status_code}"
