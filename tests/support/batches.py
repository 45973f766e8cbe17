"""A fleet with batch workers and one store of files, and a batch of the official client's."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from sim.settings import EngineSettings
from tests.support.fleet import KEY, Fleet
from tests.support.processes import Role
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

ENDED = ("completed", "failed", "expired", "cancelled")


class BatchFleet(Fleet):
    """Gateways, dispatchers, engines, and workers."""

    def __init__(
        self, folder: Path, server: RedisServer, *, workers: int = 2, more: str = "", **given: Any
    ) -> None:
        (folder / "store").mkdir()
        store = f'[store]\nurl = "file://{folder / "store"}"\n'
        given = {
            "models": ("m1",), "gateways": 2,
            "engine": EngineSettings(max_num_seqs=16, step_ms=10.0), **given,
        }  # fmt: skip
        self.workers: list[Role] = []
        super().__init__(folder, server, more=store + more, **given)
        common = ["--config", str(folder / "fairlane.toml"), "--redis", server.url]
        self.workers = [
            Role(f"worker-{i}", ["batch-worker", *common, "--port", "0"], folder)
            for i in range(workers)
        ]

    @property
    def roles(self) -> list[Role]:
        return [*super().roles, *self.workers]

    def heal(self) -> None:
        super().heal()
        for role in self.workers:
            role.wait_ready("/readyz")

    def client(self, gateway: int = 0, user: str = "alice") -> openai.AsyncOpenAI:
        """The official client of one gateway."""
        url = self.gateways[gateway].url + "/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=KEY + user, max_retries=5)


def chat_lines(n: int, output: int = 8, model: str = "m1", text: str = "") -> bytes:
    """An input file."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions",
                "body": {
                    "model": model, "max_tokens": output, "ignore_eos": True,
                    "messages": [{"role": "user", "content": f"{text}{i}"}],
                },
            }
        ).encode() + b"\n"
        for i in range(n)
    )  # fmt: skip


async def ended(
    client: openai.AsyncOpenAI, id: str, timeout: float, every_s: float = 0.1, *,
    may_fall: bool = False,
) -> Any:  # fmt: skip
    """The batch, once it is over; its counts never fall meanwhile, but by what a Redis lost."""
    seen, asked = [0], [0.0]

    async def over() -> Any:
        if asyncio.get_running_loop().time() - asked[-1] < every_s:
            return None
        asked.append(asyncio.get_running_loop().time())
        found = await client.batches.retrieve(id)
        counts = found.request_counts
        assert counts is not None
        seen.append(counts.completed + counts.failed)
        assert may_fall or seen[-1] >= seen[-2], "progress falls"
        return found if found.status in ENDED else None

    return await wait_until(over, timeout=timeout, what=f"the end of {id}")


async def custom_ids(client: openai.AsyncOpenAI, id: str | None) -> Counter[str]:
    """How often each line is in a file."""
    if id is None:
        return Counter()
    text = (await client.files.content(id)).text
    return Counter(json.loads(line)["custom_id"] for line in text.splitlines())
