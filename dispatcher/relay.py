"""Run one leased job: its request to an engine, the engine's answer to the gateway, its end.

Owner: the dispatcher that popped the job, from here until `settle` (nobody owns it afterwards) or
`requeue` (the queue does). Limit: its lease, renewed in `runs.py`. Heir: the leader, once the
lease has passed.
"""

import asyncio
import logging
from collections.abc import Callable

from common.errors import BrokerError
from common.metrics import DispatcherMetrics
from common.outcomes import Outcome
from common.settings import DispatcherSettings
from common.wire import FRAME_BYTES_MAX
from dispatcher.answer import Step, StreamRules
from dispatcher.bodies import ErrorInfo, decode_object, make_error, read_error, read_usage
from dispatcher.closing import MESSAGES, Closing, Ending
from dispatcher.dialects import error_event, json_to_stream
from dispatcher.engine import Answer, Broken, EngineClient, Refused
from dispatcher.engines.kinds import busy
from dispatcher.retries import Retries
from dispatcher.runs import Run, Runs

log = logging.getLogger("fairlane.relay")

USAGE_BODY_MAX, ANSWER_MAX = 4 << 20, 256 << 20
"""A larger JSON answer is handed on without reading it; broken off."""
HANG_UP_S = 0.1
"""How long an answered engine is given to end its body, so that the connection can serve again."""
JSON_HEADERS = [("content-type", "application/json")]


