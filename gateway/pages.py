"""The paths that are answered at once: health, readiness, metrics, models."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from common.intake.answers import (
    JSON_TYPE,
    RETRY_S_MIN,
    Headers,
    Refusal,
    unavailable,
    unknown_model,
)
from common.intake.models import Models
from common.wire import ServedModel
from gateway.auth import Keys, Principal
from gateway.client import Client

_TEXT_TYPE = (b"content-type", b"text/plain; charset=utf-8")
Handler = Callable[[Client], Awaitable[None]]


class Pages:
    """Their handlers. `not_ready` says why no request can be served just now; empty: it can."""

    def __init__(
        self,
        keys: Keys,
        models: Models,
        registry: CollectorRegistry,
        not_ready: Callable[[], list[str]],
    ) -> None:
        self._keys = keys
        self._models = models
        self._registry = registry
        self._not_ready = not_ready

    async def health(self, client: Client) -> None:
        """The process runs."""
        await page(client, 200, _TEXT_TYPE, b"ok\n")

    async def ready(self, client: Client) -> None:
        """Whether a request could be served; if not, why."""
        reasons = self._not_ready()
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons})
        await page(client, 503 if reasons else 200, JSON_TYPE, body)

    async def metrics(self, client: Client) -> None:
        """For Prometheus."""
        kind = (b"content-type", CONTENT_TYPE_LATEST.encode())
        await page(client, 200, kind, generate_latest(self._registry))

    async def models(self, client: Client) -> None:
        """All models that the key may use, under each of their names."""
        principal = self._keys.principal(client.authorization)
        found = usable(self._models, principal)
        data = [_model(name, served) for name, served in found]
        body = msgspec.json.encode({"object": "list", "data": data})
        await page(client, 200, JSON_TYPE, body)

    async def model(self, client: Client) -> None:
        """One of them, by the rest of the path, whatever characters it has."""
        principal = self._keys.principal(client.authorization)
        name: str = client.scope["path_params"]["id"]
        body = msgspec.json.encode(_model(name, find(self._models, principal, name)))
        await page(client, 200, JSON_TYPE, body)


def usable(models: Models, principal: Principal) -> list[tuple[str, ServedModel]]:
    """The names and models that a key may use."""
    return [(n, m) for n, m in models.listing() if principal.may_use(n, m.name)]


def find(models: Models, principal: Principal, name: str) -> ServedModel:
    """The model of this name. Raises Refusal: 404 where there is none for this key, 503 while
    no model is known yet."""
    model = models.resolve(name)
    if model is not None and principal.may_use(name, model.name):
        return model
    if model is None and not (models.loaded and models.listing()):
        raise Refusal(unavailable(RETRY_S_MIN))
    raise Refusal(unknown_model(name, [n for n, _ in usable(models, principal)]))


def _model(name: str, served: ServedModel) -> dict[str, str | int]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "fairlane",
        "root": served.name,
    }


async def page(
    client: Client,
    status: int,
    kind: tuple[bytes, bytes],
    body: bytes,
    more: Headers | None = None,
) -> None:
    """A whole answer of a content type, that no cache may keep; `more`: further headers."""
    head = [kind, (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
    await client.respond(status, head + (more or []), body)


async def json_page(
    client: Client, data: object, status: int = 200, more: Headers | None = None
) -> None:
    """As `page`, of JSON."""
    await page(client, status, JSON_TYPE, msgspec.json.encode(data), more)


def listed(data: Sequence[Mapping[str, object]], more: bool) -> dict[str, object]:
    """A page of a list as OpenAI's API shows it; `more`: others follow."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {
        "object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more,
    }  # fmt: skip
