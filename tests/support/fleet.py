"""A whole Fairlane as processes on one Redis, and what Redis tells about it."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import redis

from common.keys import ModelKeys
from sim.settings import EngineSettings
from tests.support.processes import Role
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

KEY = "sk-test-"
"""A user's key is this and the user's name."""
SETTLE_S = 15.0
_FIELDS = ("state", "owner", "started", "attempt", "replica", "backend")


class Running(msgspec.Struct, frozen=True):
    """A running job as its record tells."""

    model: str
    job: str
    owner: str
    started: bool
    popped_ms: int
    """Its attempt, which is the time of its pop by the Redis clock."""
    replica: str
    backend: str


class Fleet:
    """Gateways, dispatchers and simulated engines on one Redis, which all serve all models.

    The engines have one seed, so that each gives the same answer to the same request. `heal`
    starts again whatever a test has ended.
    """

    def __init__(
        self,
        folder: Path,
        server: RedisServer,
        *,
        models: Sequence[str] = ("m1", "m2"),
        users: Sequence[str] = ("alice", "bob", "carol", "dave"),
        engine: EngineSettings | None = None,
        engines: int = 2,
        gateways: int = 3,
        dispatchers: int = 2,
        more: str = "",
    ) -> None:
        """`more`: lines of fairlane.toml."""
        self.server = server
        self.models = tuple(models)
        self._users = tuple(users)
        self._folder = folder
        self._more = more
        engine = engine or EngineSettings(max_num_seqs=8, step_ms=10.0)
        self.engine = msgspec.structs.replace(engine, model=self.models)
        """What the engines are: answers can be computed from it."""
        common = ["--config", str(folder / "fairlane.toml"), "--redis", server.url]
        self.engines = [Role(f"sim-{i}", self._sim(0), folder) for i in range(engines)]
        self.gateways = [
            Role(f"gateway-{i}", ["gateway", *common, "--port", "0"], folder)
            for i in range(gateways)
        ]
        self.dispatchers = [
            Role(f"dispatcher-{i}", ["dispatcher", *common, "--metrics-port", "0"], folder)
            for i in range(dispatchers)
        ]

    @property
    def roles(self) -> list[Role]:
        """All processes but Redis."""
        return [*self.engines, *self.dispatchers, *self.gateways]

    def start(self) -> None:
        """Start everything and wait until every part is ready."""
        for role in self.engines:
            role.start()
        for role in self.engines:
            role.wait_ready("/health")
            role.args = self._sim(int(role.url.rpartition(":")[2]))
        (self._folder / "fairlane.toml").write_text(self._config())
        self.heal()

    def heal(self) -> None:
        """Start again what has ended, let go on what is paused, and wait until all are ready."""
        for role in self.roles:
            if role.alive():
                role.resume()
            else:
                role.close()
                role.start()
        for role, path in [
            *((r, "/health") for r in self.engines),
            *((r, "/readyz") for r in (*self.dispatchers, *self.gateways)),
        ]:
            role.wait_ready(path)

    def _sim(self, port: int) -> list[str]:
        e = self.engine
        flags = {
            "--port": port, "--max-num-seqs": e.max_num_seqs, "--step-ms": e.step_ms,
            "--seed": e.seed, "--mean-output-tokens": e.mean_output_tokens,
        }  # fmt: skip
        models = [w for m in self.models for w in ("--model", m)]
        return ["sim", *models, *(str(w) for flag in flags.items() for w in flag)]

    def _config(self) -> str:
        lines = [
            f'[[keys]]\nsecret = "{KEY}{u}"\nuser = "{u}"\n'
            'classes = ["standard", "interactive", "batch"]'
            for u in self._users
        ]
        urls = ", ".join(
            f'{{ url = "{r.url}", max_num_seqs = {self.engine.max_num_seqs} }}'
            for r in self.engines
        )
        lines += [f"[models.{m}]\nbackends = [{urls}]" for m in self.models]
        return "\n".join([*lines, self._more, ""])

    def redis(self) -> "redis.Redis":
        """A client of its own; commands give up after 5 s."""
        return redis.Redis.from_url(self.server.url, socket_timeout=5.0)

    def leader(self, model: str) -> Role | None:
        """The dispatcher that Redis has as the model's leader, whether its lease is over or not."""
        with self.redis() as client:
            owner = client.hget(ModelKeys(model).board, "owner")
        return self.dispatcher((owner or b"").decode())

    def term(self, model: str) -> int:
        """The number of the model's present term."""
        with self.redis() as client:
            return int(client.hget(ModelKeys(model).board, "term") or 0)

    def dispatcher(self, owner: str) -> Role | None:
        """The dispatcher whose present or last start had this id."""
        return next((r for r in self.dispatchers if owner and r.id == owner), None)

    def running(self, *models: str) -> list[Running]:
        """All running jobs, as Redis has them, in one look at each model."""
        found = []
        with self.redis() as client:
            for model in models or self.models:
                k = ModelKeys(model)
                jobs = [j.decode() for j in client.zrange(k.running, 0, -1)]
                with client.pipeline(transaction=True) as asked:
                    for job in jobs:
                        asked.hmget(k.record(job), *_FIELDS)
                    answers: list[Any] = asked.execute()
                for job, (state, owner, started, attempt, replica, backend) in zip(
                    jobs, answers, strict=True
                ):
                    if state == b"running":
                        found.append(
                            Running(model, job, owner.decode(), started == b"1", int(attempt),
                                    replica.decode(), backend.decode())
                        )  # fmt: skip
        return found

    def waiting(self) -> int:
        """Jobs waiting in all models."""
        with self.redis() as client:
            return sum(int(client.zcard(ModelKeys(m).deadlines)) for m in self.models)

    def now_ms(self) -> int:
        """The Redis server's clock."""
        with self.redis() as client:
            seconds, micros = client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def leftovers(self, *, expiring: bool = False) -> list[str]:
        """Keys that may not stay when no job is open; those that expire too, unless allowed."""
        models = [ModelKeys(m) for m in self.models]
        with self.redis() as client:
            return sorted(
                key.decode()
                for key in client.scan_iter(count=1000)
                if not any(m.permanent(key.decode()) for m in models)
                and not (expiring and client.pttl(key) > 0)
            )

    async def settle(self, *, expiring: bool = False) -> None:
        """Until nothing is left of any job (see `leftovers`); AssertionError naming what is."""
        try:
            await wait_until(lambda: not self.leftovers(expiring=expiring), timeout=SETTLE_S)
        except AssertionError:
            raise AssertionError(f"left over: {self._described()}") from None

    def _described(self) -> dict[str, Any]:
        with self.redis() as client:
            return {
                key: client.hgetall(key) if client.type(key) == b"hash" else client.type(key)
                for key in self.leftovers()[:3]
            }

    def logs(self) -> str:
        """The end of every log, for a failed test's message."""
        return "\n".join(f"--- {r.name}\n{r.log()[-1500:]}" for r in self.roles)

    def close(self) -> None:
        """Kill every process."""
        for role in self.roles:
            role.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Pops:
    """Notes who led and who popped, as Redis had it, each time `look` is called."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._terms: dict[str, dict[int, str]] = {m: {} for m in fleet.models}
        self.seen: dict[tuple[str, int], Running] = {}

    def look(self) -> None:
        """Note what there is now."""
        running = self._fleet.running()
        with self._fleet.redis() as client:
            for model, terms in self._terms.items():
                owner, term = client.hmget(ModelKeys(model).board, "owner", "term")
                if owner and term:
                    terms[int(term)] = owner.decode()
        self.seen |= {(r.job, r.popped_ms): r for r in running}

    def by_others(self) -> list[Running]:
        """Pops by a dispatcher that did not lead at that time. A term is at least the time, by the
        Redis clock, at which it began."""
        found = []
        for run in self.seen.values():
            led = [term for term in self._terms[run.model] if term <= run.popped_ms]
            if led and self._terms[run.model][max(led)] != run.owner:
                found.append(run)
        return found
