"""A request whose path is in the route table, from its headers to its exchange."""

import asyncio
from collections.abc import Callable
from functools import partial

from common.intake import body as bodies
from common.intake.answers import RETRY_S_MIN, Refusal, unavailable
from common.intake.job import new_job
from common.intake.models import Models
from common.intake.policy import Policies
from common.intake.routes import Row
from common.jobs import NewJob
from common.keys import CLASSES
from common.settings import Settings
from common.wire import ServedModel
from gateway.auth import Keys, Principal, choose_class, open_user
from gateway.background import demoted
from gateway.client import Client
from gateway.metrics import GatewayMetrics
from gateway.pages import Handler, find
from gateway.people import Who
from gateway.stream import Exchange, Timing
from gateway.submit import Desk
from gateway.watch import Watch

_INF = float("inf")
_RUN_SPARE_S = 30.0
"""What a job may take beside the first bytes it waits for, before its gateway gives it up."""
_SHUT_S = 5.0
"""Time for exchanges that were told to end."""


class Front:
    """Accepts requests, and knows how many are open."""

    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        models: Models,
        policies: Policies,
        desk: Desk,
        watch: Watch,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._models = models
        self._policies = policies
        self._desk = desk
        self._watch = watch
        self._metrics = metrics
        self._timings = {(c, quiet): _timing(settings, c, quiet) for c in CLASSES
                         for quiet in (False, True)}  # fmt: skip
        self.open = 0
        """Requests being served."""
        self.draining = False
        self._idle = asyncio.Event()

    async def serve(self, row: Row, client: Client) -> None:
        """Answer one request. Raises Refusal, or ClientGone."""
        await self.admitted(partial(self._serve, row), client)

    async def admitted(self, handler: Handler, client: Client) -> None:
        """Answer by this handler, as one of those that `drain` waits for. Raises as it does, and
        Refusal where no more are taken."""
        if self.draining:
            raise Refusal(unavailable(RETRY_S_MIN, close=True))
        if self.open >= self._settings.gateway.connections_max:
            raise Refusal(unavailable(RETRY_S_MIN))
        self.open += 1
        try:
            await handler(client)
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    async def drain(self, seconds: float, end: Callable[[], None]) -> None:
        """Accept nothing more; wait so long for what is open, then end it: `end` ends what is no
        exchange."""
        self.draining = True
        if not await self._until_idle(seconds):
            self._watch.shut_down()
            end()
            await self._until_idle(_SHUT_S)

    async def _until_idle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self.open:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _serve(self, row: Row, client: Client) -> None:
        principal = self._keys.principal(client.authorization)
        new, model, timing = self._accept(
            row, client, principal, await client.read_body(self._settings.gateway.body_max_bytes)
        )
        limits = self._policies.of(model.name).limits(new.cls, principal.key_jobs)
        ticket = await self._desk.submit(new, model.name, limits)
        del new  # the ticket alone holds the body, so that it can be let go
        exchange = Exchange(client, ticket, self._desk, self._watch, self._metrics, timing)
        await exchange.run()

    def _accept(
        self, row: Row, client: Client, principal: Principal, body: bytes
    ) -> tuple[NewJob, ServedModel, Timing]:
        """The job of a body. Raises Refusal."""
        fields = bodies.read(body)
        model = find(self._models, principal, fields.model)
        if not self._models.accepts(model):
            raise Refusal(unavailable(self._desk.retry_after(model.name)))
        cls = choose_class(principal, client.cls, fields.service_tier)
        cls = demoted(cls, principal.background, client.headers, fields.top)
        who = _who(principal, client, fields)
        new = new_job(
            row, fields, body, model, self._policies.of(model.name), user=who.user, sub=who.sub,
            weight=principal.weight, cls=cls, replica=self._desk.replica,
        )  # fmt: skip
        stream = row.streams and fields.stream
        return new, model, self._timings[cls, not (stream and principal.comments)]


def _who(principal: Principal, client: Client, fields: bodies.Fields) -> Who:
    if principal.people is None:
        return Who(open_user(fields.user, client.authorization, client.peer))
    return principal.people.who(client.headers, fields.user)


def _timing(settings: Settings, cls: str, quiet: bool) -> Timing:
    gateway, dispatcher = settings.gateway, settings.dispatcher
    first = gateway.comment_first_interactive_s if cls == "interactive" else gateway.comment_first_s
    run_s = dispatcher.first_byte_s * dispatcher.tries_max + _RUN_SPARE_S
    if quiet:
        return Timing(_INF, _INF, run_s)
    return Timing(first, gateway.comment_every_s, run_s)
