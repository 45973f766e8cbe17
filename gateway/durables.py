"""What the APIs over durable jobs share: whose a job is, putting it on the queue, its place."""

import asyncio
import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

import msgspec

from common.broker import Broker
from common.durable import About, Durable, Status, Submitted, keyed_id
from common.errors import BrokerDown, BrokerError, BrokerUncertain, WireError
from common.intake.answers import (
    RETRY_S_MAX,
    RETRY_S_MIN,
    Answer,
    Refusal,
    bad_request,
    unavailable,
)
from common.intake.job import job_id
from common.intake.models import Models
from common.intake.queues import Queues
from common.joblog import Live, TooManyFollowersError
from common.settings import GatewaySettings
from gateway.eta import Eta
from gateway.intake import Accepted, Intake
from gateway.metrics import GatewayMetrics
from gateway.submit import AGAIN_S, ENQUEUE_S, ENQUEUE_TRIES, LARGE_BYTES, LARGE_S, Desk

log = logging.getLogger("fairlane.gateway")

SINK = "webhooks"
"""The list of ended jobs that have a webhook."""
KEY_CHARS_MAX = 255
"""Longest idempotency key."""
PLACES_S = 1.0
"""A place is unknown where Redis takes longer than this."""
CANCEL_S = 2.0
"""So long is waited for a run that is to stop."""
_ID = re.compile(r"[0-9a-f]{32}\Z")

CONFLICT = Answer(
    status=409,
    message="This idempotency key was used for another request.",
    param="idempotency_key",
    code="idempotency_key_reused",
)
FULL = Answer(
    status=429,
    message="Too many of your jobs are kept: delete some, or wait until they expire.",
    type="rate_limit_error",
    code="too_many_jobs",
    retry_after_s=RETRY_S_MAX,
)
SWEPT = 100
"""So many of a user's oldest jobs are looked at for expired ones, where they are too many."""


class Standing(msgspec.Struct, frozen=True):
    """Where a waiting job stands; None where that is not known, or it does not wait."""

    place: int | None = None
    eta_s: float | None = None


NOWHERE = Standing()


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """How a durable job is to be kept, and by whom it was asked for."""

    kind: str
    ttl_s: int
    digest: str
    metadata: dict[str, str] = {}
    webhook: str = ""
    key: str = ""
    """Its idempotency key."""
    extra: bytes = b""


