"""`python -m bench.batches`: batches of three owners on two engines, with chat beside them.

The same lines are first sent to the engines themselves, so many at a time that all slots are full:
that is what the throughput is compared with. Chat is measured alone first. Memory is the most that
any process of a role held while the batches ran.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import monotonic

import aiohttp
import click
import msgspec
import openai
import uvloop

from bench.client import Client, Gone, Target
from bench.load import Refused, body, checked
from bench.report import Budget, Figure, Part, percentile, table
from sim.settings import EngineSettings
from tests.support.batches import BatchFleet, ended
from tests.support.fleet import KEY
from tests.support.redis_server import RedisServer

MODEL = "m1"
OWNERS = ("alice", "bob", "carol")
INPUT, OUTPUT = (16, 400), (8, 72)
"""Words in and tokens out of a line, both drawn evenly."""
CHAT_TOKENS = 32
CHAT_EVERY_S = 0.5
ALONE_S = 15.0
WARM_S = 3.0
END_S = 3_600.0
MB = 1e6


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    lines: int = 50_000
    slots: int = 64
    """Of each engine."""
    step_ms: float = 20.0
    direct_s: float = 40.0


class Chat:
    """One user who asks now and then, through one of the gateways."""

    def __init__(self, fleet: BatchFleet) -> None:
        self._targets = [Target.of(g.url) for g in fleet.gateways]
        self.first_s: list[float] = []
        self.failed = 0

    async def run(self, seconds: float = END_S) -> None:
        """Until cancelled, or for so long."""
        end = monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            n = 0
            while monotonic() < end:
                group.create_task(self._ask(n))
                n += 1
                await asyncio.sleep(CHAT_EVERY_S)

    async def _ask(self, n: int) -> None:
        target = self._targets[n % len(self._targets)]
        client = Client(target)
        asked = body(MODEL, stream=True, tokens=CHAT_TOKENS, prompt_tokens=128, seed=n)
        try:
            answer = checked(await client.ask(target.request(asked, KEY + "dave")))
            self.first_s.append(answer.first_s)
        except (Refused, Gone, OSError):
            self.failed += 1  # told at the end: it is in no percentile
        finally:
            client.close()


def requests(lines: int, seed: int) -> Iterator[dict[str, object]]:
    """Bodies of mixed sizes."""
    random = Random(seed)
    for n in range(lines):
        text = f"{seed}-{n}" + " and" * random.randint(*INPUT)
        yield {
            "model": MODEL, "max_tokens": random.randint(*OUTPUT), "ignore_eos": True,
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip


def write_input(path: Path, lines: int, seed: int) -> None:
    """An input file."""
    with path.open("wb") as out:
        for n, request in enumerate(requests(lines, seed)):
            line = {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions"}
            out.write(json.dumps(line | {"body": request}).encode() + b"\n")


async def direct(fleet: BatchFleet, plan: Plan) -> float:
    """Lines a second that the engines themselves answer, all slots full."""
    counted, begin = 0, monotonic() + WARM_S
    end = begin + plan.direct_s
    rest = requests(1 << 30, 99)

    async def one(url: str, session: aiohttp.ClientSession) -> None:
        nonlocal counted
        while monotonic() < end:
            async with session.post(url + "/v1/chat/completions", json=next(rest)) as answer:
                await answer.read()
            counted += begin <= monotonic() < end

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for role in fleet.engines:
            for _ in range(plan.slots + 3):
                group.create_task(one(role.url, session))
    return counted / plan.direct_s


async def batch(fleet: BatchFleet, owner: int, path: Path, lines: int) -> tuple[int, int]:
    """Run a batch; (when it began, when it ended), in seconds since the epoch. Raises
    AssertionError where a line is not in its files exactly once."""
    client: openai.AsyncOpenAI
    async with fleet.client(owner % len(fleet.gateways), OWNERS[owner]) as client:
        with path.open("rb") as data:
            file = await client.files.create(file=data, purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = await ended(client, made.id, END_S, every_s=1.0)
        assert done.status == "completed" and not done.error_file_id, done
        ids = Counter[str]()
        async with client.files.with_streaming_response.content(done.output_file_id) as answer:
            async for line in answer.iter_lines():
                ids[json.loads(line)["custom_id"]] += 1
        assert ids == Counter(f"r{n}" for n in range(lines)), "each line once"
        return done.in_progress_at, done.finalizing_at


class Memory:
    """The most that each role held."""

    def __init__(self, fleet: BatchFleet) -> None:
        self._roles = {
            "gateway": fleet.gateways, "dispatcher": fleet.dispatchers, "worker": fleet.workers,
        }  # fmt: skip
        self.most: dict[str, int] = {}

    async def watch(self) -> None:
        """Each second, until cancelled."""
        while True:
            for name, roles in self._roles.items():
                held = max(role.rss() for role in roles)
                self.most[name] = max(held, self.most.get(name, 0))
            await asyncio.sleep(1.0)


async def measure(plan: Plan, folder: Path) -> Part:
    """All of it, on a Redis of its own."""
    engine = EngineSettings(max_num_seqs=plan.slots, step_ms=plan.step_ms)
    each = plan.lines // len(OWNERS)
    paths = [folder / f"{owner}.jsonl" for owner in OWNERS]
    for n, path in enumerate(paths):
        write_input(path, each, n)
    with (
        RedisServer(appendonly=True) as server,
        BatchFleet(folder, server, engine=engine, engines=2, gateways=3, workers=2) as fleet,
    ):
        there = await direct(fleet, plan)
        alone, beside, memory = Chat(fleet), Chat(fleet), Memory(fleet)
        await alone.run(ALONE_S)
        watching = [asyncio.ensure_future(x) for x in (beside.run(), memory.watch())]
        began, before = monotonic(), sum(w.cpu() for w in fleet.workers)
        spans = await asyncio.gather(*(batch(fleet, n, path, each) for n, path in enumerate(paths)))
        took = monotonic() - began
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        cpu = {r.name: r.cpu() for r in fleet.roles}
        line_ms = 1000 * (sum(w.cpu() for w in fleet.workers) - before) / (each * len(OWNERS))
    if alone.failed or beside.failed:
        raise RuntimeError(f"chats without an answer: {alone.failed} alone, {beside.failed} beside")
    size = sum(p.stat().st_size for p in paths)
    busy = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return Part(
        name="batches",
        title=f"{each} lines of each of {len(OWNERS)} owners, {size / MB:.0f} MB, two engines",
        figures=_figures(each * len(OWNERS) / max(1, busy), there, alone, beside, memory),
        notes=[
            f"from the first upload to the last download {took:.0f} s; lines ran for {busy} s",
            f"chat: {len(beside.first_s)} answers, {beside.failed} failed",
            f"the workers' CPU a line: {line_ms:.2f} ms",
            "CPU seconds: " + ", ".join(f"{n} {s:.0f}" for n, s in cpu.items()),
        ],
    )


def _figures(here: float, there: float, alone: Chat, beside: Chat, memory: Memory) -> list[Figure]:
    first, middle = ([percentile(c.first_s, p) for c in (alone, beside)] for p in (0.99, 0.5))
    return [
        Figure(name="lines", unit="/s", value=here / there, direct=there, through=here,
               budget=Budget(0.9, more_is_better=True)),
        Figure(name="chat's time to first token, p50, alone", unit="s", value=middle[0]),
        Figure(name="the same beside the batches", unit="s", value=middle[1], direct=middle[0],
               through=middle[1]),
        Figure(name="chat's time to first token, p99, alone", unit="s", value=first[0]),
        Figure(name="the same beside the batches", unit="s", value=first[1],
               direct=first[0], through=first[1], budget=Budget(1.5 * first[0])),
        *(
            Figure(name=f"memory of a {name}, the most", unit="MB", value=held / MB,
                   budget=Budget(200))
            for name, held in memory.most.items()
        ),
    ]  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lines", default=50_000, show_default=True, type=click.IntRange(3, 150_000))
@click.option("--slots", default=64, show_default=True, type=click.IntRange(1, 1_000))
@click.option("--step-ms", default=20.0, show_default=True, type=click.FloatRange(0.1, 1_000))
@click.option("--direct-s", default=40.0, show_default=True, type=click.FloatRange(1))
def main(lines: int, slots: int, step_ms: float, direct_s: float) -> None:
    """Measure batches on this machine."""
    plan = Plan(lines=lines, slots=slots, step_ms=step_ms, direct_s=direct_s)
    with tempfile.TemporaryDirectory(prefix="fairlane-batches-") as name:
        part = uvloop.run(measure(plan, Path(name)))
    click.echo(table([part]))
    missed = any(f.budget and f.budget.verdict(f.value) == "missed" for f in part.figures)
    sys.exit(missed)


if __name__ == "__main__":
    main()
