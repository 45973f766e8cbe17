"""The processes of Fairlane, put together: each role, and all of them in one."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import fakeredis
import msgspec
from prometheus_client import CollectorRegistry

from common.broker import Broker, open_link
from common.errors import BrokerDown, ConfigError
from common.service import bind, new_id, running, serve_asgi, stop_event
from common.settings import BackendSettings, Settings
from dispatcher.http import StatusApp
from dispatcher.server import Dispatcher
from fairlane.reload import Configuration, Reload
from fairlane.text import welcome
from gateway.batches.worker import BatchWorker
from gateway.server import Gateway, listen, serve
from sim.server import serve as serve_engine
from sim.settings import EngineSettings

log = logging.getLogger("fairlane")

START_S = 10.0
"""How long a starting process waits for Redis before it says so and ends."""
SIM_ENGINES = 2
READY_POLL_S = 0.05
NO_BACKEND = "--backend URL, [[backends]] or models.….backends, backends_file, /admin/backends"
"""Where backends may come from."""


@asynccontextmanager
async def connected(
    settings: Settings, server: fakeredis.FakeServer | None
) -> AsyncIterator[Broker]:
    """A broker that is there and may be used. Raises BrokerDown or ConfigError."""
    url = settings.redis.url
    if url is None and server is None:
        raise ConfigError("no Redis: give --redis URL, or set redis.url or FAIRLANE_REDIS_URL")
    link = open_link(url, timeout_s=settings.redis.command_timeout_s, server=server)
    broker = Broker(link)
    async with running(broker.run()):
        try:
            async with asyncio.timeout(START_S):
                await broker.up.wait()
        except TimeoutError:
            raise BrokerDown(f"no Redis at {_shown(url)} within {START_S:g} s") from None
        await broker.check()
        yield broker


def _shown(url: str | None) -> str:
    """A URL without its password."""
    if url is None or "@" not in url:
        return url or "the embedded broker"
    scheme, _, rest = url.partition("://")
    return f"{scheme}://…@{rest.rpartition('@')[2]}"


async def run_gateway(configuration: Configuration) -> None:
    """One gateway replica until SIGTERM; then it drains."""
    settings = configuration.settings
    async with AsyncExitStack() as stack:
        bound = stack.enter_context(listen(settings))
        broker = await stack.enter_async_context(connected(settings, None))
        gateway = Gateway(settings, broker, new_id("gateway"), CollectorRegistry())
        log.info("%s on http://%s:%d", gateway.replica, *bound.getsockname()[:2])
        async with asyncio.TaskGroup() as group:
            reload = Reload(configuration, (gateway.configure,))
            own = [group.create_task(reload.run()), group.create_task(gateway.run())]
            await serve(gateway, bound, stop_event())
            for task in own:
                task.cancel()


async def run_dispatcher(configuration: Configuration) -> None:
    """One dispatcher until SIGTERM; then it gives up its leads and finishes or hands back."""
    settings = configuration.settings
    registry = CollectorRegistry()
    host, port = settings.dispatcher.metrics_host, settings.dispatcher.metrics_port
    async with AsyncExitStack() as stack:
        listener = None if port is None else stack.enter_context(bind(host, port))
        broker = await stack.enter_async_context(connected(settings, None))
        dispatcher = Dispatcher(settings, broker, new_id("dispatcher"), registry)
        log.info("%s starts", dispatcher.owner)
        if not (backends_of(settings) or settings.backends_file):
            log.warning("there is no backend until one is added: %s", NO_BACKEND)
        stop = stop_event()
        async with asyncio.TaskGroup() as group:
            reload = Reload(configuration, (dispatcher.configure,))
            own = [group.create_task(reload.run()), group.create_task(dispatcher.run())]
            if listener is not None:
                own.append(group.create_task(_status(registry, dispatcher.ready, listener)))
            await stop.wait()
            log.info("stopping: running jobs may end; again to stop at once")
            await dispatcher.stop()
            for task in own:
                task.cancel()


async def run_batch_worker(configuration: Configuration) -> None:
    """One batch worker until SIGTERM; what it has in hand another goes on with."""
    settings = configuration.settings
    registry = CollectorRegistry()
    host, port = settings.batch.metrics_host, settings.batch.metrics_port
    async with AsyncExitStack() as stack:
        listener = None if port is None else stack.enter_context(bind(host, port))
        broker = await stack.enter_async_context(connected(settings, None))
        worker = BatchWorker(settings, broker, new_id("batch"), registry)
        await worker.check()
        log.info("%s starts", worker.tools.owner)
        stop = stop_event()
        async with asyncio.TaskGroup() as group:
            reload = Reload(configuration, (worker.configure,))
            own = [group.create_task(reload.run()), group.create_task(worker.run())]
            if listener is not None:
                own.append(group.create_task(_status(registry, worker.ready, listener)))
            await stop.wait()
            for task in own:
                task.cancel()


async def _status(
    registry: CollectorRegistry, ready: Callable[[], bool], listener: socket.socket
) -> None:
    """Serve a role's metrics and readiness."""
    log.info("metrics on http://%s:%d/metrics", *listener.getsockname()[:2])
    await serve_asgi(StatusApp(registry, ready), listener)


