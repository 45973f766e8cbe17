"""Waiting for a condition: the only place in the tests that sleeps."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")

POLL_S = 0.01


@overload
async def wait_until(
    predicate: Callable[[], Awaitable[T]], *, timeout: float = 5.0, what: str = ""
) -> T: ...
@overload
async def wait_until(predicate: Callable[[], T], *, timeout: float = 5.0, what: str = "") -> T: ...
async def wait_until(
    predicate: Callable[[], object], *, timeout: float = 5.0, what: str = ""
) -> object:
    """Ask `predicate` every 10 ms of loop time until it is true; returns its true answer.

    `timeout` is in seconds of loop time, and covers an async predicate that hangs. Raises
    AssertionError with `what` in it once that time is over.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    answer: object = None
    try:
        async with asyncio.timeout_at(deadline) as limit:
            while True:
                asked = predicate()
                answer = await asked if inspect.isawaitable(asked) else asked
                if answer:
                    return answer
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        if not limit.expired():
            raise
    raise AssertionError(_message(what, timeout, answer))


def wait_until_sync(predicate: Callable[[], T], *, timeout: float = 5.0, what: str = "") -> T:
    """The same for code without a loop, such as starting processes; wall-clock seconds."""
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(_message(what, timeout, answer))
        time.sleep(POLL_S)


async def pass_time(seconds: float) -> None:
    """Let virtual time pass; refuses on a real clock, where a test would only get slower."""
    loop = asyncio.get_running_loop()
    if not getattr(loop, "looptime_on", False):
        raise AssertionError("pass_time needs @pytest.mark.looptime; else use wait_until")
    await asyncio.sleep(seconds)


def _message(what: str, timeout: float, answer: object) -> str:
    return f"not within {timeout:g} s: {what or 'the condition'} (last answer: {answer!r})"
