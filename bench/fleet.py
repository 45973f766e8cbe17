"""The processes that are measured, each on its core.

Redis, one gateway and one dispatcher share one core; engines and the load share another. Where the
machine has only one core, or cannot pin, nothing is pinned and the report says so.
"""

import asyncio
import contextlib
import os
import resource
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import psutil

from bench.client import Target
from bench.engine import Engine
from sim.settings import EngineSettings
from tests.support.processes import Role
from tests.support.redis_server import RedisServer

FILES_WANTED = 20_000
USERS = 64
MODEL = "sim"


class Cores(msgspec.Struct, frozen=True):
    """Where things run; None: anywhere."""

    product: int | None
    load: int | None

    def __str__(self) -> str:
        if self.product is None:
            return "not pinned: all share what there is"
        return f"Fairlane and Redis on core {self.product}, engines and load on core {self.load}"


def choose_cores() -> Cores:
    """The first two cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return Cores(None, None)
    found = sorted(os.sched_getaffinity(0))
    return Cores(found[0], found[1]) if len(found) > 1 else Cores(None, None)


def pin(pid: int, core: int | None) -> None:
    """Put all threads of a process on one core; None: leave them."""
    if core is None:
        return
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, {core})


def raise_file_limit() -> int:
    """Allow many sockets; what is allowed now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


class Fleet:
    """One gateway and one dispatcher on a Redis of their own, in front of the given engines."""

    def __init__(self, folder: Path, server: RedisServer, cores: Cores) -> None:
        self.redis = server
        self.cores = cores
        config = ["--config", str(folder / "fairlane.toml"), "--redis", server.url]
        self.gateway = Role("gateway", ["gateway", *config, "--port", "0"], folder)
        self.dispatcher = Role("dispatcher", ["dispatcher", *config, "--metrics-port", "0"], folder)

    @property
    def target(self) -> Target:
        """Where requests through Fairlane go."""
        return Target.of(self.gateway.url)

    def start(self) -> None:
        """Start both and wait until they can serve."""
        for role in (self.gateway, self.dispatcher):
            role.start()
            pin(role.pid, self.cores.product)
        self.dispatcher.wait_ready("/readyz")
        self.gateway.wait_ready("/readyz")

    def close(self) -> None:
        """Kill both."""
        self.gateway.close()
        self.dispatcher.close()

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each process has used."""
        return {
            name: sum(psutil.Process(pid).cpu_times()[:2])
            for name, pid in (
                ("gateway", self.gateway.pid),
                ("dispatcher", self.dispatcher.pid),
                ("redis", self.redis.pid),
            )
        }


@contextmanager
def redis_alone(cores: Cores) -> Iterator[RedisServer]:
    """An empty Redis on the product's core."""
    with RedisServer() as server:
        pin(server.pid, cores.product)
        yield server


@asynccontextmanager
async def fleet(cores: Cores, engines: Sequence[str], slots: int) -> AsyncIterator[Fleet]:
    """Fairlane in front of the engines at these URLs, ready; all is ended afterwards.

    It starts in a thread, for engines in this loop must answer meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name, redis_alone(cores) as redis:
        folder = Path(name)
        (folder / "fairlane.toml").write_text(config(engines, slots))
        made = Fleet(folder, redis, cores)
        try:
            await asyncio.to_thread(made.start)
            yield made
        finally:
            made.close()


@asynccontextmanager
async def engines(count: int, step_s: float) -> AsyncIterator[list[Engine]]:
    """Paced engines in this process's loop."""
    made = [Engine(step_s) for _ in range(count)]
    try:
        for engine in made:
            await engine.start()
        yield made
    finally:
        for engine in made:
            await engine.close()


@contextmanager
def simulated(cores: Cores, settings: EngineSettings) -> Iterator[Role]:
    """One `fairlane sim`, a process of its own beside the load."""
    flags = {
        "--port": 0, "--model": MODEL, "--max-num-seqs": settings.max_num_seqs,
        "--step-ms": settings.step_ms, "--mean-output-tokens": settings.mean_output_tokens,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name:
        role = Role("sim", ["sim", *(str(w) for f in flags.items() for w in f)], Path(name))
        try:
            role.start()
            pin(role.pid, cores.load)
            role.wait_ready("/health")
            yield role
        finally:
            role.close()


def key(user: int) -> str:
    """The key of user `user` of USERS."""
    return f"sk-bench-user{user % USERS}"


def config(engines: Sequence[str], slots: int) -> str:
    """fairlane.toml. The limits on waiting are raised, for a flood must not be refused here."""
    lines = [f'[[keys]]\nsecret = "{key(n)}"\nuser = "user{n}"' for n in range(USERS)]
    urls = ", ".join(f'{{ url = "{url}", max_num_seqs = {slots} }}' for url in engines)
    lines.append(
        "[gateway]\nuser_jobs_max = 20000\nmodel_jobs_max = 20000\nconnections_max = 20000"
    )
    lines.append(f"[models.{MODEL}]\nbackends = [{urls}]")
    return "\n".join([*lines, ""])
