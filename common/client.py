"""Put work on the queue and read its answers, straight over Redis: for programs inside the cluster.

    async with Client("redis://redis:6379/0") as client:
        job = await client.submit("/v1/chat/completions", {"model": "m", "messages": [...]})
        answer = await client.result(job)

A producer needs no gateway and may be gone when its jobs run: another program, given the jobs' ids,
reads the answers. Whoever has the Redis URL may name any user and class; keys are a matter of the
gateways. Settings that both sides go by (`class_policy`, `fairness`, limits, aliases) come from the
same `fairlane.toml` as theirs: give it as `config`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from common import config as configs
from common.broker import Broker, open_link
from common.client_types import (
    JobFailedError,
    Piece,
    QueueFullError,
    Request,
    RequestError,
    UnknownJobError,
)
from common.durable import About, Durable, Result, Status, digest_of, keyed_id, sink_safe
from common.errors import BrokerError, ConfigError
from common.intake import body as bodies
from common.intake.answers import Refusal, bad_request, unknown_model
from common.intake.job import job_id, new_job
from common.intake.models import Models
from common.intake.policy import Policies
from common.intake.queues import Queues
from common.intake.routes import ROWS
from common.job_settings import TTL_S_MAX
from common.joblog import Live
from common.keys import CLASSES
from common.known import remember
from common.settings import Settings
from common.wire import Data, ServedModel

OPEN_S = 10.0
"""How long Redis may take to answer at first."""
PATIENCE_S = 60.0
"""How long a call goes on while Redis is away; every call may be repeated afterwards."""
MODELS_S = 5.0
"""A request waits so long for a dispatcher to tell of its models, where none has yet."""
AGAIN_S = 0.2
NOTE_S = 3_600.0
"""That a model has jobs is noted this often."""
TOGETHER = 64
"""Jobs that `submit_many` submits at a time."""
USER_MAX = 256
"""Longest name of a user, in characters."""

T = TypeVar("T")


class Client:
    """A producer or a consumer, or both. Use it with `async with`."""

    def __init__(
        self,
        redis_url: str,
        *,
        user: str = "client",
        cls: str = "standard",
        weight: float = 1.0,
        config: Path | str | None = None,
        broker: Broker | None = None,
    ) -> None:
        """`user`, `cls` and `weight` are those of requests that name none. `config`: the gateways'
        fairlane.toml. `broker`: one that runs already, which is then used instead of the URL.
        Raises ConfigError."""
        if cls not in CLASSES:
            raise ConfigError(f"there is no class {cls!r}: {', '.join(CLASSES)}")
        self._settings = _settings(config)
        self._own = broker is None
        self._broker = broker or Broker(
            open_link(redis_url, timeout_s=self._settings.redis.command_timeout_s)
        )
        self._user, self._cls, self._weight = user, cls, weight
        self._policies = Policies(self._settings.models, self._settings.gateway)
        self._queues = Queues(self._broker, self._policies)
        self._models = Models(self._broker, self._settings.models)
        self._live = Live(self._broker)
        self._durable = Durable(self._broker, self._queues.of)
        self._group: asyncio.TaskGroup = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        self._noted: dict[str, float] = {}
        """When a model, one of those in `_models`, was noted."""

    async def __aenter__(self) -> Self:
        """Connect. Raises BrokerError where Redis does not answer within OPEN_S."""
        await self._group.__aenter__()
        loops = [self._live.run(), *([self._broker.run()] if self._own else [])]
        self._tasks = [self._group.create_task(loop) for loop in loops]
        try:
            async with asyncio.timeout(OPEN_S):
                await self._broker.up.wait()
                await self._models.refresh()
        except (TimeoutError, BrokerError) as e:
            await self.__aexit__(None, None, None)
            raise BrokerError(f"Redis does not answer: {e or 'timed out'}") from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def submit(self, request: Request | str, body: Any = None, **more: Any) -> str:
        """Queue a job: of a Request, or of a path, a body and what else a Request has. Returns its
        id. The queue owns it afterwards, whatever becomes of this process.

        Raises RequestError, QueueFullError; BrokerError where Redis stays away for PATIENCE_S:
        then it may be queued or not, and with the same `idempotency_key` it is safe to try again.
        """
        if isinstance(request, str):
            request = Request(path=request, body=body, **more)
        new, about = await self._made(request)
        limits = self._policies.of(about.model).limits(
            new.cls, self._settings.gateway.user_jobs_max
        )
        await self._note(about.model)
        word, about = await self._patient(lambda: self._durable.submit(new, about, limits))
        if word in ("full_user", "full_model"):
            raise QueueFullError(
                "too many jobs wait" + (" for this user" if word == "full_user" else "")
            )
        if word == "conflict":
            text = "This idempotency key was used for another request."
            raise RequestError(bad_request(text, "idempotency_key").answer)
        return about.id

    async def submit_many(self, requests: Iterable[Request]) -> AsyncIterator[str]:
        """Queue many, TOGETHER at a time; their ids in the order of the requests. Raises as
        `submit` does for one of them; those whose ids were given are queued, those submitted
        together with it may be."""
        waiting: list[Request] = []
        for request in requests:
            waiting.append(request)
            if len(waiting) == TOGETHER:
                for job in await asyncio.gather(*map(self.submit, waiting)):
                    yield job
                waiting = []
        for job in await asyncio.gather(*map(self.submit, waiting)):
            yield job

    async def status(self, job: str) -> Status:
        """How a job stands. Raises UnknownJobError, BrokerError."""
        about = await self._about(job)
        return await self._patient(lambda: self._durable.status(about))

    async def stream(self, job: str, *, after: str = "") -> AsyncIterator[Piece]:
        """A job's answer as it comes, from the piece behind `after` on; from its log where it has
        ended. Any number of programs may follow one job. Raises UnknownJobError, BrokerError, and
        JobFailedError where the answer does not come to its end."""
        about = await self._about(job)
        keys = self._queues.of(about.model).keys
        until = self._now() + PATIENCE_S
        while True:
            try:
                async for entries in self._live.follow(keys, job, after):
                    until = self._now() + PATIENCE_S
                    for entry in entries:
                        after = entry.id
                        data = b"".join(f.data for f in entry.frames if isinstance(f, Data))
                        if data:
                            yield Piece(entry.id, entry.attempt, data)
                    if not entries:
                        await self._still_there(about)
                break
            except BrokerError:
                if not await self._broker.back(AGAIN_S, until):
                    raise
        status = await self.status(job)
        if status.state != "completed":
            raise JobFailedError(status)

    async def result(self, job: str, *, timeout_s: float | None = None) -> Result:
        """The whole answer of a job, once it has ended; an engine's own refusal is one too (its
        `status` is 400 or more). Raises UnknownJobError, BrokerError, JobFailedError, and
        TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(JobFailedError):
                async for _ in self.stream(job):
                    pass
            about = await self._about(job)
            found = await self._patient(lambda: self._durable.result(about))
        if found is None or not found.status:
            raise JobFailedError(await self.status(job))
        return found

    async def cancel(self, job: str) -> bool:
        """Stop a job wherever it is; False: it has ended. Raises UnknownJobError, BrokerError."""
        about = await self._about(job)
        word = await self._patient(lambda: self._durable.cancel(about))
        return word in ("cancelled", "flagged")

    async def ended(self, model: str, sink: str, *, most: int = 100) -> list[str]:
        """Take up to `most` ids off a sink's list of ended jobs: each is given to one caller, once.
        A consumer that dies with them has lost them from the list, not their answers."""
        queue = self._queues.of(model)
        taken = await self._patient(
            lambda: self._broker.command("LPOP", queue.keys.ended(sink), most)
        )
        return [job.decode() for job in taken or []]

    async def _made(self, request: Request) -> tuple[Any, About]:
        row = next((r for r in ROWS if r.path == request.path), None)
        try:
            if row is None:
                paths = ", ".join(r.path for r in ROWS)
                raise bad_request(f"`path` is none that is queued: {paths}.", "path")
            user, cls = request.user or self._user, request.cls or self._cls
            if cls not in CLASSES:
                raise bad_request(f"`cls` is one of {', '.join(CLASSES)}.", "cls")
            if not 0 < len(user) <= USER_MAX:
                raise bad_request(f"`user` has 1 to {USER_MAX} characters.", "user")
            if not 0 < request.ttl_s <= TTL_S_MAX:
                raise bad_request(f"`ttl_s` is at most {TTL_S_MAX}.", "ttl_s")
            if request.sink and not sink_safe(request.sink):
                raise bad_request("`sink` is of letters, digits and `-`, at most 64.", "sink")
            body = request.body
            data = body if isinstance(body, bytes) else msgspec.json.encode(body)
            fields = bodies.read(data)
            model = await self._model(fields.model)
            key, wait_s = request.idempotency_key, request.wait_s
            if wait_s is None:
                wait_s = self._settings.gateway.job_wait_s
            new = new_job(
                row, fields, data, model, self._policies.of(model.name), user=user,
                sub=request.sub, weight=request.weight or self._weight, cls=cls,
                id=keyed_id(user, key) if key else job_id(),
                wait_ms=max(1, int(wait_s * 1000)),
                keep_ms=request.ttl_s * 1000, sink=request.sink,
            )  # fmt: skip
        except Refusal as refusal:
            raise RequestError(refusal.answer) from None
        about = About(
            id=new.id, model=model.name, user=user, sub=request.sub, cls=cls, path=row.path,
            stream=row.streams and fields.stream, wait_ms=new.wait_ms, ttl_s=request.ttl_s,
            created_ms=await self._patient(self._broker.now_ms), metadata=dict(request.metadata),
            digest=digest_of(row.path, data),
        )  # fmt: skip
        return new, about

    async def _model(self, name: str) -> ServedModel:
        until = self._now() + MODELS_S
        while (model := self._models.resolve(name)) is None:
            await self._patient(self._models.refresh)
            if self._models.listing() or self._now() > until:
                model = self._models.resolve(name)
                break
            await asyncio.sleep(AGAIN_S)
        if model is None:
            raise Refusal(unknown_model(name, [n for n, _ in self._models.listing()]))
        return model

    async def _note(self, model: str) -> None:
        """Some dispatcher then ends its jobs at their deadlines, also where none serves it."""
        if self._now() - self._noted.get(model, -NOTE_S) >= NOTE_S:
            await self._patient(lambda: remember(self._broker, [model]))
            self._noted[model] = self._now()

    async def _about(self, job: str) -> About:
        about = await self._patient(lambda: self._durable.find(job))
        if about is None:
            raise UnknownJobError(job)
        return about

    async def _still_there(self, about: About) -> None:
        status = await self._durable.status(about)
        if status.state == "unknown":
            raise JobFailedError(status)

    async def _patient(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call that may be repeated, while Redis is away."""
        until = self._now() + PATIENCE_S
        while True:
            try:
                return await call()
            except BrokerError:
                if not await self._broker.back(AGAIN_S, until):
                    raise

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _settings(config: Path | str | None) -> Settings:
    return configs.load(Path(config), environment={}) if config is not None else Settings()