async def run_up(configuration: Configuration, say: Callable[[str], None]) -> None:
    """Everything in one process. `say` prints lines for people."""
    settings = configuration.settings
    server = fakeredis.FakeServer() if settings.redis.url is None else None
    registry = CollectorRegistry()
    simulated = not (backends_of(settings) or settings.models or settings.backends_file)
    async with AsyncExitStack() as stack:
        bound = stack.enter_context(listen(settings))
        if simulated:
            settings = await _with_engines(settings, stack)
        broker = await stack.enter_async_context(connected(settings, server))
        dispatcher = Dispatcher(settings, broker, new_id("dispatcher"), registry)
        gateway = Gateway(settings, broker, new_id("gateway"), registry)
        worker = BatchWorker(settings, broker, new_id("batch"), registry, server)
        batches = await _works(worker)
        stop, port = stop_event(), bound.getsockname()[1]
        parts = [gateway.configure, worker.configure]
        if not simulated:
            parts.append(dispatcher.configure)
        async with asyncio.TaskGroup() as group:
            own = [
                group.create_task(Reload(configuration, parts).run()),
                group.create_task(dispatcher.run()),
                group.create_task(gateway.run()),
                *([group.create_task(worker.run())] if batches else []),
                group.create_task(_welcome(settings, gateway, port, simulated, say)),
            ]
            await serve(gateway, bound, stop)
            await dispatcher.stop()
            for task in own:
                task.cancel()


async def _works(worker: BatchWorker) -> bool:
    """Whether batches can be run on this Redis; where not, everything else can."""
    try:
        await worker.check()
    except ConfigError as e:
        log.warning("%s: no batch is run here", e)
        return False
    return True


async def _welcome(
    settings: Settings, gateway: Gateway, port: int, simulated: bool, say: Callable[[str], None]
) -> None:
    """Say where it is once it can serve, or what keeps it from serving."""
    loop = asyncio.get_running_loop()
    warn_at = loop.time() + START_S
    while missing := _missing(gateway):
        await asyncio.sleep(READY_POLL_S)
        if loop.time() > warn_at:
            where = ", ".join(b.url for b in backends_of(settings)) or NO_BACKEND
            say(f"not ready: {', '.join(missing)} ({where}); waiting")
            warn_at = float("inf")
    model = next((name for name, _ in gateway.models.listing()), "MODEL")
    say(welcome(settings, port, model, simulated=simulated))


def _missing(gateway: Gateway) -> list[str]:
    """What keeps it from answering at once, though it may take jobs already."""
    silent = [] if gateway.models.ready else ["no model has a backend that answers"]
    return gateway.not_ready() or silent


async def _with_engines(settings: Settings, stack: AsyncExitStack) -> Settings:
    """Start simulated engines on free ports of the loopback and make them the backends."""
    backends = []
    for n in range(SIM_ENGINES):
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        engine = EngineSettings(model="sim", max_num_seqs=8, step_ms=20.0, instance=str(n))
        serving = serve_engine(engine, port=0, on_ready=port.set_result)
        await stack.enter_async_context(running(serving))
        backends.append(BackendSettings(url=f"http://127.0.0.1:{await port}", max_num_seqs=8))
    return msgspec.structs.replace(settings, backends=backends)


async def run_sim(engine: EngineSettings, host: str, port: int) -> None:
    """One simulated engine until SIGTERM."""

    def ready(bound: int) -> None:
        log.info("simulated engine of %s on http://%s:%d", ", ".join(engine.models), host, bound)

    stop = stop_event()
    async with asyncio.TaskGroup() as group:
        own = group.create_task(serve_engine(engine, host, port, on_ready=ready))
        await stop.wait()
        own.cancel()


def backends_of(settings: Settings) -> list[BackendSettings]:
    """All backends of a configuration."""
    return [*settings.backends, *(b for m in settings.models.values() for b in m.backends)]