class Durables:
    """The durable jobs as one gateway sees them. `live.run` must run."""

    def __init__(
        self, broker: Broker, settings: GatewaySettings, intake: Intake, models: Models,
        queues: Queues, eta: Eta, desk: Desk, metrics: GatewayMetrics,
    ) -> None:  # fmt: skip
        self.queues = queues
        self.live = Live(broker)
        self.jobs = Durable(broker, queues.of)
        self.broker = self._broker = broker
        self._settings = settings
        self._intake = intake
        self._models = models
        self._eta = eta
        self._desk = desk
        self._metrics = metrics
        self._large = asyncio.Lock()

    async def submit(self, a: Accepted, body: bytes, wanted: Wanted) -> About:
        """Put an accepted request on the queue: with an idempotency key once, and then what is
        there already is told. Raises Refusal (409, 429, 503)."""
        owner = a.who.path
        wait_ms = int(self._settings.job_wait_s * 1000)
        new = self._intake.job(
            a, body, id=keyed_id(owner, wanted.key) if wanted.key else job_id(), wait_ms=wait_ms,
            keep_ms=wanted.ttl_s * 1000, sink=SINK if wanted.webhook else "",
        )  # fmt: skip
        limits = self._intake.limits(a)
        with outages():
            if not (wanted.key and await self.jobs.find(new.id)):
                await self._room(owner)
            about = About(
                id=new.id, model=a.model.name, user=a.who.user, sub=a.who.sub, cls=a.cls,
                path=a.row.path, stream=a.stream, created_ms=await self._broker.now_ms(),
                wait_ms=wait_ms, ttl_s=wanted.ttl_s, metadata=wanted.metadata,
                webhook=wanted.webhook, digest=wanted.digest, kind=wanted.kind, extra=wanted.extra,
            )  # fmt: skip
            async with self._turn(len(new.body)):
                word, about = await self._patiently(lambda: self.jobs.submit(new, about, limits))
        if word == "conflict":
            raise Refusal(CONFLICT)
        if word not in ("queued", "known"):
            raise self._desk.refused(word, a.model.name, a.cls, owner, limits)
        if word == "queued":
            self._metrics.job(wanted.kind)
        return about

    async def _room(self, owner: str) -> None:
        """Raises Refusal (429) for a user who has as many jobs as may be kept."""
        most = self._settings.user_kept_max
        if await self.jobs.kept(owner) >= most:
            await self.jobs.own(owner, limit=SWEPT, order="asc")  # the expired leave the list
            if await self.jobs.kept(owner) >= most:
                raise Refusal(FULL)

    async def find(self, owner: str, id: str, missing: Answer, *kinds: str) -> About:
        """A user's job of one of these kinds. Raises Refusal (`missing`) for one that is another's
        as for one that is none, and 503."""
        with outages():
            about = await self.jobs.find(id) if _ID.match(id) else None
        if about is None or about.owner != owner or about.kind not in kinds:
            raise Refusal(missing)
        return about

    async def standings(self, abouts: Sequence[About]) -> dict[str, Standing]:
        """Where jobs stand, by id; those that do not wait, or of which Redis does not tell in time,
        are left out."""
        models: defaultdict[str, list[About]] = defaultdict(list)
        for about in abouts:
            models[about.model].append(about)
        found: dict[str, Standing] = {}
        try:
            async with asyncio.timeout(PLACES_S):
                for model, jobs in models.items():
                    asked = [(a.cls, a.owner, a.id) for a in jobs]
                    seen = await self.queues.of(model).snapshot(asked, runs=False)
                    for about, place in zip(jobs, seen.places, strict=True):
                        if place:
                            found[about.id] = self._standing(about, place)
        except (BrokerError, TimeoutError) as e:
            log.debug("places: %s", e)
        return found

    async def stop(self, about: About) -> Status:
        """Cancel a job wherever it is, and wait up to CANCEL_S for its end; how it stands then.
        Raises BrokerError."""
        word = await self.jobs.cancel(about)
        status = await self.jobs.status(about)
        if word != "flagged" or status.over:
            return status
        k = self.queues.of(about.model).keys
        with contextlib.suppress(TimeoutError, TooManyFollowersError):
            async with asyncio.timeout(CANCEL_S):
                with self.live.watching(k, about.id) as grown:
                    while not (status := await self.jobs.status(about)).over:
                        await grown.wait()
                        grown.clear()
        return status

    async def _patiently(
        self, submit: Callable[[], Awaitable[tuple[Submitted, About]]]
    ) -> tuple[Submitted, About]:
        """Again where it may or may not have run: it is the same job. Raises BrokerError."""
        end = asyncio.get_running_loop().time() + ENQUEUE_S
        for left in reversed(range(ENQUEUE_TRIES)):
            try:
                return await submit()
            except BrokerUncertain:
                if not left:
                    raise
            if not await self._broker.back(AGAIN_S, end):
                break
        raise BrokerDown("Redis did not say whether the job is there")

    def _standing(self, about: About, place: int) -> Standing:
        now = asyncio.get_running_loop().time()
        self._eta.look(about.model, about.cls, about.owner, about.id, place, now)
        drain = self._models.drain(about.model)
        return Standing(
            place, self._eta.seconds(about.model, about.cls, about.owner, place, drain, now)
        )

    @contextlib.asynccontextmanager
    async def _turn(self, size: int) -> AsyncGenerator[None, None]:
        """Large bodies go to Redis one at a time, as those of other requests do."""
        if size <= LARGE_BYTES:
            yield
            return
        try:
            async with asyncio.timeout(LARGE_S):
                await self._large.acquire()
        except TimeoutError:
            raise Refusal(unavailable(RETRY_S_MIN)) from None
        try:
            yield
        finally:
            self._large.release()


@contextlib.contextmanager
def outages() -> Iterator[None]:
    """A Redis that does not do what was asked is a 503."""
    try:
        yield
    except (BrokerError, WireError) as e:
        log.debug("durable jobs: %s", e)
        raise Refusal(unavailable(RETRY_S_MIN)) from None


def idempotency_key(header: bytes | None, field: str | None = None) -> str:
    """The key of a request, empty where it has none. Raises Refusal (400)."""
    named = None if header is None else header.decode("latin-1").strip()
    if named is not None and field is not None and named != field:
        text = "The header `Idempotency-Key` and `idempotency_key` differ."
        raise bad_request(text, "idempotency_key")
    key = field if named is None else named
    if key is not None and not 1 <= len(key) <= KEY_CHARS_MAX:
        text = f"`idempotency_key` must have 1 to {KEY_CHARS_MAX} characters."
        raise bad_request(text, "idempotency_key")
    return key or ""
