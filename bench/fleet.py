"""The processes that are measured, each on its core.

Redis, gateways and dispatchers share one core; engines and the load share another. Where the
machine has only one core, or cannot pin, nothing is pinned and the report says so.
"""

import asyncio
import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import psutil

from bench.client import Target
from bench.engine import Engine
from bench.setup import Setup
from sim.settings import EngineSettings
from tests.support.processes import Role
from tests.support.redis_server import RedisServer, find_redis_server

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


def redis_version() -> str:
    """What the Redis that is used here says of itself."""
    words = [find_redis_server(), "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


class Fleet:
    """Gateways and dispatchers on a Redis of their own, in front of the given engines."""

    def __init__(
        self, folder: Path, server: RedisServer, cores: Cores, gateways: int, dispatchers: int
    ) -> None:
        self.redis = server
        self.cores = cores
        config = ["--config", str(folder / "fairlane.toml"), "--redis", server.url]
        self.gateways = [
            Role(f"gateway{n}", ["gateway", *config, "--port", "0"], folder)
            for n in range(gateways)
        ]
        self.dispatchers = [
            Role(f"dispatcher{n}", ["dispatcher", *config, "--metrics-port", "0"], folder)
            for n in range(dispatchers)
        ]

    @property
    def gateway(self) -> Role:
        """The first."""
        return self.gateways[0]

    @property
    def dispatcher(self) -> Role:
        """The first."""
        return self.dispatchers[0]

    @property
    def target(self) -> Target:
        """Where requests through Fairlane go."""
        return self.targets[0]

    @property
    def targets(self) -> list[Target]:
        """The same of each gateway."""
        return [Target.of(gateway.url) for gateway in self.gateways]

    def start(self) -> None:
        """Start all and wait until they can serve."""
        for role in (*self.gateways, *self.dispatchers):
            role.start()
            pin(role.pid, self.cores.product)
        for role in (*self.dispatchers, *self.gateways):
            role.wait_ready("/readyz")

    def close(self) -> None:
        """Kill all."""
        for role in (*self.gateways, *self.dispatchers):
            role.close()

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each kind of process has used."""
        kinds = {
            "gateway": [role.pid for role in self.gateways],
            "dispatcher": [role.pid for role in self.dispatchers],
            "redis": [self.redis.pid],
        }
        return {
            name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
            for name, pids in kinds.items()
        }


@contextmanager
def redis_alone(cores: Cores) -> Iterator[RedisServer]:
    """An empty Redis on the product's core."""
    with RedisServer() as server:
        pin(server.pid, cores.product)
        yield server


@asynccontextmanager
async def fleet(cores: Cores, engines: Sequence[str], setup: int | Setup) -> AsyncIterator[Fleet]:
    """Fairlane in front of the engines at these URLs, ready; all is ended afterwards. A number is
    one of slots.

    It starts in a thread, for engines in this loop must answer meanwhile.
    """
    setup = Setup(slots=setup) if isinstance(setup, int) else setup
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name, redis_alone(cores) as redis:
        folder = Path(name)
        (folder / "fairlane.toml").write_text(config(engines, setup))
        made = Fleet(folder, redis, cores, setup.gateways, setup.dispatchers)
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
        "--per-seq-us": settings.per_seq_us,
        "--prefill-tokens-per-s": settings.prefill_tokens_per_s, "--seed": settings.seed,
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


def config(engines: Sequence[str], setup: Setup) -> str:
    """fairlane.toml. The limits on waiting are raised, for a flood must not be refused here."""
    lines = [
        f'[[keys]]\nsecret = "{key(n)}"\nuser = "user{n}"\nweight = {setup.weights.get(n, 1.0)}'
        for n in range(USERS)
    ]
    slots = "" if setup.slots is None else f", max_num_seqs = {setup.slots}"
    urls = ", ".join(f'{{ url = "{url}"{slots} }}' for url in engines)
    lines.append(
        "[gateway]\nuser_jobs_max = 20000\nmodel_jobs_max = 20000\nconnections_max = 20000"
    )
    lines.append(f"[models.{MODEL}]\nbackends = [{urls}]")
    if setup.reserved is not None:
        lines.append(f"reserved_slots = {setup.reserved}")
    if setup.tpot_ms is not None:
        lines.append(f"[models.{MODEL}.class.standard]\ntpot_ms = {setup.tpot_ms}")
    return "\n".join([*lines, ""])
