"""Lines onto the queue, within the window: those that are due again first, then the next ones.

The cursor is written down before a line beyond it is put on the queue, so that whoever takes over
knows where to look. A line is put there under the same job whoever does it, so it is there once.
"""

import asyncio

import msgspec

from common.batch_output import line_id, response_line
from common.intake import body as bodies
from common.intake.answers import Refusal
from common.intake.job import new_job
from common.intake.routes import ROWS
from common.jobs import Limits, NewJob
from gateway.batches.lines import Line
from gateway.batches.plan import CHUNK_LINES, Lane, job_id, lane, room
from gateway.batches.run import Flight, Run

CHUNK_BYTES = 1 << 20
"""Put on the queue at once; a larger line goes alone."""
FULL_S = (0.25, 2.0)
"""Pause after the queue took no more; doubled each time."""
KEEP_MS = 86_400_000
"""An answer that nobody collects is kept for so long after the window."""
_ROWS = {row.path: row for row in ROWS}
_ALONE = ("stream", "stream_options", "background")
"""What a body may not ask for in a batch, where nobody follows it and all of it is later."""


async def feed(run: Run, ended: int) -> int:
    """Put lines on the queue while there is room, one chunk; how many. `ended`: of the flights, so
    many have ended. Requests that no engine can be asked for go to `run.bad`. Raises LostError,
    ChangedError, InputGoneError, BrokerError, StoreError."""
    now = asyncio.get_running_loop().time()
    if now < run.full_until:
        return 0
    settings, about = run.tools.settings, run.about
    how = lane(
        run.now_ms, about.created_ms, about.expires_ms, settings.escalate_at, about.cls,
        about.weight, settings.ahead_lines,
    )  # fmt: skip
    flying = len(run.flights)
    size = run.bytes * (flying - ended) // flying if flying else 0
    lines = _next(run, *room(max(0, flying - ended), size, how.most, settings.ahead_bytes))
    if not lines:
        return 0
    if lines[-1] >= run.state.cursor:
        await run.commit(expect="in_progress", fields={"cursor": lines[-1] + 1})
    return await _put(run, lines, how)


def _next(run: Run, most: int, bytes_max: int) -> list[int]:
    """The lines of the next chunk, in rising order."""
    end = min(run.state.total, run.state.cursor + CHUNK_LINES)
    chosen: list[int] = []
    size = 0
    for line in (*sorted(run.again), *range(run.state.cursor, end)):
        size += run.index.size(line)
        if len(chosen) >= min(most, CHUNK_LINES) or (chosen and size > CHUNK_BYTES):
            break
        if size > bytes_max and (chosen or run.flights):
            break
        chosen.append(line)
    return sorted(chosen)


async def _put(run: Run, lines: list[int], how: Lane) -> int:
    assert run.input is not None
    for number in lines:  # before the cursor now: to be put, whatever happens below
        run.again.setdefault(number, 0)
    fed = 0
    async for group in run.input.read(lines):
        jobs: list[tuple[Line, NewJob]] = []
        for line in group:
            try:
                jobs.append((line, _job(run, line, how)))
            except Refusal as e:
                run.again.pop(line.number, None)
                run.bad.append((line.number, _refused(run, line, e)))
        fed += await _enqueue(run, jobs, how)
    return fed


async def _enqueue(run: Run, jobs: list[tuple[Line, NewJob]], how: Lane) -> int:
    limits = _limits(run, how)
    answers = await asyncio.gather(*(run.queue.enqueue(job, limits) for _, job in jobs))
    fed = full = again = 0
    for (line, _), answer in zip(jobs, answers, strict=True):
        attempt = run.again[line.number]
        if answer.word in ("queued", "known"):
            fed += 1
            again += attempt > 0
            run.put(line.number, Flight(attempt, how.cls, line.custom_id))
        elif answer.word == "cancelled":  # its id is refused for a while
            run.again[line.number] = attempt + 1
        else:
            full += 1
    run.tools.metrics.lines("fed", fed)
    run.tools.metrics.lines("again", again)
    run.tools.metrics.lines("full", full)
    low, high = FULL_S
    run.full_s = min(high, max(low, run.full_s * 2)) if full else 0.0
    if full:
        run.full_until = asyncio.get_running_loop().time() + run.full_s
    return fed


def _job(run: Run, line: Line, how: Lane) -> NewJob:
    """Raises Refusal for a body that cannot be asked for."""
    about, model = run.about, run.served
    body, fields = line.body, bodies.read(line.body)
    if any(name in fields.top for name in _ALONE):
        body = msgspec.json.encode({n: v for n, v in fields.top.items() if n not in _ALONE})
        fields = bodies.read(body)
    left_ms = max(0, about.expires_ms - run.now_ms)
    return new_job(
        _ROWS[about.endpoint], fields, body, model, run.tools.policies.of(model.name),
        user=about.user, sub=about.sub, weight=how.weight, cls=how.cls,
        id=job_id(about.hex, line.number, run.again[line.number]), wait_ms=how.wait_ms,
        keep_ms=left_ms + KEEP_MS, sink=about.sink,
    )  # fmt: skip


def _limits(run: Run, how: Lane) -> Limits:
    share = run.tools.settings.queue_share
    given = run.tools.policies.of(run.state.model).limits(how.cls, run.about.key_jobs)
    return msgspec.structs.replace(
        given,
        model_jobs=max(1, int(given.model_jobs * share)),
        model_bytes=max(1, int(given.model_bytes * share)),
    )


def _refused(run: Run, line: Line, refusal: Refusal) -> bytes:
    answer, number = refusal.answer, line.number
    request = job_id(run.about.hex, number, 0)
    return response_line(
        line_id(run.about.id, number), line.custom_id, answer.status, request, answer.body()
    )
