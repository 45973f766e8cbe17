"""One gateway replica: its parts, its own loops, and the HTTP server in front of them."""

import asyncio
import contextlib
import ipaddress
import logging
import socket

from prometheus_client import CollectorRegistry

from common.broker import Broker
from common.errors import BrokerError, ConfigError
from common.follow import Follower
from common.intake.models import Models
from common.intake.policy import Policies
from common.intake.queues import Queues
from common.queue import heartbeat
from common.service import bind, serve_asgi
from common.settings import Settings
from common.store import Store
from gateway.admin import Admin
from gateway.app import App
from gateway.auth import Keys
from gateway.batches_api import BatchesApi
from gateway.durables import Durables
from gateway.eta import Eta
from gateway.files import Files
from gateway.files_api import FilesApi
from gateway.following import Follow
from gateway.front import Front
from gateway.intake import Intake
from gateway.jobs_api import JobsApi
from gateway.listing import Listing
from gateway.metrics import GatewayMetrics
from gateway.pages import Pages
from gateway.responses_api import ResponsesApi
from gateway.sender import HttpSender, Sender
from gateway.submit import Desk
from gateway.watch import Watch
from gateway.webhooks import Webhooks

log = logging.getLogger("fairlane.gateway")

HEARTBEAT_S = 1.0
BEAT_STALE_S = 5.0
"""Not ready once Redis has not taken a heartbeat for so long."""
_FLUSH_S = 2.0
_INF = float("inf")


class Gateway:
    """All of one replica but its socket. `app` serves once `run` runs."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        replica: str,
        registry: CollectorRegistry | None = None,
        sender: Sender | None = None,
    ) -> None:
        gateway = settings.gateway
        self.settings = settings
        self._broker = broker
        self.replica = replica
        self.follower = Follower(broker, replica, window=gateway.client_buffer_bytes)
        self.models = Models(broker, settings.models, waits=gateway.wait_for_backend)
        self._policies = policies = Policies(settings.models, gateway)
        queues = Queues(broker, policies)
        eta = Eta()
        self._watch = Watch(queues, self.models, eta)
        self._beat_at = -_INF
        metrics = GatewayMetrics(registry or CollectorRegistry())
        self._keys = keys = Keys(settings.keys)
        self.desk = Desk(broker, self.follower, self.models, queues, eta, gateway, metrics)
        intake = Intake(keys, self.models, policies, self.desk)
        self._front = Front(settings, intake, self.desk, self._watch, metrics)
        pages = Pages(keys, self.models, metrics.registry, self.not_ready)
        listing = Listing(broker, keys, self.models, queues, eta)
        store = settings.store
        self.files = Files(Store(store.url, store.options, make=store.url is None), store)
        self._files_api = FilesApi(keys, self.files, store.files_max_bytes)
        batches = BatchesApi(keys, self.files, broker, settings.batch)
        self._durables = durables = Durables(
            broker, gateway, intake, self.models, queues, eta, self.desk, metrics
        )
        self.follow = Follow(durables, gateway.comment_every_s)
        metrics.followers(lambda: self.follow.open)
        self.webhooks = Webhooks(
            broker, durables, self.models, gateway, settings.keys, replica, metrics,
            sender or HttpSender(gateway),
        )  # fmt: skip
        jobs = JobsApi(gateway, intake, durables, self.follow, self.webhooks)
        responses = ResponsesApi(gateway, self._front, intake, durables, self.follow)
        self.app = App(
            self._front, pages, listing, self._files_api, jobs, responses, batches,
            Admin(broker, keys), metrics,
            gateway.cors_origins,
        )  # fmt: skip

    def configure(self, settings: Settings) -> None:
        """Use the keys and models of another configuration: see common/reload.py."""
        if self._keys.open and settings.keys:
            log.info("there are keys now: requests without one are refused")
        elif not self._keys.open and not settings.keys:
            log.warning("all keys are gone from the configuration, so the old ones stay")
        if settings.keys or self._keys.open:
            self._keys.configure(settings.keys)
            self.webhooks.configure(settings.keys)
        self.models.configure(settings.models)
        self._policies.configure(settings.models)

    async def run(self) -> None:
        """The replica's own loops, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.follower.run())
            group.create_task(self.models.run())
            group.create_task(self.desk.run())
            group.create_task(self._watch.run())
            group.create_task(self._files_api.sweep())
            group.create_task(self._durables.live.run())
            group.create_task(self.webhooks.run())
            group.create_task(self._heartbeat())

    @property
    def up(self) -> bool:
        """Whether it has reached Redis and looked at what there is, whatever it found."""
        return self.models.loaded and self.follower.ready.is_set() and self._beat_at > -_INF

    def not_ready(self) -> list[str]:
        """Why no request can be served just now; empty: it can."""
        silent = asyncio.get_running_loop().time() - self._beat_at > BEAT_STALE_S
        reasons = (
            (self._front.draining, "shutting down"),
            (not self._broker.up.is_set() or silent, "Redis does not answer"),
            (not self.follower.ready.is_set(), "not subscribed"),
            (not self.models.accepting, "no model has a backend that answers"),
        )
        return [text for holds, text in reasons if holds]

    async def drain(self) -> None:
        """Accept nothing more, let open requests end within `drain_s`, end the rest, and cancel
        their jobs. `run` must still run."""
        await self.app.drain(self.settings.gateway.drain_s, self.follow.shut_down)
        with contextlib.suppress(TimeoutError, BrokerError):
            async with asyncio.timeout(_FLUSH_S):
                await self.desk.cancels.flush()
                await self.follower.flush()

    async def _heartbeat(self) -> None:
        while True:
            try:
                word = await heartbeat(self._broker, self.replica)
            except BrokerError as e:
                log.debug("heartbeat: %s", e)
            else:
                self._beat_at = asyncio.get_running_loop().time()
                if word == "missing":
                    self.desk.reassert()
            await asyncio.sleep(HEARTBEAT_S)


def listen(settings: Settings) -> socket.socket:
    """The gateway's bound socket. Raises ConfigError where the address is taken or unusable, or
    is open to others while there are no keys."""
    host, port = settings.gateway.host, settings.gateway.port
    if not (settings.keys or settings.gateway.insecure or _is_loopback(host)):
        raise ConfigError(
            f"gateway.host {host} is open to other machines and there are no [[keys]]: "
            "add keys, bind to 127.0.0.1, or say --insecure"
        )
    return bind(host, port)


async def serve(gateway: Gateway, listener: socket.socket, stop: asyncio.Event) -> None:
    """Serve HTTP on a socket of `listen` until `stop` is set; then drain, and close it.

    `gateway.run` must run beside it until it returns. Signals are the caller's.
    """
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve_asgi(gateway.app, listener))
        await stop.wait()
        log.info("stopping: open requests may end; again to stop at once")
        await gateway.drain()
        serving.cancel()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
