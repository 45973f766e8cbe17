"""`GET /v1/queue`: the caller's own jobs, those that wait with their places, and those that run.

Redis is asked for the lanes of the caller's user and for what runs, a model at a time; so jobs of
all replicas are in it, and nobody else's. An answer stands for KEPT_S, whoever of the user asks.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from common.broker import Broker
from common.errors import BrokerError
from common.intake.answers import JSON_TYPE, RETRY_S_MIN, Refusal, unavailable
from common.intake.models import Models
from common.intake.queues import Queues
from common.jobs import Snapshot
from common.keys import CLASSES
from common.queue import SNAPSHOT_MAX
from gateway.auth import Keys, Principal, own_path
from gateway.client import Client
from gateway.eta import Eta
from gateway.pages import page, usable

log = logging.getLogger("fairlane.gateway")

JOBS_MAX = 1_000
"""Most jobs in one answer."""
KEPT_S = 1.0
KEPT_MAX = 64
"""Most answers kept."""
ANSWER_S = 5.0
"""An answer may take so long; they are made one at a time, so that no user asks twice at once."""


class Listed(msgspec.Struct, frozen=True):
    """One job of the caller's."""

    id: str
    """As `X-Fairlane-Job` says it."""
    model: str
    cls: str = msgspec.field(name="class")
    state: str
    """waiting or running."""
    position: int | None
    """How many turns until its own, counting it; null for one that runs."""
    eta_s: float | None
    """Seconds until its turn; null where that is not known, and for one that runs."""
    created: int
    """Seconds since the epoch."""
    waiting_s: float
    """How long it has waited, or did until it was sent to an engine."""
    reason: str | None = None
    """Why none of its class is sent to an engine just now; null where some is, and once it runs."""
    object: str = "queue.job"


class Listing:
    """The handler of the path."""

    def __init__(
        self, broker: Broker, api_keys: Keys, models: Models, queues: Queues, eta: Eta
    ) -> None:
        self._broker = broker
        self._keys = api_keys
        self._models = models
        self._queues = queues
        self._eta = eta
        self._asking = asyncio.Lock()
        self._kept: dict[tuple[str, frozenset[str]], tuple[float, bytes]] = {}

    async def page(self, client: Client) -> None:
        """The caller's jobs. Raises Refusal: 401, 400 for a name of a person that cannot be, 503
        where Redis does not answer."""
        principal = self._keys.principal(client.authorization)
        path = own_path(principal, client.headers, client.authorization, client.peer)
        try:
            async with asyncio.timeout(ANSWER_S), self._asking:
                body = await self._body(path, principal)
        except (BrokerError, TimeoutError) as e:
            log.debug("listing: %s", e)
            raise Refusal(unavailable(RETRY_S_MIN)) from None
        await page(client, 200, JSON_TYPE, body)

    async def _body(self, path: str, principal: Principal) -> bytes:
        now, key = asyncio.get_running_loop().time(), (path, principal.models)
        kept = self._kept.pop(key, None)
        if kept is None or now - kept[0] >= KEPT_S:
            kept = now, await self._made(path, principal)
        self._kept[key] = kept
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        return kept[1]

    async def _made(self, path: str, principal: Principal) -> bytes:
        now_ms = await self._broker.now_ms()
        data: list[Listed] = []
        counts: dict[str, dict[str, dict[str, int]]] = {}
        cut = False
        for model in sorted({m.name for _, m in usable(self._models, principal)}):
            lanes = [(cls, path) for cls in CLASSES]
            snapshot = await self._queues.of(model).snapshot((), lanes)
            data += self._waiting(model, path, snapshot, now_ms)
            data += _running(model, path, snapshot)
            found = _counts(path, snapshot)
            if found:
                counts[model] = found
            full = len(snapshot.running) >= SNAPSHOT_MAX
            cut = cut or full or any(len(o.first) < o.jobs for o in snapshot.lanes)
        return msgspec.json.encode(
            {
                "object": "list",
                "data": data[:JOBS_MAX],
                "models": counts,
                "truncated": cut or len(data) > JOBS_MAX,
            }
        )

    def _waiting(self, model: str, path: str, seen: Snapshot, now_ms: int) -> Iterator[Listed]:
        now, drain = asyncio.get_running_loop().time(), self._models.drain(model)
        for cls, lane in zip(CLASSES, seen.lanes, strict=True):
            for job in lane.first:
                eta_s = self._eta.seconds(model, cls, path, job.place, drain, now)
                yield Listed(
                    id=job.job,
                    model=model,
                    cls=cls,
                    state="waiting",
                    position=job.place,
                    eta_s=None if eta_s is None else round(eta_s, 1),
                    created=job.arrival // 1_000_000,
                    waiting_s=_seconds(now_ms - job.arrival // 1_000),
                    reason=self._models.closed(model, cls),
                )


def _running(model: str, path: str, seen: Snapshot) -> Iterator[Listed]:
    for job in seen.running:
        if job.user == path and job.owner:  # without an owner it has ended, and is not yet told
            yield Listed(
                id=job.job,
                model=model,
                cls=job.cls,
                state="running",
                position=None,
                eta_s=None,
                created=job.arrival // 1_000_000,
                # An attempt is numbered by the time of its `pop`.
                waiting_s=_seconds(job.attempt - job.arrival // 1_000),
            )


def _counts(path: str, seen: Snapshot) -> dict[str, dict[str, int]]:
    """How many of the user's jobs there are, by class and state; classes without any are left
    out."""
    found: defaultdict[str, dict[str, int]] = defaultdict(lambda: {"waiting": 0, "running": 0})
    for cls, lane in zip(CLASSES, seen.lanes, strict=True):
        if lane.jobs:
            found[cls]["waiting"] = lane.jobs
    for job in seen.running:
        if job.user == path and job.owner:
            found[job.cls]["running"] += 1
    return found


def _seconds(ms: int) -> float:
    return round(max(0, ms) / 1000, 1)
