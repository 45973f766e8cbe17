"""Turns: whoever has a free hand takes a batch that nobody runs, and brings it on for a while.

A turn holds the batch's lease; its death is noticed by the lease's end, and any other worker goes
on from what is in Redis and the store. What a turn knows is kept in the process for the next one,
which uses it if nobody else had the batch in between.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict

import msgspec

from common.batch_input import BatchError
from common.batch_state import OVER
from common.batches import LEASE_MS
from common.errors import BrokerError, StoreError
from gateway.batches import collect, finish, watch
from gateway.batches.feed import feed
from gateway.batches.lines import IndexGoneError, InputGoneError, check_store, load_index
from gateway.batches.plan import Done
from gateway.batches.run import ChangedError, LostError, Run, Tools
from gateway.batches.validate import validate

log = logging.getLogger("fairlane.batches")

TURN_S = 15.0
"""A turn ends after this where others may want one."""
RENEW_S = LEASE_MS / 4000
NOT_YET_S = 1.0
"""Pause before a batch is validated again that cannot be yet."""
IDLE_S = 0.1
"""Pause where there was nothing to do."""
LOOK_S = 10.0
"""Lines of which nothing has come for so long are looked for."""
LOOK_ALL_S = 60.0
"""Else they are this often."""
RESTORED_S = 4.0
"""After another connection to Redis: dispatchers tell it first what they run."""
STOP_S = 60.0
"""Lines that run when a batch is given up may take so long to end."""
STOP_LOOK_S = 2.0
FORGET_ROUNDS = 400
"""As many as the list of ended jobs may be long."""
KEPT_MAX = 32
"""Most batches whose state is kept between turns: each takes some MB."""


class Turns:
    """The turns of one worker."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._kept: OrderedDict[str, Run] = OrderedDict()
        self.running: set[str] = set()

    async def turn(self, id: str, seconds: float = TURN_S) -> bool:
        """Bring a batch on for about so long; whether there is more to do. Never raises what Redis
        or the store do: another turn will try again."""
        if id in self.running:
            return False
        self.running.add(id)
        self._tools.metrics.running(len(self.running))
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            return await self._turn(id, start + seconds)
        except* (BrokerError, StoreError) as group:
            kind = "store" if group.subgroup(StoreError) else "redis"
            log.warning("batch %s: %s", id, group.exceptions[0])
            self._tools.metrics.failed(kind)
        except* LostError:
            self._tools.metrics.failed("lost")
        finally:
            self.running.discard(id)
            self._tools.metrics.running(len(self.running))
            self._tools.metrics.turn(loop.time() - start)
        return False

    async def _turn(self, id: str, until: float) -> bool:
        tools = self._tools
        held = await tools.batches.take("take", id, tools.owner)
        if held.word in ("over", "gone"):
            await self._over(id)
            return False
        if held.word != "yours":
            return False
        run = self._kept.pop(id, None)
        if run is None or run.version != held.version:
            found = await tools.batches.find(id)
            if found is None:
                return False
            run = Run(tools, *found, Done(await tools.batches.done(id)))
        run.held(held)
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(self._renew(run))
            await self._work(run, until)
            renewing.cancel()
        if run.state.over:
            await self._over(id)
            return False
        self._kept[id] = run
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        await tools.batches.take("give", id, tools.owner, run.fence)
        return True

    async def _renew(self, run: Run) -> None:
        """Keep the lease, and hear of a cancellation. Raises LostError."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(BrokerError):
                held = await self._tools.batches.take(
                    "renew", run.about.id, self._tools.owner, run.fence
                )
                if held.word in ("lost", "gone"):
                    raise LostError
                run.heard(held)

    async def _work(self, run: Run, until: float) -> None:
        """One step after the other, whatever the status calls for, until it is over or the time
        is."""
        while run.status not in OVER:
            try:
                if run.status == "validating":
                    if run.now_ms >= run.about.expires_ms:  # its input cannot be read, it seems
                        await finish.finish(run, "expired")
                    elif not await validate(run):
                        await asyncio.sleep(NOT_YET_S)
                        return
                elif run.status == "in_progress":
                    await self._opened(run)
                    if not await self._pump(run, until):
                        return
                else:
                    await self._end(run, run.state.goal or "cancelled")
            except ChangedError:
                continue
            except InputGoneError:
                await self._gone(run)
            except IndexGoneError:
                if not run.late:
                    raise
                if run.status == "in_progress":
                    await self._finalize(run, "expired")

    async def _opened(self, run: Run) -> None:
        if run.input is None and run.state.total:
            run.open(await load_index(self._tools.store, run.about.hex))
        if not run.recovered:
            await watch.recover(run)

    async def _pump(self, run: Run, until: float) -> bool:
        """Put lines on the queue and collect them; False: the time is over, and there is more."""
        loop = asyncio.get_running_loop()
        last = looked = loop.time()
        while run.status == "in_progress" and run.state.left:
            if run.now_ms >= run.about.expires_ms:
                await self._finalize(run, "expired")
                return True
            ended = await collect.waiting(run)
            fed = await feed(run, ended)
            collected = await collect.collect(run, ended)
            now = loop.time()
            if run.epoch != self._tools.broker.epoch and run.look_at is None:
                run.look_at = now + RESTORED_S
            if fed or collected or ended:
                last = now
            if now - last > LOOK_S or now - looked > LOOK_ALL_S or now >= (run.look_at or now + 1):
                await watch.look(run)
                last, looked, run.look_at = now, now, None
            if now >= until and not fed:
                return False
            if not (fed or collected):
                await asyncio.sleep(IDLE_S)
        if run.status == "in_progress":
            await self._finalize(run, "completed")
        return True

    async def _finalize(
        self, run: Run, goal: str, more: dict[str, str | int | bytes] | None = None
    ) -> None:
        fields: dict[str, str | int | bytes] = {
            "status": "finalizing", "goal": goal, "finalizing_at": run.now_ms // 1000,
        }  # fmt: skip
        await run.commit(expect="in_progress", fields=fields | (more or {}))

    async def _end(self, run: Run, goal: str) -> None:
        """Give up what is on the queue, account for what is left, write the files."""
        if run.state.total and run.state.left:
            try:
                with contextlib.suppress(InputGoneError):
                    await self._opened(run)
                    await self._drain(run)
                await finish.account(run, goal)
            except IndexGoneError:
                if not run.late:
                    raise
        with contextlib.suppress(InputGoneError, *((IndexGoneError,) if run.late else ())):
            await self._forget(run)
        await finish.finish(run, goal)

    async def _forget(self, run: Run) -> None:
        """Jobs of which a runner before could write down the results, and no more."""
        rounds = 0
        while run.state.total and rounds < FORGET_ROUNDS and (left := await collect.waiting(run)):
            await collect.collect(run, left, now=True, stopping=True)
            rounds += 1

    async def _drain(self, run: Run) -> None:
        """Until nothing of it is on the queue."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOP_S
        look_at = loop.time() + STOP_LOOK_S
        await watch.stop(run)
        while run.flights and loop.time() < deadline:
            ended = await collect.waiting(run)
            collected = await collect.collect(run, ended, now=True, stopping=True)
            if loop.time() >= look_at and not collected:
                await watch.look(run)
                await watch.stop(run)
                look_at = loop.time() + STOP_LOOK_S
            if not collected:
                await asyncio.sleep(IDLE_S)

    async def _gone(self, run: Run) -> None:
        """The input was deleted: the batch fails with what it has."""
        if run.status == "in_progress":
            await check_store(self._tools.store, run.about.hex)
            error = BatchError("input_file_not_found", "The input file is no more.")
            data = msgspec.json.encode([msgspec.structs.asdict(error)])
            with contextlib.suppress(ChangedError):
                await self._finalize(run, "failed", {"errors": data})

    async def _over(self, id: str) -> None:
        """Remove what it used. What cannot be removed now, `Sweep` does."""
        tools = self._tools
        self._kept.pop(id, None)
        found = await tools.batches.find(id)
        if found is None:
            await tools.batches.gone(id, tools.settings.active_max)
            return
        about, state = found
        await finish.clean(tools, about.hex)
        await tools.batches.finished(id, about.owner, state.model)
