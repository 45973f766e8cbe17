"""The fair order as users see it: reserved slots, classes, floor shares, limits of their own."""

import itertools
import random

import pytest

from dispatcher.engines.facts import EngineFacts
from sim.settings import EngineSettings
from tests.flow.pops import Pops
from tests.flow.world import Asked, World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

SLOTS = 32
CHAT = "/v1/chat/completions"


def engine(slots: int = SLOTS, *, seed: int = 0, **more: object) -> EngineSettings:
    return EngineSettings(
        model="m1", max_num_seqs=slots, step_ms=100, per_seq_us=0.0, seed=seed, **more  # type: ignore[arg-type]
    )  # fmt: skip


def first_byte(asked: Asked) -> float:
    assert asked.first_at is not None
    return asked.first_at - asked.asked_at


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def light(w: World, count: int, every_s: float, **how: object) -> list[float]:
    """Times to the first byte of one who asks now and then."""
    asked = []
    for _ in range(count):
        asked.append(await w.ask("light", output=8, **how))  # type: ignore[arg-type]
        await pass_time(every_s)
    await w.answers(*asked)
    return [first_byte(a) for a in asked]


async def flood(w: World, rng: random.Random, count: int, **how: object) -> None:
    for _ in range(count):
        await w.ask("heavy", output=rng.randint(16, 112), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
async def test_a_light_user_beside_a_flood_on_slots_that_were_learned(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, object] = {"backends": [{"url": "http://e1"}]}
    async with world(monkeypatch, {"e1": engine(seed=seed)}, model=model) as w:
        pops, rng = Pops(w, monkeypatch), random.Random(seed)
        alone = percentile(await light(w, 10, 1.13), 0.95)
        await flood(w, rng, 260)
        slots = pops.loop.backends[0].load.slots
        await wait_until(lambda: slots.value == SLOTS, timeout=20, what="32 slots")
        await pass_time(3.0)
        beside = await light(w, 24, 1.57)
        assert pops.loop.busy(), "the flood is not over"
        print(f"{len(pops.went)} jobs in {pops.full + pops.empty} pops, {pops.empty} empty")
        print(f"{alone=:.3f} p50={percentile(beside, 0.5):.3f} p95={percentile(beside, 0.95):.3f}")
        assert percentile(beside, 0.95) <= 5 * alone
        assert pops.breaches() == []
        known = [x for x in pops.went if x.busy_max == SLOTS - 1]
        assert len(known) > 100
        assert max(x.inflight for x in known) == SLOTS, "it is used by who it is for"


@pytest.mark.parametrize("cls", ["standard", "batch"])
async def test_too_few_slots_learned_are_found_to_be_more(
    cls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, object] = {"backends": [{"url": "http://e1"}]}
    monkeypatch.setattr("dispatcher.slots.PROBE_S", 15.0)  # to have less to simulate
    async with world(monkeypatch, {"e1": engine()}, model=model) as w:
        loop = Pops(w, monkeypatch).loop
        slots = loop.backends[0].load.slots
        for n in range(20):  # as if the engine had let others wait for memory
            slots.polled(n, EngineFacts(waiting=1, running=18), 0)
        await pass_time(20.0)
        assert slots.value == 18
        await flood(w, random.Random(1), 300, cls=cls)
        await wait_until(lambda: slots.value == SLOTS, timeout=45, what="32 slots")
        assert w.engines["e1"].running() > 18


async def test_who_has_a_job_in_flight_never_gets_what_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = {h: engine(16, seed=n) for n, h in enumerate(("e1", "e2"))}
    async with world(monkeypatch, engines) as w:
        pops, rng = Pops(w, monkeypatch), random.Random(1)
        for n in range(150):
            await w.ask(f"u{n % 7}", output=rng.randint(2, 20), stream=n % 5 != 0)
        while pops.loop.busy():
            await w.ask(f"once{len(w.asked)}", output=4)
            await pass_time(0.3)
        await w.answers()
        assert {x.busy_max for x in pops.went} == {31}
        metric = w.registries["d0"].get_sample_value
        assert metric("fairlane_slots", {"model": "m1"}) == 32
        assert metric("fairlane_slots_reserved", {"model": "m1"}) == 1
        reserved = {"model": "m1", "reason": "reserved"}
        assert (metric("fairlane_admission_closed_total", reserved) or 0) > 0
        assert pops.breaches() == []
        assert max(x.inflight for x in pops.went if x.lease.inflight) == 31
        assert max(x.inflight for x in pops.went) >= 32


async def test_batch_takes_what_chat_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat at half load finds a slot free nearly always; batch never goes while chat waits."""
    async with world(monkeypatch, {"e1": engine()}, model={"floor_share": 0}) as w:
        pops, rng = Pops(w, monkeypatch), random.Random(6)
        for n in range(200):
            await w.ask(f"b{n % 3}", output=rng.randint(16, 112), cls="batch")
        chat = []
        for n in range(100):  # 6.4 s each, 2.5 a second: 16 slots' worth
            how = {"output": rng.randint(16, 112), "cls": "interactive"}
            chat.append(await w.ask(f"c{n}", **how))  # type: ignore[arg-type]
            await pass_time(rng.expovariate(2.5))
        done = sum(a.end is not None for a in w.asked if a.user.startswith("b"))
        await w.answers(*chat)
        times = [first_byte(a) for a in chat[10:]]
        print(f"p50={percentile(times, 0.5):.3f} p90={percentile(times, 0.9):.3f} {done=}")
        assert percentile(times, 0.5) <= 0.2, "alone it is 0.156"
        assert percentile(times, 0.9) <= 2.0
        batch = [x for x in pops.went if x.lease.cls == "batch"]
        assert max(x.inflight for x in batch) == SLOTS - 2
        assert max(x.above for x in batch) == 0
        assert done >= 60


@pytest.mark.parametrize("policy", ["weighted", "strict"])
async def test_a_lower_group_has_its_floor_share_and_no_more(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, object] = {"class_policy": policy}
    classes = ("interactive", "standard", "batch") if policy == "strict" else ("standard", "batch")
    async with world(monkeypatch, {"e1": engine(8)}, model=model) as w:
        pops = Pops(w, monkeypatch)
        for n in range(250):
            await w.ask(f"a{n % 3}", output=8, cls=classes[0])
        for cls in classes[1:]:
            for n in range(20):
                await w.ask(f"{cls}{n % 3}", output=8, cls=cls)
        first = pops.loop._waiting[classes[0]]
        assert first > 200
        await wait_until(lambda: pops.loop._waiting[classes[0]] < 20, timeout=900, what="the end")
        costs = pops.costs()
        print(dict(costs))
        for cls in classes[1:]:
            assert 0.012 <= costs[cls] / costs[classes[0]] <= 0.03


async def test_without_a_floor_share_the_lower_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine(8)}, model={"floor_share": 0}) as w:
        pops = Pops(w, monkeypatch)
        for n in range(60):
            await w.ask(f"a{n % 3}", output=8)
        await w.ask("b", output=8, cls="batch")
        await w.answers()
        assert pops.went[-1].lease.cls == "batch"


async def test_a_user_has_no_more_in_flight_than_the_class_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = {"standard": {"user_inflight_max": 2, "inflight_max": 5}}
    async with world(monkeypatch, {"e1": engine(8)}, model={"class": rules}) as w:
        pops = Pops(w, monkeypatch)
        for n in range(60):
            await w.ask(f"u{n % 4}", output=3 + n % 5)
        for _ in range(20):
            await w.ask("b", output=5, cls="batch")
        flying = []
        while any(a.end is None for a in w.asked):
            counts = [b.load.inflight("standard") for b in pops.loop.backends]
            flying.append(sum(counts))
            await pass_time(0.05)
        assert max(flying) == 5
        standard = [x.lease.inflight for x in pops.went if x.lease.cls == "standard"]
        assert max(standard) == 1
        order = [x.lease.cls for x in pops.went]
        assert order.index("batch") < order.index("standard", 40), "those held back hold up nobody"


async def test_an_engine_in_priority_mode_is_told_class_and_jobs_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep: dict[str, object] = {
        "engine_priority": True,
        "reserved_slots": 0,
        "class": {"standard": {"queue_limit": 1_000}, "interactive": {"queue_limit": 1_000}},
    }
    async with world(monkeypatch, {"e1": engine(4, priority_mode=True)}, model=deep) as w:
        heavy = [await w.ask("heavy", output=10) for _ in range(40)]
        transport = w.engines["e1"]
        await wait_until(lambda: transport.waiting() == 36, what="all in the engine")
        late = await w.ask("late", output=2)
        urgent = await w.ask("urgent", output=2, cls="interactive")
        await w.answers()
        told = {
            r.headers["x-request-id"]: int(r.headers["x-vllm-priority"])
            for r in transport.log
            if r.path == CHAT
        }
        assert sorted(told[a.job] for a in heavy) == list(range(1_000, 1_040))
        assert (told[late.job], told[urgent.job]) == (1_000, 0)
        ahead = [a for a in heavy if first_byte(a) + a.asked_at < first_byte(late) + late.asked_at]
        assert len(ahead) <= 4, "only what ran already"


async def test_other_engines_are_told_no_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine(4)}) as w:
        await w.ask("a", output=2)
        await w.answers()
        calls = [r for r in w.engines["e1"].log if r.path == CHAT]
        assert [r.headers.get("x-vllm-priority") for r in calls] == [None]


async def test_two_levels_share_and_each_sub_user_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine(8)}) as w:
        pops = Pops(w, monkeypatch)
        for n, sub in itertools.product(range(60), ("x", "y", "z")):
            await w.ask("many", output=6, sub=f"{sub}")
            if n < 60 and sub == "x":
                await w.ask("one", output=6)
        await wait_until(lambda: len(pops.went) >= 100, timeout=60)
        users = [x.lease.user.partition(":")[0] for x in pops.went[:100]]
        assert 45 <= users.count("one") <= 55
