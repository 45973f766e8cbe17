"""The last steps of a batch: what is left is accounted for, parts become the two files, and what it
used in the store is removed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import msgspec

from common.batch_output import CANCELLED, EXPIRED, error_line, line_id
from common.clock import wall
from common.errors import StoreError
from gateway.batches.collect import Gathered, write
from gateway.batches.lines import InputGoneError, check_store, part_path
from gateway.batches.run import Run, Tools
from gateway.files import FileRecord, content_path, new_id, record_path

CHUNK_LINES = 2_000
"""Lines left undone that are written down together."""
CHUNK_BYTES = 4 << 20
DELETED_AT_ONCE = 16
SWEEP_MAX = 1_000
OLD_S = 86_400.0
_KINDS = {"o": ("output_file_id", "output"), "e": ("error_file_id", "error")}
log = logging.getLogger("fairlane.batches")

_WHY = {"cancelled": CANCELLED, "expired": EXPIRED}


async def account(run: Run, goal: str) -> None:
    """Write a line into the error file for each that has no result. Raises as `write`."""
    why = _WHY.get(goal)
    if why is None or run.input is None:
        return
    gathered = Gathered(run.done)
    lines = list(run.done.undone(0, run.state.total))
    try:
        for start in range(0, len(lines), CHUNK_LINES):
            async for group in run.input.read(lines[start : start + CHUNK_LINES]):
                for line in group:
                    text = error_line(line_id(run.about.id, line.number), line.custom_id, *why)
                    gathered.add(line.number, "e", text)
            if len(gathered.lines) >= CHUNK_LINES or gathered.size >= CHUNK_BYTES:
                await write(run, gathered)
                gathered = Gathered(run.done)
    except InputGoneError:  # then nobody can tell any more what the lines were
        await check_store(run.tools.store, run.about.hex)
    await write(run, gathered)


async def finish(run: Run, goal: str) -> None:
    """Make the files, and let the batch be over. May be repeated by whoever takes it over: the
    files' ids are written down first, so there is one of each. Raises LostError, ChangedError,
    BrokerError, StoreError."""
    parts = await run.tools.batches.parts(run.about.id)
    ids: dict[str, str | int | bytes] = {}
    for kind, (field, _) in _KINDS.items():
        known = getattr(run.state, field)
        if known or any(name.endswith(f".{kind}") for name in parts):
            ids[field] = known or new_id(run.now_ms / 1000)
    if ids:
        await run.commit(fields=ids)
    for kind, (field, name) in _KINDS.items():
        if field in ids:
            chosen = [p for p in parts if p.endswith(f".{kind}")]
            await _make(run, str(ids[field]), chosen, f"{run.about.id}_{name}.jsonl")
    fields: dict[str, str | int | bytes] = {"status": goal, f"{goal}_at": run.now_ms // 1000}
    await run.commit(expect=run.status, keep=True, fields=fields)
    run.tools.metrics.ended(goal)


async def _make(run: Run, id: str, parts: Sequence[str], filename: str) -> None:
    files, store, about = run.tools.files, run.tools.store, run.about
    if await files.find(about.owner, id) is not None:
        return
    size = await store.write(content_path(about.owner, id), _joined(run, parts))
    created, lives = run.now_ms // 1000, about.output_expires_s
    record = FileRecord(
        id=id, owner=about.owner, bytes=size, created_at=created, filename=filename,
        purpose="batch_output", expires_at=None if lives is None else created + lives,
    )  # fmt: skip
    await store.put(record_path(about.owner, id), msgspec.json.encode(record))


async def _joined(run: Run, parts: Sequence[str]) -> AsyncIterator[bytes]:
    store = run.tools.store
    for name in parts:
        path = part_path(run.about.hex, name)
        size = await store.size(path)
        if size is None:
            if not run.late:
                raise StoreError("a part of a batch's results is gone")
            log.error("batch %s: results are lost: %s is not in the store", run.about.id, path)
            continue
        async for block in store.read(path, 0, size):
            yield block


async def sweep(tools: Tools, after: str) -> str:
    """Look at the next SWEEP_MAX objects of batches, and remove those of a day ago whose batch is
    over or gone, as after a loss of Redis; where to go on. Raises StoreError, BrokerError."""
    found = await tools.store.list("batches", after, SWEEP_MAX)
    old = [f.path for f in found if f.modified < wall() - OLD_S]
    for hex in sorted({p.split("/")[1] for p in old}):
        batch = await tools.batches.find(f"batch_{hex}")
        if batch is None or batch[1].over:
            await clean(tools, hex)
    return found[-1].path if len(found) >= SWEEP_MAX else ""


async def clean(tools: Tools, hex: str) -> None:
    """Remove what a batch used in the store. Raises StoreError."""
    found = await tools.store.list(f"batches/{hex}")
    for start in range(0, len(found), DELETED_AT_ONCE):
        part = found[start : start + DELETED_AT_ONCE]
        await asyncio.gather(*(tools.store.delete(f.path) for f in part))
