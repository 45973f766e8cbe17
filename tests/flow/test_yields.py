"""Batch jobs that make room for others: aborted at the engine, run again, answered once. Virtual
time, real code."""

import asyncio
import json

import msgspec
import pytest

from common.keys import ModelKeys
from common.outcomes import Outcome
from dispatcher.relays import DRAIN_S_MIN
from dispatcher.yields import YIELDS_MAX
from sim.settings import EngineSettings
from tests.flow.test_failures import at_rest
from tests.flow.world import Asked, World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

SLOTS = 4
STEP_S = 0.05
ENGINE = EngineSettings(
    model="m1", max_num_seqs=SLOTS, step_ms=STEP_S * 1e3, per_seq_us=0.0, seed=1
)
FULL: dict[str, object] = {"batch_headroom": 0, "floor_share": 0}
"""Batch takes all slots."""
UNKNOWN = FULL | {"backends": [{"url": "http://e1"}]}
KEYS = ModelKeys("m1")


async def fill(w: World, jobs: int = SLOTS, *, stream: bool = False, output: int = 100) -> None:
    """Batch runs in all slots."""
    for _ in range(jobs):
        await w.ask("b", output=output, stream=stream, cls="batch")
    await wait_until(lambda: w.engines["e1"].running() == SLOTS, what="batch in all slots")


async def chat(w: World, user: str = "c") -> Asked:
    return await w.ask(user, output=10, cls="interactive")


def waited(asked: Asked) -> float:
    assert asked.first_at is not None
    return asked.first_at - asked.asked_at


def sent(w: World, asked: Asked) -> int:
    """How often it was sent to the engine."""
    return sum(asked.job.encode() in r.body for r in w.engines["e1"].log)


def yielded(w: World) -> float:
    value = w.registries["d0"].get_sample_value("fairlane_yielded_total", {"model": "m1"})
    return value or 0.0


async def empty(w: World) -> None:
    """Nothing is left in the engine, nor of its load, nor in Redis."""
    leader = w.leader()
    assert leader is not None
    loop = leader._loops["m1"]
    counts = loop.backends[0].load.counts(asyncio.get_running_loop().time())
    assert (counts.inflight, counts.unstarted) == (0, 0)
    assert w.engines["e1"].running() == w.engines["e1"].waiting() == 0
    assert len(leader._runs) == 0 and not loop._facts._yields
    await at_rest(w)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
async def test_batch_that_runs_makes_room_by_the_configuration_that_was_read_last(
    monkeypatch: pytest.MonkeyPatch, before: bool, after: bool
) -> None:
    """What was sent while it was to make no room is left alone."""
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL | {"batch_yields": before}) as w:
        await fill(w)
        model = msgspec.structs.replace(w.settings.models["m1"], batch_yields=after)
        for _, dispatcher in w.dispatchers:
            dispatcher.configure(msgspec.structs.replace(w.settings, models={"m1": model}))
        await pass_time(1.0)
        asked = await chat(w)
        await w.answers(asked)
        assert yielded(w) == (before and after)
        await w.answers()
        await empty(w)


async def test_chat_has_the_slot_of_the_youngest_batch_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL) as w:
        await fill(w)
        await pass_time(1.0)
        asked = await chat(w)
        await wait_until(lambda: yielded(w) == 1, timeout=STEP_S, what="within one round")
        await w.answers(asked)
        first_end = asyncio.get_running_loop().time()
        assert waited(asked) <= 4 * STEP_S
        await w.answers()
        times = [sent(w, b) for b in w.asked]
        assert sorted(times) == [1, 1, 1, 1, 2] and times[SLOTS - 1] == 2, "the last of the four"
        for b in w.asked[:SLOTS]:
            assert b.outcome is Outcome.FINISHED and b.status == 200
            assert json.loads(b.data)["usage"]["completion_tokens"] == 100, "answered once"
        now, loop = asyncio.get_running_loop().time(), w.dispatchers[0][1]._loops["m1"]
        ends = (SLOTS + 1) / max(DRAIN_S_MIN, now - first_end)
        assert loop.relays.drain.per_second(now) == pytest.approx(ends, rel=0.05), (
            "no end is counted twice"
        )
        await empty(w)


async def test_a_burst_has_as_many_slots_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL) as w:
        await fill(w)
        burst = [await chat(w, f"c{n}") for n in range(3)]
        await w.answers(*burst)
        assert max(map(waited, burst)) <= 4 * STEP_S
        assert yielded(w) == 3
        await w.answers()
        await empty(w)


async def test_an_engine_of_unknown_slots_says_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=UNKNOWN) as w:
        await fill(w, SLOTS + 1)
        asked = await chat(w)
        await w.answers(asked)
        assert waited(asked) <= 2.0, "batch runs 5 s"
        await w.answers()
        await empty(w)


