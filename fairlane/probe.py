"""What `fairlane check` looks at: Redis, the store of files, each backend and its models."""

import httpx

from common.errors import BrokerError, ConfigError, StoreError
from common.settings import BackendSettings, Settings
from common.store import Store
from dispatcher.engines.facts import NOTHING
from dispatcher.engines.kinds import NONE
from dispatcher.engines.models import read_models
from dispatcher.engines.reading import PATHS, Reading
from fairlane.roles import backends_of, connected

PROBE_S = 5.0

Finding = tuple[str, bool, str]
"""(what, whether it is well, what there is to say)."""


async def probe(settings: Settings) -> list[Finding]:
    """Everything that is looked at, in order."""
    found = [await _redis(settings), await _store(settings)]
    without = [name for name, model in settings.models.items() if not model.backends]
    found += [(f"model {name}", False, "has no backends") for name in without]
    wanted: dict[BackendSettings, list[str]] = {b: [] for b in settings.backends}
    for name, model in settings.models.items():
        for backend in model.backends:
            wanted.setdefault(backend, []).append(name)
    if not backends_of(settings):
        found.append(("backends", False, "there are none: --backend URL, or models.….backends"))
    async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as client:
        for backend, names in wanted.items():
            found.append(await _models(client, backend, names))
            if backend.engine != NONE:
                found.append(await _metrics(client, backend))
    return found


async def _redis(settings: Settings) -> Finding:
    try:
        async with connected(settings, None) as broker:
            await broker.now_ms()
    except (BrokerError, ConfigError) as e:
        return "redis", False, str(e)
    return "redis", True, "answers, is new enough, and evicts nothing"


async def _store(settings: Settings) -> Finding:
    try:
        await Store(settings.store.url, settings.store.options).list("files", limit=1)
    except (StoreError, ConfigError) as e:
        return "store", False, str(e)
    return "store", True, "can be read"


async def _get(client: httpx.AsyncClient, backend: BackendSettings, path: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
    return await client.get(backend.url.rstrip("/") + path, headers=headers)


async def _models(client: httpx.AsyncClient, backend: BackendSettings, names: list[str]) -> Finding:
    what = f"{backend.url.rstrip('/')}/v1/models"
    try:
        response = await _get(client, backend, "/v1/models")
    except httpx.HTTPError as e:
        return what, False, f"no answer ({e or type(e).__name__})"
    served = read_models(response.content)
    if served is None:
        return what, False, f"status {response.status_code}, not a list of models"
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
        what = backend.url.rstrip("/") + path
        try:
            response = await _get(client, backend, path)
        except httpx.HTTPError as e:
            return what, False, f"no answer ({e or type(e).__name__})"
        there = response.status_code == 200
        if there and reading.read(response.content, None) != NOTHING:
            return what, True, f"the metrics of a {reading.kind}"
        if not there:
            reading.missed()
        unknown = ", but nothing of a known engine" if there else ""
        first = first or (what, there, f"status {response.status_code}{unknown}")
    assert first is not None
    return first
