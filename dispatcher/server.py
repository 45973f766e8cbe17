"""One dispatcher process: all its models, their backends, and what they share."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Collection

import httpx
from prometheus_client import CollectorRegistry

from common import keys
from common.broker import Broker, Subscriber
from common.clock import wall
from common.errors import BrokerError, WireError
from common.known import is_empty, remember
from common.links import Message
from common.metrics import DispatcherMetrics
from common.names import Resolve, resolve
from common.outcomes import Outcome
from common.publish import Publisher
from common.settings import ModelSettings, Settings
from common.wire import (
    REASON_MAX,
    VERSION,
    Ack,
    Announcement,
    Cancel,
    ServedModel,
    decode_announcement,
    decode_controls,
    encode_announcement,
)
from dispatcher.closing import Closing
from dispatcher.engine import EngineClient, open_transport
from dispatcher.leadership import wait
from dispatcher.loop import ModelLoop
from dispatcher.others import Others
from dispatcher.parts import Parts
from dispatcher.pool import Pool
from dispatcher.relay import Relay
from dispatcher.runs import Runs
from dispatcher.sources.sources import Sources

log = logging.getLogger("fairlane.dispatcher")

ANNOUNCE_S = 1.0
GONE_MS = 6_000
"""A dispatcher whose announcement is older serves nothing any more."""
FORGET_MS = 60_000
"""Its announcement is removed after this."""
REMEMBER_S = 10.0
"""Models with backends or waiting jobs are noted in `fl:known` this often; new ones sooner."""
FADE_S = 9.0
"""Gateways know within this time that a model is served no more."""
MODELS_MAX = 256
"""Most models one process serves, discovered ones included."""
FULL_S = 60.0
"""That there are more is logged this often."""


class Dispatcher:
    """Everything that pops, for all models of this process."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        owner: str,
        registry: CollectorRegistry,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        resolve: Resolve = resolve,
        seed: int | None = None,
    ) -> None:
        """`transport` carries requests to engines, `resolve` finds addresses: tests pass others."""
        self.owner = owner
        self._settings = settings
        self._broker = broker
        transport = transport or open_transport()
        self._client = EngineClient(transport)
        self._publisher = Publisher(broker, owner)
        self._metrics = DispatcherMetrics(registry)
        self._runs = Runs(broker, owner, settings.dispatcher)
        closing = Closing(owner, self._runs, settings.dispatcher, self._metrics)
        relay = Relay(self._client, closing, self._runs, settings.dispatcher, self._metrics)
        self._parts = Parts(
            broker, owner, settings.dispatcher, self._runs, relay, self._publisher,
            self._metrics, lambda model: self._others.known(self._now(), model),
        )  # fmt: skip
        self._loops: dict[str, ModelLoop] = {}
        self._looping: dict[str, asyncio.Task[None]] = {}
        self._full_at = -FULL_S
        self._pool = Pool(
            transport, settings.dispatcher, self._runs, self._loop_of, self._metrics,
            random.Random(seed),
        )  # fmt: skip
        self._sources = Sources(
            settings, broker, self._metrics, resolve,
            changed=lambda: self._pool.want(self._sources.wanted()),
        )  # fmt: skip
        self._serving = asyncio.TaskGroup()
        self._created = int(wall())
        self._others = Others(owner)
        self._fading: dict[str, float] = {}
        """Models that are to be forgotten -> since when they are announced no more."""
        self._subscriber = Subscriber(broker, (keys.control(owner),), self._deliver, self._wake_all)
        self.stopping = False

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with self._serving as group:
                group.create_task(self._subscriber.run())
                group.create_task(self._runs.run())
                group.create_task(self._announce())
                for name in self._settings.models:
                    self._loop_of(name)
                group.create_task(self._remember())
                group.create_task(self._pool.run())
                group.create_task(self._sources.run())
        finally:
            await self._publisher.close()
            await self._client.close()

    async def stop(self) -> None:
        """Stop popping at once, let running jobs finish for `drain_s`, hand back the rest."""
        self.stopping = True
        await asyncio.gather(*(loop.stop() for loop in self._loops.values()))
        deadline = self._now() + self._settings.dispatcher.drain_s
        await self._until_ended(deadline)
        for run in self._runs:
            run.stop(Outcome.FAILED)
        await self._until_ended(self._now() + 5.0)
        with contextlib.suppress(BrokerError):
            await self._broker.command("HDEL", keys.MODELS, self.owner)

    async def _until_ended(self, deadline: float) -> None:
        while len(self._runs) and self._now() < deadline:
            self._runs.ended.clear()
            await wait(self._runs.ended, deadline - self._now())

    def ready(self) -> bool:
        """Whether this process can serve: Redis is there, and a backend, if there is to be any."""
        reachable = any(b.reachable for loop in self._loops.values() for b in loop.backends)
        return self._broker.up.is_set() and (reachable or not self._pool.any_wanted())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def configure(self, settings: Settings) -> None:
        """Use the models and backends of another configuration: see common/reload.py."""
        self._settings = settings
        self._fading.clear()
        for name in settings.models:
            self._loop_of(name)
        for name, loop in self._loops.items():
            loop.configure(self._model(name))
        self._sources.configure(settings)

    async def _remember(self) -> None:
        noted, at = set[str](), self._now() - REMEMBER_S
        while True:
            used = {name for name, loop in self._loops.items() if loop.backends or loop.busy()}
            if used - noted or self._now() - at >= REMEMBER_S:
                try:
                    known = await remember(self._broker, used)
                except BrokerError as e:
                    log.debug("remembering models: %s", e)
                else:
                    noted, at = used, self._now()
                    for name in known:
                        self._loop_of(name)
                    if not self.stopping:
                        await self._forget(known)
            await asyncio.sleep(ANNOUNCE_S)

    def _loop_of(self, name: str) -> ModelLoop | None:
        """The loop of a model, begun where there is none; None: there are as many as may be."""
        loop = self._loops.get(name)
        if loop is None:
            if len(self._loops) >= MODELS_MAX:
                if self._now() - self._full_at >= FULL_S:
                    self._full_at = self._now()
                    log.warning("not served: %s; there are %d models already", name, MODELS_MAX)
                return None
            loop = self._loops[name] = ModelLoop(self._parts, name, self._model(name), [])
            self._subscriber.add(loop.queue.keys.bell)
            self._looping[name] = self._serving.create_task(loop.run())
        return loop

    async def _forget(self, known: Collection[str]) -> None:
        """End what is kept of models that are known no more: names come and go, such as those of
        adapters, and each would have a place among MODELS_MAX for good. Before that each is
        announced no more for FADE_S: jobs of it may be on their way."""
        for name, loop in list(self._loops.items()):
            if name in known or name in self._settings.models or not loop.unused:
                self._fading.pop(name, None)
                continue
            try:
                empty = await is_empty(self._broker, loop.queue.keys)
            except BrokerError as e:
                log.debug("forgetting %s: %s", name, e)
                return
            if not empty or not loop.unused:
                self._fading.pop(name, None)
            elif self._now() - self._fading.setdefault(name, self._now()) >= FADE_S:
                await self._end(name)

    async def _end(self, name: str) -> None:
        loop, task = self._loops.pop(name), self._looping.pop(name)
        del self._fading[name]
        self._subscriber.remove(loop.queue.keys.bell)
        self._others.forget(name)
        await loop.stop()
        task.cancel()
        await asyncio.wait((task,))
        if name not in self._loops:  # it may have come back meanwhile
            self._metrics.forget_model(name)
        log.info("%s: no backend for a day, forgotten", name)
        self._pool.again()

    def _model(self, name: str) -> ModelSettings:
        return self._settings.models.get(name) or ModelSettings()

    def _wake_all(self) -> None:
        for loop in self._loops.values():
            loop.look()

    def _deliver(self, message: Message) -> None:
        channel, data = message
        for loop in self._loops.values():
            if channel == loop.queue.keys.bell.encode():
                event, job, detail = data.decode().split(" ", 2)
                loop.ring(event, job, detail)
                return
        if channel != keys.control(self.owner).encode():
            return  # the bell of a model that was forgotten
        try:
            controls = decode_controls(data).controls
        except WireError as e:
            log.warning("dropped a control message: %s", e)
            return
        for control in controls:
            if isinstance(control, Ack):
                self._publisher.acknowledge(control)
            elif isinstance(control, Cancel):
                self._runs.cancel(control.job, control.attempt)
            else:
                self._publisher.resend(control)

    async def _announce(self) -> None:
        while True:
            self._publisher.alive(self._now())
            self._metrics.running(len(self._runs))
            try:
                await self._tell()
            except BrokerError as e:
                log.debug("announcing: %s", e)
            await asyncio.sleep(ANNOUNCE_S)

    async def _tell(self) -> None:
        now_ms = await self._broker.now_ms()
        entries = await self._broker.command("HGETALL", keys.MODELS)
        pairs = dict(zip(entries[::2], entries[1::2], strict=True))
        serving: dict[str, set[str]] = {}
        for name, data in pairs.items():
            try:
                announcement = decode_announcement(data)
            except WireError:
                continue
            age = now_ms - announcement.at_ms
            if age > FORGET_MS:
                await self._broker.command("HDEL", keys.MODELS, name)
            elif age <= GONE_MS:
                for model in announcement.models:
                    serving.setdefault(model.name, set()).add(name.decode())
        self._others.note(self._now(), serving, self._loops)
        for name, loop in self._loops.items():
            loop.election.see(self._others.of(name))
        if not self.stopping:
            loops = self._loops.items()
            served = (p for name, p in loops if name not in self._fading or p.backends)
            models = [self._served(loop) for loop in served]
            mine = Announcement(VERSION, now_ms, models, self._pool.served())
            await self._broker.command("HSET", keys.MODELS, self.owner, encode_announcement(mine))

    def _served(self, loop: ModelLoop) -> ServedModel:
        settings = self._model(loop.model)
        ready = any(b.reachable is not False and not b.drained for b in loop.backends)
        drain = loop.relays.drain.per_second(self._now())
        closed = {cls: text[:REASON_MAX] for cls, text in loop.reasons().items() if text}
        return ServedModel(
            loop.model, settings.aliases, ready, self._created, drain, len(loop.backends), closed
        )