@pytest.mark.parametrize("model", [{}, {"batch_yields": False}], ids=["streams", "off"])
async def test_what_has_begun_is_kept(
    model: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL | model) as w:
        await fill(w, stream=not model)
        await pass_time(1.0)
        asked = await chat(w)
        await w.answers()
        assert yielded(w) == 0 and [sent(w, a) for a in w.asked] == [1] * (SLOTS + 1)
        assert waited(asked) >= 3.0, "until a batch job has ended"
        await empty(w)


async def test_batch_goes_on_under_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another dispatcher leads meanwhile: how often a job gave way is known to Redis."""
    engine = msgspec.structs.replace(ENGINE, max_num_seqs=1)
    async with world(monkeypatch, {"e1": engine}, model=FULL, dispatchers=2) as w:
        asked = await w.ask("b", output=100, stream=False, cls="batch")
        for n in range(15):
            await pass_time(1.0)
            talk = await chat(w, f"c{n}")
            if n == 1:  # while chat has the slot
                first = w.leader()
                assert first is not None
                await wait_until(lambda t=talk: t.first_at is not None, what="its turn")  # type: ignore[misc]
                await first._loops["m1"].stop()
        assert w.leader() is not first
        assert asked.outcome is Outcome.FINISHED
        assert sent(w, asked) == 1 + YIELDS_MAX
        await w.answers()


async def test_it_costs_its_user_once_and_teaches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for disturbed in (False, True):
        async with world(monkeypatch, {"e1": ENGINE}, model=FULL) as w:
            await fill(w)
            await pass_time(3.0)
            if disturbed:
                for n in range(2):
                    await w.answers(await chat(w, f"c{n}"))
            await w.answers(*w.asked[:SLOTS])
            assert yielded(w) == 2 * disturbed
            await at_rest(w)
            command = w.gateways[0][0].broker.command
            counter = await command("HGET", KEYS.classes["batch"].counter, "b")
            seen.append((float(counter), await command("HGET", KEYS.ewma, "b")))
    assert seen[0][0] == pytest.approx(seen[1][0]) and seen[0][1] == seen[1][1]


async def test_it_keeps_its_place_before_those_that_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL) as w:
        await fill(w)
        later = [await w.ask("b", output=100, stream=False, cls="batch") for _ in range(6)]
        await w.answers(await chat(w))
        await w.answers()
        again = [r.at for r in w.engines["e1"].log if w.asked[SLOTS - 1].job.encode() in r.body]
        assert len(again) == 2
        first = min(r.at for r in w.engines["e1"].log if later[0].job.encode() in r.body)
        assert again[1] <= first


async def test_an_answer_that_is_there_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken back at each turn of the loop about the engine's last step."""
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL) as w:
        runs, loop = w.dispatchers[0][1]._runs, asyncio.get_running_loop()
        took: list[bool] = []
        for turns in range(12):
            asked = await w.ask("b", output=20, stream=False, cls="batch")
            await wait_until(lambda: w.engines["e1"].running() == 1, what="it runs")

            def later(job: str, left: int) -> None:
                if left:
                    loop.call_soon(later, job, left - 1)
                else:
                    took.append(runs.give_way(job))

            def over(_: object, job: str = asked.job, turns: int = turns) -> None:
                if w.engines["e1"].running() == 0:
                    w.engines["e1"].observer = None
                    later(job, turns)

            w.engines["e1"].observer = over
            await w.answers(asked)
            await wait_until(lambda n=turns: len(took) == n + 1, what="all turns")  # type: ignore[misc]
            assert asked.outcome is Outcome.FINISHED
            assert json.loads(asked.data)["usage"]["completion_tokens"] == 20
            assert sent(w, asked) == 1 + took[-1]
        assert took == sorted(took, reverse=True) and took[0] and not took[-1]
        await empty(w)


@pytest.mark.parametrize("first", ["cancel", "yield", "both"])
async def test_a_client_that_leaves_as_its_job_is_taken_back(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(monkeypatch, {"e1": ENGINE}, model=FULL) as w:
        asked = await w.ask("b", output=100, stream=False, cls="batch")
        await wait_until(lambda: w.engines["e1"].running() == 1, what="it runs")
        runs = w.dispatchers[0][1]._runs
        if first == "both":  # the flag is in Redis, the message not here yet
            leaves = asyncio.ensure_future(w.cancel(asked, cls="batch"))
            while not leaves.done():
                await asyncio.sleep(0)
                runs.give_way(asked.job)
        elif first == "yield":
            assert runs.give_way(asked.job)
            await w.cancel(asked, cls="batch")
        else:
            await w.cancel(asked, cls="batch")
            runs.give_way(asked.job)
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=2.0, what="abort")
        await pass_time(2.0)
        await empty(w)
