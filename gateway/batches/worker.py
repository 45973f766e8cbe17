"""The batch worker: arq runs the turns. Each second one worker puts a turn of every batch that
nobody runs on arq's queue, under an id of its own for each lease, so that it is there once; each
minute one removes what ended batches have left.

arq has no part in a batch's state: what a turn may do is decided by the batch's lease, so it does
not matter when arq runs one twice, or forgets one.
"""

import asyncio
import contextlib
import logging
from typing import Any

import fakeredis
import msgspec
import redis.asyncio
import redis.exceptions
from arq.connections import ArqRedis
from arq.cron import cron
from arq.utils import poll
from arq.worker import Function, Worker, func
from prometheus_client import CollectorRegistry

from common import keys
from common.broker import Broker
from common.errors import BrokerError, ConfigError, StoreError
from common.settings import Settings
from common.store import Store
from gateway.batches import finish
from gateway.batches.run import Tools
from gateway.batches.turns import Turns
from gateway.files import Files

log = logging.getLogger("fairlane.batches")

TURN_JOB_S = 900
"""arq gives a turn up after this: reading and checking a large input on a slow store, or writing
its files, is one turn. One that hangs keeps its batch for so long."""
LEFT_MS = 900_000
"""What ended batches have left is removed after so long: no job of theirs ends later."""
CLEAN_MAX = 100
"""Ended batches cleaned at once."""
EXTRA_MS = 60_000
"""What arq has queued is forgotten after so long: it is queued again each second."""
POLL_S = 0.2
SLOT_S = 5.0
AGAIN_S = 1.0
_encoder = msgspec.msgpack.Encoder(enc_hook=repr)
_decoder = msgspec.msgpack.Decoder()
_SECONDS = set(range(60))


class FakeArqRedis(fakeredis.FakeAsyncRedis, ArqRedis):  # type: ignore[misc]
    """arq's client of the embedded broker."""


class _EmbeddedWorker(Worker):
    """arq's worker without the line about the server that it logs first: the embedded broker has
    no INFO."""

    async def main(self) -> None:
        """Until cancelled."""
        self.ctx["redis"] = self.pool
        async for _ in poll(self.poll_delay_s):
            await self._poll_iteration()


class BatchWorker:
    """One worker. `run` until cancelled."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        owner: str,
        registry: CollectorRegistry,
        server: fakeredis.FakeServer | None = None,
    ) -> None:
        """`server`: the embedded broker, where there is no Redis."""
        store = Store(settings.store.url, settings.store.options, make=False)
        self.tools = Tools(settings, broker, owner, Files(store, settings.store), store, registry)
        self.turns = Turns(self.tools)
        logging.getLogger("arq").setLevel(logging.WARNING)  # else several lines a second
        self._url = settings.redis.url
        self._server = server
        self._broker = broker
        self._swept = ""

    def ready(self) -> bool:
        """Whether it can work."""
        return self._broker.up.is_set()

    def configure(self, settings: Settings) -> None:
        """Use the models of another configuration: see common/reload.py. What a batch's key may do
        was written down when the batch was made."""
        self.tools.models.configure(settings.models)
        self.tools.policies.configure(settings.models)

    async def check(self) -> None:
        """Raises ConfigError for a Redis Cluster, BrokerError where Redis cannot be asked."""
        if self._server is not None:
            return
        info = (await self._broker.command("INFO", "cluster")).decode()
        if "cluster_enabled:1" in info:
            raise ConfigError(
                "the batch worker needs a single Redis, for arq does not work on a Redis Cluster"
            )

    async def run(self) -> None:
        """Work until cancelled; turns that are under way end at once, and others go on with them
        after their lease."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.tools.models.run())
            group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            worker = self._worker()
            try:
                await worker.main()
            except (redis.exceptions.RedisError, OSError, BrokerError) as e:
                log.warning("batch worker: %s", e)
            finally:
                await _close(worker)
            await asyncio.sleep(AGAIN_S)

    def _worker(self) -> Worker:
        """arq's, on a connection of its own."""
        if self._url is None:
            pool: ArqRedis = FakeArqRedis(server=self._server)
        else:
            pool = ArqRedis(redis.asyncio.ConnectionPool.from_url(self._url))
        pool.job_serializer, pool.job_deserializer = _encoder.encode, _decoder.decode
        pool.default_queue_name = keys.BATCH_TURNS
        pool.expires_extra_ms = EXTRA_MS
        turn: Function = func(self._turn, name="turn", max_tries=1, keep_result=0)
        kind = Worker if self._url is not None else _EmbeddedWorker
        return kind(
            [turn],
            queue_name=keys.BATCH_TURNS,
            redis_pool=pool,
            cron_jobs=[
                cron(self._tick, name="tick", second=_SECONDS, keep_result=0, timeout=10),
                cron(self._clean, name="clean", second=30, keep_result=0, timeout=60),
            ],
            handle_signals=False,
            max_jobs=self.tools.settings.turns_max + 2,
            job_timeout=TURN_JOB_S,
            keep_result=0,
            poll_delay=POLL_S,
            job_serializer=_encoder.encode,
            job_deserializer=_decoder.decode,
            log_results=False,
        )

    async def _tick(self, ctx: dict[Any, Any]) -> None:
        """Put a turn of each batch that nobody runs on arq's queue."""
        tools = self.tools
        with contextlib.suppress(BrokerError):
            active = await tools.batches.active(tools.settings.active_max)
            tools.metrics.active(len(active))
            now_ms = await tools.broker.now_ms()
            for id, fence in await tools.batches.idle([id for id, _ in active], now_ms):
                await self._enqueue(ctx["redis"], id, fence)

    async def _turn(self, ctx: dict[Any, Any], id: str) -> None:
        if await self.turns.turn(id):
            for _, fence in await self.tools.batches.idle([id], 1 << 60):
                await self._enqueue(ctx["redis"], id, fence)

    async def _enqueue(self, pool: ArqRedis, id: str, fence: int) -> None:
        # Another id after a while, for arq holds on to that of a worker that died with it.
        slot = int(asyncio.get_running_loop().time() / SLOT_S)
        await pool.enqueue_job("turn", id, _job_id=f"{id}:{fence}:{slot}")

    async def _clean(self, ctx: dict[Any, Any]) -> None:
        """Remove what ended batches have left."""
        batches = self.tools.batches
        with contextlib.suppress(BrokerError, StoreError):
            before = await self.tools.broker.now_ms() - LEFT_MS
            for id, model in await batches.over_since(before, CLEAN_MAX):
                await finish.clean(self.tools, id.removeprefix("batch_"))
                await batches.removed(id, model)
            self._swept = await finish.sweep(self.tools, self._swept)


async def _close(worker: Worker) -> None:
    """Cancel its turns and wait for their end."""
    for task in worker.tasks.values():
        task.cancel()
    await asyncio.gather(*worker.tasks.values(), return_exceptions=True)
    with contextlib.suppress(redis.exceptions.RedisError, OSError):
        await worker.pool.aclose(close_connection_pool=True)
