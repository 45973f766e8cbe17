"""Batches in a world: made, run by workers that may be killed, and read back."""

import asyncio
import contextlib
import json
import secrets
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from common.batch_settings import BatchSettings
from common.batch_state import About, State, shown
from common.batches import Batches
from common.errors import BrokerError
from gateway.batches.run import Tools
from gateway.batches.turns import Turns
from gateway.files import FileRecord, Files, content_path, new_id, record_path
from tests.flow.world import EPOCH, Process, World
from tests.support.memory_store import MemoryStore
from tests.support.wait import pass_time

TICK_S = 0.25


def request(n: int, text: str = "", **body: Any) -> dict[str, Any]:
    """A line of an input file."""
    return {
        "custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions",
        "body": {
            "model": "m1", "messages": [{"role": "user", "content": text or f"hello {n}"}],
            "max_tokens": 4, "ignore_eos": True, **body,
        },
    }  # fmt: skip


def jsonl(*lines: Any) -> bytes:
    """An input file."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def now() -> float:
    """Seconds since the epoch, in virtual time."""
    return EPOCH + asyncio.get_running_loop().time()


class Worker:
    """One worker process: turns whenever a batch is nobody's, as arq's ticks make them."""

    def __init__(self, world: "BatchWorld", name: str) -> None:
        self.process = Process(world.world.server, world.world.url)
        self.store = MemoryStore(world.objects)
        files = Files(self.store, world.world.settings.store, now)
        settings = msgspec.structs.replace(world.world.settings, batch=world.settings)
        self.tools = Tools(
            settings, self.process.broker, name, files, self.store, CollectorRegistry()
        )
        self.turns = Turns(self.tools)
        self.died = False
        world.world.gateways.append((self.process, None))  # type: ignore[arg-type]

    async def start(self) -> "Worker":
        broker = self.process.broker
        self.process.start(broker.run())
        await broker.up.wait()
        self.process.start(self.tools.models.run(), self._ticking())
        return self

    async def kill(self) -> None:
        """Gone from one moment to the next."""
        self.died = True
        await self.process.kill()

    async def _ticking(self) -> None:
        while True:
            with contextlib.suppress(BrokerError):
                await self.tick()
            await pass_time(TICK_S)

    async def tick(self) -> None:
        """A turn of each batch that nobody runs."""
        batches = self.tools.batches
        ids = [id for id, _ in await batches.active(100)]
        for id, _ in await batches.idle(ids, await self.process.broker.now_ms()):
            await self.turns.turn(id)


class BatchWorld:
    """See `world`; `settings` are those of batches."""

    def __init__(self, world: World, **settings: Any) -> None:
        self.world = world
        self.objects: dict[str, bytes] = {}
        self.settings = BatchSettings(**settings)
        self.process = Process(world.server, world.url)
        self.broker = self.process.broker
        self.batches = Batches(self.broker, 86_400_000)
        self.files = Files(MemoryStore(self.objects), world.settings.store, now)
        self.workers: list[Worker] = []
        world.gateways.append((self.process, None))  # type: ignore[arg-type]

    async def start(self, workers: int = 1) -> "BatchWorld":
        self.process.start(self.broker.run())
        await self.broker.up.wait()
        for _ in range(workers):
            await self.add_worker()
        return self

    async def add_worker(self) -> Worker:
        worker = Worker(self, f"w{len(self.workers)}")
        self.workers.append(worker)
        return await worker.start()

    def upload(self, content: bytes, owner: str = "u") -> str:
        """A file of a user's; its id."""
        id = new_id(now())
        record = FileRecord(
            id=id, owner=owner, bytes=len(content), created_at=int(now()), filename="in.jsonl",
            purpose="batch",
        )  # fmt: skip
        self.objects[content_path(owner, id)] = content
        self.objects[record_path(owner, id)] = msgspec.json.encode(record)
        return id

    async def create(self, content: bytes, **changes: Any) -> About:
        """A batch of a file with this content."""
        given: dict[str, Any] = {
            "id": f"batch_{secrets.token_hex(16)}", "owner": "u", "user": "u", "weight": 1.0,
            "cls": "standard", "models": [], "key_jobs": 10_000,
            "endpoint": "/v1/chat/completions", "input_file_id": self.upload(content),
            "window": "24h", "window_ms": 86_400_000, "created_ms": await self.broker.now_ms(),
        }  # fmt: skip
        about = About(**(given | changes))
        await self.batches.create(about)
        return about

    async def state(self, about: About) -> State:
        found = await self.batches.find(about.id)
        assert found is not None
        return found[1]

    async def over(self, about: About, timeout: float = 600.0) -> dict[str, Any]:
        """The batch as the API shows it, once it is over."""
        async with asyncio.timeout(timeout):
            while not (state := await self.state(about)).over:
                await pass_time(0.25)
        return shown(about, state)

    def lines(self, about: About, id: str | None) -> list[dict[str, Any]]:
        """Of an output or error file."""
        if id is None:
            return []
        return [json.loads(x) for x in self.objects[content_path(about.owner, id)].splitlines()]

    def results(self, about: About, batch: dict[str, Any]) -> tuple[list[str], list[str]]:
        """The custom ids of both files, sorted."""
        found = [self.lines(about, batch[f"{n}_file_id"]) for n in ("output", "error")]
        return tuple(sorted(x["custom_id"] for x in lines) for lines in found)  # type: ignore[return-value]

    async def left(self) -> list[str]:
        """Objects and keys that batches left behind, beside files and what expires."""
        k = self.workers[0].tools.queues.of("m1").keys
        names = [n.decode() for n in await self.broker.command("KEYS", "*")]
        stay = []
        for n in names:
            if not k.permanent(n) and int(await self.broker.command("PTTL", n)) < 0:
                stay.append(n)
        jobs = [n for n in names if n.startswith((k.record_prefix, k.body_prefix))]
        return sorted([*stay, *jobs, *(n for n in self.objects if n.startswith("batches/"))])
