"""The first step of a batch: its whole input is read and checked, and indexed, before any line of
it is run."""

import msgspec

from common.batch_input import BatchError, Validator
from common.errors import StoreError
from gateway.batches.lines import Index, IndexMaker, index_path
from gateway.batches.run import Run
from gateway.files import FileRecord

MODELS_S = 60.0
"""While no engine is known to answer, a model that is not known is waited for so long."""


async def validate(run: Run) -> bool:
    """Read the input. Its status is then `in_progress`, or `failed`; False: it is too early to say.
    Raises LostError, ChangedError, BrokerError, StoreError."""
    tools, about = run.tools, run.about
    if not tools.models.loaded:
        await tools.models.refresh()
    record = await tools.files.find(about.owner, about.input_file_id)
    if record is not None:
        try:
            return await _read(run, record)
        except StoreError:
            if await tools.files.whole(record):
                raise
    await _fail(run, [BatchError("input_file_not_found", "The input file is no more.")])
    return True


async def _read(run: Run, record: FileRecord) -> bool:
    tools, about = run.tools, run.about
    index, model = IndexMaker(), ""
    check = Validator(about.endpoint, usable=lambda name: _usable(run, name))
    async for block in tools.files.read(record):
        for request in check.feed(block):
            index.add(request.offset, request.size)
            model = model or request.model
        if check.full:
            break
    for request in check.end():
        index.add(request.offset, request.size)
        model = model or request.model
    if check.errors:
        unknown = any(e.code == "model_not_found" for e in check.errors)
        if unknown and not tools.models.ready and run.age_s < MODELS_S:
            return False
        await _fail(run, check.errors)
        return True
    served = tools.models.resolve(model)
    data = index.bytes()
    await tools.store.put(index_path(about.hex), data)
    fields: dict[str, str | int | bytes] = {
        "status": "in_progress", "in_progress_at": run.now_ms // 1000, "total": check.total,
        "model": served.name if served else model,
    }  # fmt: skip
    await run.commit(expect="validating", fields=fields)
    run.open(Index(data))
    run.recovered = True  # nothing was put on the queue yet
    run.epoch = tools.broker.epoch
    return True


def _usable(run: Run, name: str) -> bool:
    served, may = run.tools.models.resolve(name), run.about.models
    return served is not None and (not may or name in may or served.name in may)


async def _fail(run: Run, errors: list[BatchError]) -> None:
    data = [msgspec.structs.asdict(e) for e in errors]
    fields: dict[str, str | int | bytes] = {
        "status": "failed", "failed_at": run.now_ms // 1000, "errors": msgspec.json.encode(data),
    }  # fmt: skip
    await run.commit(expect="validating", keep=True, fields=fields)
