"""Which models there are: what dispatchers announce, and what the configuration names."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from common import keys
from common.broker import Broker
from common.errors import BrokerError, WireError
from common.intake.answers import retry_after
from common.settings import ModelSettings
from common.wire import ServedModel, decode_announcement

log = logging.getLogger("fairlane.gateway")

POLL_S = 1.0
STALE_MS = 6_000
"""An announcement older than this, by the Redis clock, is of a dispatcher that is gone."""
KNOWN_MAX = 1_000
"""Most models remembered after nobody serves them any more."""
FORGOTTEN_S = 86_400.0
"""They are remembered for so long, as dispatchers do."""


def merge(
    fields: Mapping[bytes, bytes], now_ms: int, configured: Mapping[str, ModelSettings]
) -> dict[str, ServedModel]:
    """Models by name, from all announcements that are fresh, and the configuration. Pure.

    A model is ready where one dispatcher says so; drain rates of the same model do not add up,
    for only its leader pops.
    """
    models = {
        name: ServedModel(name, list(settings.aliases), False, 0, 0.0)
        for name, settings in configured.items()
    }
    for new in announced(fields, now_ms):
        old = models.get(new.name)
        models[new.name] = new if old is None else _union(old, new)
    return models


def announced(fields: Mapping[bytes, bytes], now_ms: int) -> Iterator[ServedModel]:
    """What dispatchers that live say of their models. Pure."""
    for field, data in fields.items():
        try:
            announcement = decode_announcement(data)
        except WireError as e:
            log.debug("announcement of %s: %s", field.decode("ascii", "replace"), e)
            continue
        if now_ms - announcement.at_ms <= STALE_MS:
            yield from announcement.models


def _union(a: ServedModel, b: ServedModel) -> ServedModel:
    created = min((c for c in (a.created, b.created) if c), default=0)
    aliases = sorted({*a.aliases, *b.aliases})
    closed = {**a.closed, **b.closed}  # only the leader tells any
    ready, drain = a.ready or b.ready, max(a.drain, b.drain)
    backends = max(a.backends, b.backends)
    return ServedModel(a.name, aliases, ready, created, drain, backends, closed)


class Models:
    """The models as this gateway knows them. `run` keeps them fresh."""

    def __init__(
        self, broker: Broker, configured: Mapping[str, ModelSettings], *, waits: bool = True
    ) -> None:
        """`waits`: whether jobs are taken while no backend answers."""
        self._broker = broker
        self._configured = configured
        self._waits = waits
        self._led: frozenset[str] = frozenset()
        """Models that a dispatcher serves, with backends or without."""
        self._models: dict[str, ServedModel] = merge({}, 0, configured)
        self._names: dict[str, ServedModel] = _names(self._models)
        self._gone: dict[str, float] = {}
        """Since when nobody serves a model that is remembered."""
        self.loaded = False
        """Whether announcements were read at least once."""

    def configure(self, configured: Mapping[str, ModelSettings]) -> None:
        """Let these be the models of the configuration from the next look on."""
        self._configured = configured

    @property
    def ready(self) -> bool:
        """Whether at least one model has a backend that answers."""
        return any(m.ready for m in self._models.values())

    @property
    def accepting(self) -> bool:
        """Whether jobs of at least one model are taken."""
        return any(self.accepts(m) for m in self._models.values())

    def accepts(self, model: ServedModel) -> bool:
        """Whether jobs of this model are taken: one can run, or may wait for a backend."""
        return model.ready or (self._waits and model.name in self._led)

    def resolve(self, name: str) -> ServedModel | None:
        """The model of this name or alias, also where nobody serves it just now."""
        return self._names.get(name)

    def listing(self) -> list[tuple[str, ServedModel]]:
        """Every name that `resolve` knows, sorted, with its model."""
        return sorted(self._names.items(), key=lambda item: item[0])

    def drain(self, name: str) -> float | None:
        """Jobs a second that a model's dispatchers have seen end; None where no backend answers."""
        model = self._models.get(name)
        return model.drain if model is not None and model.ready else None

    def closed(self, name: str, cls: str) -> str | None:
        """Why the model's leader sends none of a class that waits; None where it does, or nobody
        says."""
        model = self._models.get(name)
        return None if model is None else model.closed.get(cls)

    def retry_after(self, name: str, waiting: int) -> int:
        """Seconds for Retry-After where `waiting` jobs of the model are ahead."""
        return retry_after(waiting, self.drain(name) or 0.0)

    async def run(self) -> None:
        """Read the announcements each second, until cancelled."""
        while True:
            try:
                await self.refresh()
            except BrokerError as e:
                log.debug("models: %s", e)
            await asyncio.sleep(POLL_S if self.loaded else POLL_S / 10)

    async def refresh(self) -> None:
        """Read the announcements once. Raises BrokerError."""
        flat = await self._broker.command("HGETALL", keys.MODELS)
        now_ms = await self._broker.now_ms()
        fields = dict(zip(flat[::2], flat[1::2], strict=True)) if isinstance(flat, list) else flat
        fresh = merge(fields, now_ms, self._configured)
        self._led = frozenset(m.name for m in announced(fields, now_ms))
        now, gone = asyncio.get_running_loop().time(), self._gone
        self._gone = {n: gone.get(n, now) for n in self._models if n not in fresh}
        for name, since in self._gone.items():  # gone for now is not unknown: 503, not 404
            if now - since < FORGOTTEN_S and len(fresh) < KNOWN_MAX:
                fresh[name] = msgspec.structs.replace(self._models[name], ready=False)
        self._models = fresh
        self._names = _names(fresh)
        self.loaded = True


def _names(models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
    """Names and aliases; a model's own name wins over an alias of another."""
    served: Iterable[ServedModel] = models.values()
    aliases = {alias: m for m in served for alias in m.aliases}
    return {**aliases, **models}
