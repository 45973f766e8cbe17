"""A real vLLM on the CPU for `bench.vllm`: its process, its metrics page, clients that ask it.

The kit in `tests/support/vllm` installs and serves it.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
import msgspec
import redis.asyncio

from common.keys import ModelKeys

MODEL = "tiny"
SLOTS = 4
"""`--max-num-seqs` of the kit's server."""
KIT = Path(__file__).parents[1] / "tests" / "support" / "vllm"
INSTALL_S = 1800.0
START_S = 300.0
END_S = 20.0
ANSWER_S = 120.0
"""No answer takes longer."""
SAMPLE_S = 0.2
UNTIL_S = 0.02
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}

_SAMPLE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|prompt_tokens_total"
    r"|generation_tokens_total)\{[^}]*\} (\S+)$",
    re.M,
)


class Vllm:
    """The kit's server on a free port; installed first where it is not there."""

    def __init__(
        self, folder: Path, port: int, flags: Sequence[str] = (), log: str = "serve.log"
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / log
        self._folder = folder
        self._command = ["bash", str(KIT / "serve.sh"), str(folder), str(port), *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """Run the kit's install.sh unless it ran to its end before."""
        if (self._folder / MODEL / "model.safetensors").exists():
            return
        print(f"installing vLLM into {self._folder}: about 4 minutes, 2.5 GB", flush=True)
        command = ["bash", str(KIT / "install.sh"), str(self._folder)]
        subprocess.run(command, check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        self.install()
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Start it; waits for nothing. Its log goes on where there is one."""
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def terminate(self) -> None:
        """Ask it to end, as an operator does; waits for nothing."""
        if self._process is not None:
            self._process.terminate()

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._process is None or self._process.poll() is not None

    def wait_ready(self) -> None:
        """Until it says that it is healthy. Raises RuntimeError with the end of its log."""
        assert self._process is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended at its start:\n{self.tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"vLLM was not ready within {START_S:g} s:\n{self.tail()}")

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End it and the engine processes of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Role(Protocol):
    """A process of Fairlane."""

    @property
    def url(self) -> str: ...

    def metric(self, name: str, label: str = "") -> float: ...

    def log(self) -> str: ...


class Page(msgspec.Struct, frozen=True):
    """What the engine's `/metrics` say."""

    running: int
    waiting: int
    prompt: int
    """Prompt tokens since its start; those of `n` choices count `n` times."""
    generated: int


class Sample(msgspec.Struct, frozen=True):
    """One look at engine and queue."""

    phase: str
    running: int
    waiting: int
    queued: int
    """Jobs waiting in Fairlane."""


class Look(msgspec.Struct, frozen=True):
    """Jobs in the queue, and those sent to the engine, at one moment."""

    waiting: frozenset[str]
    running: frozenset[str]


class Got(msgspec.Struct):
    """What a raw client got."""

    status: int = 0
    kind: str = ""
    body: bytes = b""
    began: float = 0.0
    """When the first bytes of the body came, on the loop's clock."""
    job: str = ""
    """Fairlane's name for it."""


class Asker:
    """Raw clients of the engine and of Fairlane, and a look at the queue in Redis."""

    def __init__(self, engine: str, gateway: str, redis_url: str) -> None:
        self.engine = engine
        self.gateway = gateway
        # A fresh connection each time: a kept one may be closed as it is written to.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=ANSWER_S, limits=limits, trust_env=False)
        self._redis = redis.asyncio.Redis.from_url(redis_url, socket_timeout=5.0)
        self.samples: list[Sample] = []
        self.phase = ""

    async def post(
        self, base: str, path: str, body: dict[str, Any], user: str = "u", got: Got | None = None
    ) -> Got:
        """Ask and take all that comes, into `got` as it comes. Cancelled, it disconnects."""
        got = got or Got()
        headers = {"authorization": f"Bearer sk-{user}"}
        async with self._http.stream("POST", base + path, json=body, headers=headers) as response:
            got.status = response.status_code
            got.job = response.headers.get("x-fairlane-job", "")
            got.kind = response.headers.get("content-type", "")
            async for data in response.aiter_raw():
                got.began = got.began or asyncio.get_running_loop().time()
                got.body += data
        return got

    async def page(self) -> Page:
        """Read the engine's metrics."""
        text = (await self._http.get(f"{self.engine}/metrics")).text
        values = {name: int(float(value)) for name, value in _SAMPLE.findall(text)}
        return Page(
            values["num_requests_running"], values["num_requests_waiting"],
            values["prompt_tokens_total"], values["generation_tokens_total"],
        )  # fmt: skip

    async def queued(self) -> int:
        """Jobs waiting in Fairlane."""
        return int(await self._redis.zcard(ModelKeys(MODEL).deadlines))

    async def leftovers(self) -> list[str]:
        """Keys in Redis that may not stay when no job is open, and how long they will (ms)."""
        permanent = ModelKeys(MODEL).permanent
        found = [key.decode() async for key in self._redis.scan_iter(count=1000)]
        return [f"{k} {await self._redis.pttl(k)}" for k in sorted(found) if not permanent(k)]

    @contextlib.asynccontextmanager
    async def looks(self, seen: list[Look]) -> AsyncIterator[None]:
        """Look at the queue every UNTIL_S meanwhile."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look(seen))
            yield
            looking.cancel()

    async def _look(self, seen: list[Look]) -> None:
        k = ModelKeys(MODEL)
        while True:
            async with self._redis.pipeline(transaction=True) as both:
                both.zrange(k.deadlines, 0, -1)
                both.zrange(k.running, 0, -1)
                waiting, running = await both.execute()
            seen.append(Look(*(frozenset(j.decode() for j in x) for x in (waiting, running))))
            await asyncio.sleep(UNTIL_S)

    async def prompt_tokens(self, body: dict[str, Any]) -> int:
        """How many tokens the engine makes of a request's prompt."""
        asked = {k: body[k] for k in ("model", "messages", "prompt") if k in body}
        answer = await self._http.post(f"{self.engine}/tokenize", json=asked)
        return int(answer.raise_for_status().json()["count"])

    async def sample(self) -> None:
        """Look at engine and queue every SAMPLE_S, while there is a phase; until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            phase = self.phase
            if phase:
                page, queued = await asyncio.gather(self.page(), self.queued())
                self.samples.append(Sample(phase, page.running, page.waiting, queued))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()
        await self._redis.aclose()


class Report:
    """The table of what was checked."""

    def __init__(self) -> None:
        self.rows: list[tuple[bool, str, str]] = []

    def add(self, ok: bool, what: str, figure: str) -> None:
        """One line, printed at once."""
        self.rows.append((ok, what, figure))
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {figure}", flush=True)

    def table(self) -> str:
        """All lines, in columns."""
        width = max(len(what) for _, what, _ in self.rows)
        return "\n".join(f"{'ok  ' if ok else 'FAIL'} {w:<{width}}  {f}" for ok, w, f in self.rows)

    @property
    def failed(self) -> bool:
        """Whether any line says so."""
        return not all(ok for ok, _, _ in self.rows)


async def until(seen: Callable[[], Awaitable[bool]], what: str, timeout: float = 60.0) -> None:
    """Ask until it is seen. Raises TimeoutError with `what` in it."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not await seen():
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        await asyncio.sleep(UNTIL_S)
