"""A request whose path is in the route table, from its headers to its exchange."""

import asyncio
from collections.abc import Callable
from functools import partial

from common.intake import body as bodies
from common.intake.answers import RETRY_S_MIN, Refusal, unavailable
from common.intake.routes import Row
from common.keys import CLASSES
from common.settings import Settings
from gateway.client import Client
from gateway.intake import Accepted, Intake
from gateway.metrics import GatewayMetrics
from gateway.pages import Handler
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
        intake: Intake,
        desk: Desk,
        watch: Watch,
        metrics: GatewayMetrics,
    ) -> None:
        self._settings = settings
        self._intake = intake
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

    async def exchange(self, client: Client, accepted: Accepted, body: bytes) -> Exchange:
        """Queue a request; the caller must let go of the body, for the ticket holds it as long as
        it is needed, and `run` what this returns. Raises as `serve`."""
        new = self._intake.job(accepted, body, replica=self._desk.replica)
        ticket = await self._desk.submit(new, accepted.model.name, self._intake.limits(accepted))
        comments = accepted.stream and accepted.principal.comments
        timing = self._timings[accepted.cls, not comments]
        return Exchange(
            client, ticket, self._desk, self._watch, self._metrics, timing, accepted.row.dialect
        )

    async def _serve(self, row: Row, client: Client) -> None:
        self._intake.keys.principal(client.authorization)  # before anything is read
        body = await client.read_body(self._settings.gateway.body_max_bytes)
        accepted = self._intake.accept(row, client, bodies.read(body))
        exchange = await self.exchange(client, accepted, body)
        del body, accepted
        await exchange.run()


def _timing(settings: Settings, cls: str, quiet: bool) -> Timing:
    gateway, dispatcher = settings.gateway, settings.dispatcher
    first = gateway.comment_first_interactive_s if cls == "interactive" else gateway.comment_first_s
    run_s = dispatcher.first_byte_s * dispatcher.tries_max + _RUN_SPARE_S
    if quiet:
        return Timing(_INF, _INF, run_s)
    return Timing(first, gateway.comment_every_s, run_s)
