"""`python -m bench.batches`: batches of three owners on two engines, with chat beside them.

The same lines are first sent to the engines themselves, so many at a time that all slots are full:
that is what the throughput is compared with. Then people chat at half of that: alone, beside
uploads of large inputs, and beside the batches; after that the batches are alone. Memory is the
most that any process of a role held. `--kill` ends one part after the other with SIGKILL while the
batches run, and has Redis sync every write to the disk, whose pauses are then in chat's times.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic, time

import click
import msgspec
import uvloop

from bench.batches.chat import CLASS, USERS, WARM_S, Chat
from bench.batches.lines import OWNERS, Batch, direct, write_input
from bench.batches.watch import Kills, Memory
from bench.report import Budget, Figure, Part, percentile, table
from sim.settings import EngineSettings
from tests.support.batches import BatchFleet
from tests.support.fleet import KEY
from tests.support.redis_server import RedisServer

MB = 1e6
LEFT = 0.85
"""Least share of what chat leaves that batches are to take."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured."""

    lines: int
    slots: int
    """Of each engine."""
    step_ms: float
    direct_s: float
    chat: float
    """Requests of chat a second, by what the engines can do."""
    chat_s: float
    upload: bool
    """Whether chat is also measured beside uploads."""
    kill_s: float
    """Seconds from one kill to the next; 0: none."""


class Seen(msgspec.Struct, kw_only=True):
    """What was measured; rates are per second."""

    direct: float
    alone: Chat
    beside: Chat
    memory: Memory
    uploading: Chat | None = None
    chats: float = 0.0
    """Answers to chat beside the batches."""
    shared: float = 0.0
    """Lines beside chat."""
    lines: float = 0.0
    """Lines once nobody chats."""
    notes: list[str] = msgspec.field(default_factory=list)


async def measure(plan: Plan, folder: Path) -> Part:
    """All of it, on a Redis of its own."""
    engine = EngineSettings(max_num_seqs=plan.slots, step_ms=plan.step_ms)
    each = plan.lines // len(OWNERS)
    paths = [folder / f"{owner}.jsonl" for owner in OWNERS]
    for n, path in enumerate(paths):
        write_input(path, each, n)
    with (
        RedisServer(appendonly=plan.kill_s > 0) as server,
        BatchFleet(
            folder, server, engine=engine, engines=2, gateways=3, workers=2,
            users=(*OWNERS, *USERS),
        ) as fleet,
    ):  # fmt: skip
        there = await direct([role.url for role in fleet.engines], plan.slots, plan.direct_s)
        kept = [g.url for g in (fleet.gateways[:-1] if plan.kill_s else fleet.gateways)]
        alone, beside = (Chat(kept, plan.chat * there, KEY) for _ in range(2))
        await alone.run(plan.chat_s / 2)
        seen = Seen(direct=there, alone=alone, beside=beside, memory=Memory(fleet))
        if plan.upload:
            seen.uploading = Chat(kept, plan.chat * there, KEY)
            await _upload(fleet, seen.uploading, folder / "large.jsonl", plan.chat_s / 2)
        async with AsyncExitStack() as stack:
            batches = [
                Batch(await stack.enter_async_context(fleet.client(n % len(kept), owner)), p, each)
                for n, (owner, p) in enumerate(zip(OWNERS, paths, strict=True))
            ]
            await _run(plan, fleet, seen, batches, each * len(OWNERS))
    calm = [
        alone,
        *([seen.uploading] if seen.uploading else []),
        *([] if plan.kill_s else [beside]),
    ]
    if failed := sum(chat.failed for chat in calm):
        raise RuntimeError(f"{failed} chats without an answer")
    seen.notes += [note for chat in calm for note in chat.notes]
    size = sum(p.stat().st_size for p in paths)
    return Part(
        name="batches",
        title=f"{each} lines of each of {len(OWNERS)} owners, {size / MB:.0f} MB, two engines",
        figures=_figures(seen),
        notes=seen.notes,
    )


