"""Lines that should be on the queue: found again by a worker that takes a batch over, and looked
for where nothing has come of them for a while, for Redis may have lost the last it was told.
"""

import asyncio
from collections.abc import Sequence

from common.outcomes import Outcome
from gateway.batches.collect import waiting
from gateway.batches.plan import ATTEMPT_MAX, job_id
from gateway.batches.run import Flight, Run

AT_ONCE = 500
"""Records looked at, or jobs cancelled, at once."""


async def recover(run: Run) -> None:
    """Find what earlier runners have put on the queue. Raises BrokerError."""
    lines = list(run.done.undone(0, run.state.cursor))
    attempts = dict.fromkeys(lines, 0)
    for attempt in range(ATTEMPT_MAX + 1):
        rest = []
        for line, (state, cls) in zip(lines, await _records(run, lines, attempt), strict=True):
            if state in ("", "cancelled"):
                rest.append(line)
                attempts[line] = attempt + 1 if state else attempts[line]
            else:
                run.put(line, Flight(attempt, cls))
        lines = rest
        if not lines:
            break
    run.again = {line: attempts[line] for line in lines}
    run.recovered = True
    run.epoch = run.tools.broker.epoch


async def look(run: Run) -> None:
    """Look for all lines that should be on the queue: those that are not go there again, and those
    that have ended although no list tells of it are collected. Raises BrokerError."""
    epoch = run.tools.broker.epoch
    ended = []
    for attempt in sorted({f.attempt for f in run.flights.values()}):
        lines = [line for line, f in run.flights.items() if f.attempt == attempt]
        for line, (state, _) in zip(lines, await _records(run, lines, attempt), strict=True):
            if state in ("", "cancelled"):
                run.land(line)
                run.again[line] = min(ATTEMPT_MAX, attempt + bool(state))
            elif state == "done":
                ended.append(job_id(run.about.hex, line, attempt))
    if ended and not await waiting(run):
        run.extras = ended
    run.epoch = epoch


async def _records(run: Run, lines: Sequence[int], attempt: int) -> list[tuple[str, str]]:
    """(state, class) of the record of each line's job; empty where there is none."""
    found: list[tuple[str, str]] = []
    k, command = run.queue.keys, run.tools.broker.command
    for start in range(0, len(lines), AT_ONCE):
        part = lines[start : start + AT_ONCE]
        jobs = (k.record(job_id(run.about.hex, line, attempt)) for line in part)
        for state, cls in await asyncio.gather(
            *(command("HMGET", j, "state", "class") for j in jobs)
        ):
            found.append(((state or b"").decode(), (cls or b"").decode()))
    return found


async def stop(run: Run) -> None:
    """Take all lines off the queue; those that run are told to stop. Raises BrokerError."""
    run.again.clear()
    flights = list(run.flights.items())
    for start in range(0, len(flights), AT_ONCE):
        part = flights[start : start + AT_ONCE]
        await asyncio.gather(*(_stop(run, line, flight) for line, flight in part))


async def _stop(run: Run, line: int, flight: Flight) -> None:
    job = job_id(run.about.hex, line, flight.attempt)
    await run.queue.stop(job, flight.cls or "batch", run.about.owner, "", Outcome.CANCELLED)
