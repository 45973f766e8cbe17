"""Waiting with a deadline, in virtual and in real time."""

import asyncio

import pytest

from tests.support.wait import pass_time, wait_until, wait_until_sync


@pytest.mark.looptime
async def test_waits_for_a_plain_and_for_an_async_predicate() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def later() -> str:
        return "seen" if loop.time() >= began + 2 else ""

    await wait_until(lambda: loop.time() >= began + 1)
    assert loop.time() == pytest.approx(began + 1, abs=0.011)
    assert await wait_until(later) == "seen"
    assert loop.time() == pytest.approx(began + 2, abs=0.011)


@pytest.mark.looptime
async def test_fails_at_the_deadline_and_names_what() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(AssertionError, match=r"not within 3 s: the bell .*\[\]"):
        await wait_until(list, timeout=3, what="the bell")
    assert loop.time() == pytest.approx(began + 3, abs=0.011)


@pytest.mark.looptime
async def test_a_predicate_that_hangs_meets_the_deadline() -> None:
    with pytest.raises(AssertionError, match="hung"):
        await wait_until(asyncio.Event().wait, timeout=1, what="hung")


async def test_a_predicate_s_own_timeout_error_is_passed_on() -> None:
    async def slow() -> bool:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await wait_until(slow)


def test_the_sync_twin() -> None:
    answers = iter([0, 0, 7])
    assert wait_until_sync(lambda: next(answers)) == 7
    with pytest.raises(AssertionError, match="a process"):
        wait_until_sync(lambda: False, timeout=0.02, what="a process")


@pytest.mark.looptime
async def test_virtual_time_passes() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await pass_time(3600)
    assert loop.time() == pytest.approx(began + 3600)


async def test_real_time_is_not_slept_away() -> None:
    with pytest.raises(AssertionError, match="looptime"):
        await pass_time(0.01)