async def _upload(fleet: BatchFleet, chat: Chat, path: Path, seconds: float) -> None:
    words = ("--url", fleet.gateways[0].url, "--key", KEY + OWNERS[0], "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.batches.upload", *words, str(path),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await process.stdout.readline()
    await chat.run(seconds)
    count = (await process.stdout.read()).decode().strip()
    if await process.wait():
        raise RuntimeError("the uploads failed")
    chat.notes.append(f"uploads of 200 MB beside chat, each validated: {count}")


async def _run(
    plan: Plan, fleet: BatchFleet, seen: Seen, batches: Sequence[Batch], lines: int
) -> None:
    kills = Kills(fleet)
    cpu = {role.name: role.cpu() for role in fleet.roles}
    watching = [asyncio.ensure_future(seen.memory.watch())]
    began = monotonic()
    await asyncio.gather(*(b.create() for b in batches))
    if plan.kill_s:
        watching.append(asyncio.ensure_future(kills.each(plan.kill_s)))
    chatting = asyncio.ensure_future(seen.beside.run(plan.chat_s))
    before, at = await _counted(batches, WARM_S)
    seen.chats = await chatting
    after, then = await _counted(batches, 0.0)
    seen.shared = (after - before) / (then - at)
    if after >= lines:
        raise RuntimeError("all lines were over before the chat was: give more --lines")
    ends_at = await asyncio.gather(*(b.finish(may_fall=plan.kill_s > 0) for b in batches))
    seen.lines = (lines - after) / max(1.0, max(ends_at) - then)
    for task in watching:
        task.cancel()
    ends = await asyncio.gather(*watching, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    seen.notes += [
        f"from the first upload to the last download {monotonic() - began:.0f} s",
        f"chat: {len(seen.alone.first_s)} answers alone, {len(seen.beside.first_s)} beside, "
        f"{seen.beside.failed} failed; class {CLASS}",
        "each custom_id is in the files once",
    ]
    if kills.killed:
        seen.notes.append("killed: " + ", ".join(kills.killed))
    else:
        used = {r.name: r.cpu() - cpu[r.name] for r in fleet.roles}
        seen.notes.append("CPU seconds: " + ", ".join(f"{n} {s:.0f}" for n, s in used.items()))


async def _counted(batches: Sequence[Batch], after_s: float) -> tuple[int, float]:
    """Lines that are over, and when that was, in seconds since the epoch."""
    await asyncio.sleep(after_s)
    done = sum(await asyncio.gather(*(b.done() for b in batches)))
    return done, time()


def _figures(seen: Seen) -> list[Figure]:
    chats = (seen.alone, seen.beside)
    first, middle = ([percentile(c.first_s, p) for c in chats] for p in (0.99, 0.5))
    left = seen.direct - seen.chats
    return [
        Figure(name="lines, nobody chats", unit="/s", value=seen.lines / seen.direct,
               direct=seen.direct, through=seen.lines, budget=Budget(0.9, more_is_better=True)),
        Figure(name="lines beside chat, of what that leaves", unit="/s", value=seen.shared / left,
               direct=left, through=seen.shared, budget=Budget(LEFT, more_is_better=True)),
        Figure(name="chat's time to first token, p50, alone", unit="s", value=middle[0]),
        Figure(name="the same beside the batches", unit="s", value=middle[1], direct=middle[0],
               through=middle[1]),
        Figure(name="chat's time to first token, p99, alone", unit="s", value=first[0]),
        Figure(name="the same beside the batches", unit="s", value=first[1],
               direct=first[0], through=first[1], budget=Budget(1.5 * first[0])),
        *_uploading(seen),
        *(
            Figure(name=f"memory of a {name}, the most", unit="MB", value=held / MB,
                   budget=Budget(200))
            for name, held in seen.memory.most.items()
        ),
    ]  # fmt: skip


def _uploading(seen: Seen) -> list[Figure]:
    if seen.uploading is None:
        return []
    here, alone = (percentile(c.first_s, 0.95) for c in (seen.uploading, seen.alone))
    return [
        Figure(name="chat's time to first token, p95, beside uploads", unit="s", value=here,
               direct=alone, through=here, budget=Budget(1.2 * alone)),
    ]  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--lines", default=50_000, show_default=True, type=click.IntRange(3, 150_000))
@click.option("--slots", default=64, show_default=True, type=click.IntRange(1, 1_000))
@click.option("--step-ms", default=20.0, show_default=True, type=click.FloatRange(0.1, 1_000))
@click.option("--direct-s", default=40.0, show_default=True, type=click.FloatRange(1))
@click.option("--chat", default=0.5, show_default=True, type=click.FloatRange(0.001, 0.9),
              help="Requests of chat, by what the engines can do.")  # fmt: skip
@click.option("--chat-s", default=120.0, show_default=True, type=click.FloatRange(20),
              help="Seconds of chat beside the batches.")  # fmt: skip
@click.option("--upload/--no-upload", default=True, show_default=True,
              help="Measure chat beside uploads of 200 MB, too.")  # fmt: skip
@click.option("--kill", default=0.0, show_default=True, type=click.FloatRange(0),
              help="Seconds from one kill -9 to the next; 0: none.")  # fmt: skip
def main(
    lines: int, slots: int, step_ms: float, direct_s: float, chat: float, chat_s: float,
    upload: bool, kill: float,
) -> None:  # fmt: skip
    """Measure batches on this machine."""
    plan = Plan(
        lines=lines, slots=slots, step_ms=step_ms, direct_s=direct_s, chat=chat, chat_s=chat_s,
        upload=upload, kill_s=kill,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fairlane-batches-") as name:
        part = uvloop.run(measure(plan, Path(name)))
    click.echo(table([part]))
    missed = any(f.budget and f.budget.verdict(f.value) == "missed" for f in part.figures)
    sys.exit(missed and not kill)


if __name__ == "__main__":
    main()
