"""Jobs that ended, into parts of the output and error files: each line exactly once.

The list of ended jobs is read and left as it is; their answers are read, the lines go into parts,
and one commit writes down the parts' names and which lines are in them. Only then are the jobs
forgotten and taken off the list, one by one by their ids, so that a worker that lost its lease
takes nothing off that was not written down. A line that is in a part already is passed over.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from common import joblog
from common.batch_output import error_line, line_id, response_line
from common.broker import Broker
from common.errors import WireError
from common.intake.answers import ending
from common.keys import ModelKeys
from common.outcomes import Outcome
from common.wire import Usage
from gateway.batches.lines import IndexGoneError, check_store, part_path
from gateway.batches.plan import (
    PART_BYTES,
    ROUND_LINES,
    Done,
    due,
    next_slice,
    read_job_id,
    verdict,
)
from gateway.batches.run import Run

ANSWER_MAX = 16 << 20
"""The largest answer that goes into a file."""
_FIRST = 3
"""Entries of a log read at once: whole answers that are no streams have two or three, of at most
256 KiB each."""
_TOKENS = ("input", "cached", "output")
_TOO_LARGE = "answer_too_large"


class Answer(msgspec.Struct):
    """What a job ended with."""

    outcome: Outcome
    message: str = ""
    usage: Usage | None = None
    status: int | None = None
    body: bytes = b""
    large: bool = False


class Gathered:
    """Lines that are to be written down together."""

    def __init__(self, done: Done) -> None:
        self._done = done
        self.files: dict[str, list[bytes]] = {"o": [], "e": []}
        self.lines: set[int] = set()
        self.jobs: list[str] = []
        """To be forgotten afterwards."""
        self.size = 0
        self.tokens = [0, 0, 0]

    def add(self, line: int, kind: str, text: bytes, usage: Usage | None = None) -> None:
        """A line of the output (`o`) or error file (`e`), unless it has one already."""
        if line in self._done or line in self.lines:
            return
        self.lines.add(line)
        self.files[kind].append(text)
        self.size += len(text)
        if usage is not None:
            for i, n in enumerate((usage.input, usage.cached, usage.output)):
                self.tokens[i] += n


async def waiting(run: Run) -> int:
    """How many jobs have ended and are not collected."""
    sink = run.queue.keys.ended(run.about.sink)
    return int(await run.tools.broker.command("LLEN", sink)) + len(run.extras)


async def collect(run: Run, ended: int, *, now: bool = False, stopping: bool = False) -> int:
    """Write down what has ended, of `ended` jobs, where that is due, or `now`; how many. Raises
    LostError, InputGoneError, BrokerError, StoreError."""
    clock = asyncio.get_running_loop().time()
    ready = ended + len(run.bad)
    if not ready:
        run.seen_at = None
        return 0
    if run.seen_at is None:
        run.seen_at = clock
    # The last results make nobody wait.
    last = ready >= run.state.left
    if not (now or last or due(ready, clock - run.seen_at, run.age_s)):
        return 0
    run.seen_at = None
    sink = run.queue.keys.ended(run.about.sink)
    listed = await run.tools.broker.command("LRANGE", sink, 0, ROUND_LINES - 1)
    jobs = list(dict.fromkeys([*(j.decode(errors="replace") for j in listed), *run.extras]))
    gathered = Gathered(run.done)
    for line, text in run.bad:
        gathered.add(line, "e", text)
    run.bad.clear()
    while jobs:
        part, jobs = jobs[: run.slice], jobs[run.slice :]
        size = gathered.size
        await _slice(run, gathered, part, stopping)
        run.slice = next_slice(run.slice, len(part), gathered.size - size)
        if gathered.size >= PART_BYTES:
            await write(run, gathered)
            gathered = Gathered(run.done)
    await write(run, gathered)
    run.extras.clear()
    return ready


async def _slice(run: Run, gathered: Gathered, jobs: Sequence[str], stopping: bool) -> None:
    """What becomes of these jobs."""
    wanted: dict[str, tuple[int, int]] = {}
    for job in jobs:
        gathered.jobs.append(job)
        place = read_job_id(run.about.hex, job)
        if place is None or place[0] >= run.state.cursor:
            continue
        if place[0] in run.done or place[0] in gathered.lines:
            run.land(place[0])
            continue
        wanted[job] = place
    k = run.queue.keys
    answers = await asyncio.gather(*(_answer(run, k, job) for job in wanted))
    kept = []
    for (job, (line, attempt)), answer in zip(wanted.items(), answers, strict=True):
        flight = run.flights.get(line)
        what = verdict(
            answer.outcome, answer.status, attempt, run.tools.settings.retries, stopping=stopping
        )
        if what in ("failed", "again", "moved") and flight and attempt < flight.attempt:
            continue  # an older try of a line that is under way
        if what in ("again", "moved"):
            run.land(line)
            run.again[line] = attempt + 1
        elif what == "left":
            run.land(line)
        else:
            kept.append((line, job, what, answer))
    names = await _custom_ids(run, [line for line, *_ in kept])
    for line, job, what, answer in kept:
        run.land(line)
        run.again.pop(line, None)
        kind = "o" if what == "output" and not answer.large else "e"
        text = _text(run, line, names[line], job, what, answer)
        gathered.add(line, kind, text, answer.usage if kind == "o" else None)


async def write(run: Run, gathered: Gathered) -> None:
    """Write parts, commit them, forget the jobs."""
    tools, state = run.tools, run.state
    if gathered.lines:
        parts = []
        for kind, texts in gathered.files.items():
            if texts:
                parts.append(run.part_name(kind))
                await tools.store.put(part_path(run.about.hex, parts[-1]), b"".join(texts))
        await check_store(tools.store, run.about.hex)
        output, errors = len(gathered.files["o"]), len(gathered.files["e"])
        fields = {
            "completed": state.completed + output, "failed": state.failed + errors,
            **{n: getattr(state, n) + k for n, k in zip(_TOKENS, gathered.tokens, strict=True)},
        }  # fmt: skip
        await run.commit(lines=sorted(gathered.lines), parts=parts, fields=fields)
        tools.metrics.lines("output", output)
        tools.metrics.lines("error", errors)
    if gathered.jobs:
        sink = run.queue.keys.ended(run.about.sink)
        await asyncio.gather(
            run.queue.forget([j for j in gathered.jobs if read_job_id(run.about.hex, j)]),
            *(tools.broker.command("LREM", sink, 1, job) for job in gathered.jobs),
        )


async def _custom_ids(run: Run, lines: list[int]) -> dict[int, str]:
    """Of these lines: those that this process did not put on the queue are read again."""
    names = {n: f.custom_id for n in lines if (f := run.flights.get(n)) and f.custom_id}
    rest = sorted({n for n in lines if n not in names})
    if not rest:
        return names
    if run.input is None:
        raise IndexGoneError("a batch's index was not read")
    async for group in run.input.read(rest):
        names |= {line.number: line.custom_id for line in group}
    return names


def _text(run: Run, line: int, custom_id: str, job: str, what: str, answer: Answer) -> bytes:
    id = line_id(run.about.id, line)
    if answer.large:
        text = f"The answer is larger than {ANSWER_MAX} bytes."
        return error_line(id, custom_id, _TOO_LARGE, text)
    if what in ("output", "error") and answer.status is not None:
        return response_line(id, custom_id, answer.status, job, answer.body)
    told = ending(answer.outcome, answer.message)
    return error_line(id, custom_id, told.code or "engine_error", told.message)


async def _answer(run: Run, keys: ModelKeys, job: str) -> Answer:
    async with run.tools.reading:
        return await read_answer(run.tools.broker, keys, job)


async def read_answer(broker: Broker, keys: ModelKeys, job: str) -> Answer:
    """What a job ended with; `lost` where its log does not say. Raises BrokerError."""
    try:
        found = await joblog.whole(broker, keys, job, ANSWER_MAX, _FIRST)
    except WireError:
        found = None
    if found is None:
        return Answer(Outcome.LOST)
    head, end = found.head, found.end
    if head is None or end.outcome not in (Outcome.FINISHED, Outcome.REFUSED):
        return Answer(end.outcome, end.message, end.usage)
    return Answer(
        end.outcome, end.message, end.usage, head.status, found.body or b"", found.body is None
    )