class Relay:
    """Runs leased jobs against the engines."""

    def __init__(
        self,
        client: EngineClient,
        closing: Closing,
        runs: Runs,
        settings: DispatcherSettings,
        metrics: DispatcherMetrics,
    ) -> None:
        self._client = client
        self._closing = closing
        self._runs = runs
        self._settings = settings
        self._metrics = metrics
        self._retries = Retries(metrics)

    async def run(self, run: Run, wake: Callable[[], None], settled: Callable[[], None]) -> bool:
        """One run to its end; True: the job's too. `wake` is called when its backend has a place
        again, `settled` once its user has one job less in flight."""
        self._runs.add(run)
        run.task = asyncio.current_task()
        try:
            ending = await self._served(run, wake)
            run.left(_now(), ending.outcome)
            wake()
            if run.answer is not None and ending.outcome is not Outcome.FINISHED:
                await run.answer.close()
                run.answer = None
            await self._closing.finish(run, ending)
            settled()
            if run.answer is not None:
                await self._hang_up(run.answer)
            return not ending.requeue
        finally:
            run.backend.ended(_now(), run.lease.job)
            self._runs.remove(run)
            if run.answer is not None:
                await run.answer.close()

    async def _served(self, run: Run, wake: Callable[[], None]) -> Ending:
        """The engine's part of a run. `Run.stop` cancels this task only while it lasts."""
        try:
            ending = await self._serve(run, wake)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if run.stopped is None or task is None or task.uncancel():
                raise
        except Exception:
            log.exception("run %s failed", run.lease.job)
            return Ending(Outcome.FAILED, MESSAGES[Outcome.FAILED])
        else:
            if run.stopped is None:
                return ending
        finally:
            run.task = None
        if run.yielded:
            return Ending(run.stopped, requeue=True, yields=True)
        return self._retries.stopped(run, run.stopped)

    async def _serve(self, run: Run, wake: Callable[[], None]) -> Ending:
        lease, backend = run.lease, run.backend
        try:
            if not await self._runs.fresh(run):
                return Ending(Outcome.LOST)
        except BrokerError:
            return Ending(Outcome.TRIES, requeue=True)  # nothing was sent, whatever Redis did
        run.sent_at = _now()
        run.read_until = run.sent_at + self._settings.first_byte_s
        try:
            answer = await self._client.send(
                backend.url, run.meta.path, lease.body, stream=run.meta.stream,
                api_key=backend.settings.api_key, job=lease.job, priority=run.priority,
                host=backend.host,
            )  # fmt: skip
        except Refused:
            return self._retries.refused(run)
        except Broken:
            return self._retries.broke(run)
        run.answer = answer
        return await self._answered(run, answer, wake)

    async def _answered(self, run: Run, answer: Answer, wake: Callable[[], None]) -> Ending:
        try:
            if answer.status != 200:
                return await self._refusal(run, answer)
            if not run.meta.stream:
                return await self._body(run, answer, wake)
            if answer.content_type.startswith("application/json"):
                return await self._unstreamed(run, answer, wake)
        except Broken:
            return self._retries.broke_off(run) if run.started else self._retries.broke(run)
        return await self._stream(run, answer, wake)

    async def _refusal(self, run: Run, answer: Answer) -> Ending:
        """An error status: backpressure goes back to the queue, the rest is the client's."""
        body = await answer.rest()
        if busy(run.backend.reading.kind, answer.status, body):
            return self._retries.refused(run)
        run.begun = True
        run.backend.started(_now(), run.lease.job)
        status = answer.status if answer.status >= 400 else 502
        error = read_error(body, status)
        headers = [h for h in answer.headers if h[0] != "content-type"] + JSON_HEADERS
        frames = run.out.first(status, headers, False, error.body)
        return await self._whole(run, frames, Outcome.REFUSED, error.message)

    async def _whole(
        self, run: Run, frames: list[bytes], outcome: Outcome, message: str = ""
    ) -> Ending:
        """An answer that is all there: small, it goes out with its end, in one script."""
        if len(frames) <= 2:
            return Ending(outcome, message, frames=tuple(frames))
        await self._closing.start(run, frames)
        return Ending(outcome, message)

    def _first_byte(self, run: Run, wake: Callable[[], None]) -> None:
        now = _now()
        run.begun = True
        run.backend.started(now, run.lease.job)
        self._metrics.first_byte(run.queue.model, run.lease.cls, now - run.sent_at)
        wake()

    async def _body(self, run: Run, answer: Answer, wake: Callable[[], None]) -> Ending:
        """A JSON answer, passed on as it is."""
        parts: list[bytes] = []
        kept = 0
        heads = answer.headers
        while data := await self._read(run, answer):
            if not parts:
                self._first_byte(run, wake)
            kept += len(data)
            if kept > ANSWER_MAX:
                raise Broken("the engine's answer is too large")
            if kept <= USAGE_BODY_MAX:
                parts.append(data)
            if run.started:
                if not run.out.data(data):
                    break
                self._heard(run)
            elif kept > FRAME_BYTES_MAX:
                frames = run.out.first(200, heads, False, b"".join(parts))
                if not await self._closing.start(run, frames):
                    return Ending(Outcome.LOST)
        body = b"".join(parts)
        if not body:
            raise Broken("an empty answer")
        if kept <= USAGE_BODY_MAX:
            run.usage = read_usage(body)
            if decode_object(body) is None:
                return self._no_json(run)
        if run.started:
            return Ending(Outcome.FINISHED)
        return Ending(Outcome.FINISHED, frames=tuple(run.out.first(200, heads, False, body)))

    def _no_json(self, run: Run) -> Ending:
        """An answer that is cut off, or none: it must not look like success."""
        error = make_error("The engine's answer is not a whole JSON object.", code="bad_answer")
        if run.started:
            return Ending(Outcome.FAILED, error.message)
        return Ending(Outcome.FAILED, error.message, frames=self._error_frames(run, error))

    async def _unstreamed(self, run: Run, answer: Answer, wake: Callable[[], None]) -> Ending:
        """JSON in answer to `stream: true`: turned into the stream that was asked for."""
        body = await answer.rest()
        self._first_byte(run, wake)
        try:
            data = json_to_stream(run.meta.dialect, body, run.meta.wants_usage)
        except ValueError:
            error = read_error(body, 502)
            if b'"error"' not in body:
                error = make_error("The engine did not answer with a completion.")
            return Ending(Outcome.FAILED, error.message, frames=self._error_frames(run, error))
        run.usage = read_usage(body)
        frames = run.out.first(200, [("content-type", "text/event-stream")], True, data)
        return await self._whole(run, frames, Outcome.FINISHED)

    async def _read(self, run: Run, answer: Answer) -> bytes:
        if run.started and run.out.full():
            run.read_until = float("inf")  # a slow client is no silent engine
            await run.out.room()
            run.chunks.held_up(_now())
            run.heard(_now(), self._settings.silence_s)
        return await answer.read()

    def _heard(self, run: Run) -> None:
        """A piece of the answer came, and not only a comment that keeps the connection."""
        now = _now()
        run.heard(now, self._settings.silence_s)
        run.backend.health.heard_at = now

    async def _stream(self, run: Run, answer: Answer, wake: Callable[[], None]) -> Ending:
        """An event stream: whole events go on as they come."""
        rules = StreamRules(run.meta.dialect, run.meta.wants_usage, run.meta.choices)
        seen = False
        while True:
            clean = True
            try:
                data = await self._read(run, answer)
            except Broken:
                data, clean = b"", False
            step = rules.feed(data) if data else rules.finish(clean)
            if not seen and _declined(run, step):
                return self._retries.refused(run)
            run.output += step.output_estimate
            if step.output_estimate and run.meta.choices == 1:  # several share their steps
                run.chunks.came(_now(), step.output_estimate)
            if rules.usage is not None:
                run.usage = rules.usage
            if step.first_event and not seen:
                seen = True
                self._first_byte(run, wake)
            if step.data:
                if not await self._forward(run, answer, step):
                    return Ending(Outcome.LOST)
                self._heard(run)
            if step.error is not None:
                return self._stream_error(run, step.error, seen=seen)
            if step.done:
                run.chunks.over(0 if run.usage is None else run.usage.output)
                return Ending(Outcome.FINISHED)

    async def _forward(self, run: Run, answer: Answer, step: Step) -> bool:
        if run.started:
            return run.out.data(step.data)
        return await self._closing.start(run, run.out.first(200, answer.headers, True, step.data))

    def _stream_error(self, run: Run, error: ErrorInfo, *, seen: bool) -> Ending:
        if run.started and run.lease.durable and (error.status or 500) >= 500:
            return self._retries.broke_off(run)
        if run.started:
            run.out.data(
                error_event(run.meta.dialect, error.message, error.type, error.code, error.param)
            )
            if (error.status or 500) >= 500:
                self._retries.broke_off(run)
            return Ending(Outcome.FAILED, error.message, told=True)
        if not seen or (error.status or 0) >= 500:
            return self._retries.broke(run)
        own = error.status is not None and error.status < 500
        outcome = Outcome.REFUSED if own else Outcome.FAILED
        return Ending(outcome, error.message, frames=self._error_frames(run, error))

    def _error_frames(self, run: Run, error: ErrorInfo) -> tuple[bytes, ...]:
        return tuple(run.out.first(error.status or 502, JSON_HEADERS, False, error.body))

    async def _hang_up(self, answer: Answer) -> None:
        """Read an answered engine's body to its end, so that the connection may serve again."""
        try:
            async with asyncio.timeout(HANG_UP_S):
                while await answer.read():
                    pass
        except (Broken, TimeoutError):
            return  # then the connection is closed instead of kept


def _declined(run: Run, step: Step) -> bool:
    """Whether a stream's first event says "busy, not me": some engines send the head before."""
    if step.error is None or step.data:
        return False
    return busy(run.backend.reading.kind, None, step.error.body)


def _now() -> float:
    return asyncio.get_running_loop().time()
