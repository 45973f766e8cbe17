"""Prompts that begin alike, in the simulation: caches, traces, and what following them is worth."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.fairness import traces
from sim.fairness.contest import run
from sim.fairness.engine import FastEngine
from sim.fairness.gateway import Gateway, Rules
from sim.fairness.jobs import Arrival, Result
from sim.fairness.measures import hits, percentile, uneven
from sim.fairness.order import Order
from sim.fairness.policies import POLICIES
from sim.fairness.prefixes import BlockCache, beginning
from sim.fairness.trace_cases import CROWDS, LARGE, mooncake
from sim.fairness.traces import BLOCK_TOKENS
from sim.fairness.world import World


def test_a_cache_has_the_blocks_used_last() -> None:
    cache = BlockCache(4)
    assert cache.take([1, 2, 3]) == 0
    assert cache.take([1, 2, 9]) == 2 * BLOCK_TOKENS
    assert cache.take([5]) == 0
    assert cache.take([1, 2, 3]) == 2 * BLOCK_TOKENS, "3 made room"
    assert cache.take([2, 3]) == 2 * BLOCK_TOKENS
    small = BlockCache(3)
    small.take([1, 2, 3])
    small.take([9])
    assert small.take([1, 2, 3]) == 2 * BLOCK_TOKENS, "a prompt loses its end first"
    assert BlockCache(0).take([1]) == BlockCache(0).take([]) == 0


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=20), st.integers(0, 12))
def test_a_cache_is_bounded(prompts: list[list[int]], most: int) -> None:
    cache = BlockCache(most)
    for blocks in prompts:
        assert cache.take(blocks) <= len(blocks) * BLOCK_TOKENS
        assert len(cache._kept) <= most


def test_what_is_cached_is_not_computed_again() -> None:
    blocks = tuple(range(8))
    engine = FastEngine(LARGE, cache_blocks=8)
    times = []
    for begin, prompt in ((0.0, blocks), (10.0, blocks), (20.0, (*blocks[:4], 90, 91, 92, 93))):
        engine.submit(begin, 8 * BLOCK_TOKENS, 2, blocks=prompt)
        first = next(e for e in engine.advance(begin + 5) if e.kind == "first")
        times.append((first.cached, first.at - begin))
    assert [cached for cached, _ in times] == [0, 8 * BLOCK_TOKENS - 1, 4 * BLOCK_TOKENS]
    assert times[0][1] > times[2][1] > times[1][1]
    assert engine.facts(30.0).running == engine.facts(30.0).kv == 0


def test_equal_blocks_are_equal_beginnings_to_the_product() -> None:
    one, other = beginning([1, 2, 3, 4]), beginning([1, 2, 5])
    assert len(one) == 8 and one[:4] == other[:4] and one[4] != other[4]


@pytest.mark.parametrize("name", list(CROWDS))
def test_rows_of_a_trace(name: str) -> None:
    rows = traces.mooncake(name, CROWDS[name])
    times = [r.at for r in rows]
    assert times == sorted(times)
    before: dict[int, int | None] = {}
    for r in rows:
        assert len(r.blocks) == -(-r.input // BLOCK_TOKENS)
        for block, last in zip(r.blocks, (None, *r.blocks), strict=False):
            assert before.setdefault(block, last) == last, "a block stands for all before it"
    per_s = max(sum(1 for t in times if s <= t < s + 1) for s in range(300))
    assert per_s < 20, "nobody comes in crowds"


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    case = mooncake(0, "synthetic", most=1_500)
    return {p: run(case, POLICIES[p]) for p in ("random", "no-affinity", "reserve")}


def test_following_beginnings_finds_them(results: dict[str, Result]) -> None:
    found = {policy: hits(result) for policy, result in results.items()}
    assert found["reserve"] > 2 * found["no-affinity"]
    assert found["reserve"] > 2 * found["random"]


def test_the_work_stays_even(results: dict[str, Result]) -> None:
    assert uneven(results["reserve"], 4) < max(1.05, uneven(results["random"], 4))


def test_light_users_do_not_wait_longer_for_it(results: dict[str, Result]) -> None:
    light = mooncake(0, "synthetic", most=1_500).light
    for share in (0.5, 0.95):
        waits = {p: percentile(r.ttfts(light), share) for p, r in results.items()}
        assert waits["reserve"] <= waits["no-affinity"]


class Noted(Order):
    """An order that notes what jobs cost in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[float] = []

    def settle(self, job: str, cost: float, unit: float) -> None:
        self.costs.append(cost)
        super().settle(job, cost, unit)


def test_cached_input_is_charged_as_such() -> None:
    first = Arrival(0.0, "a", 4 * BLOCK_TOKENS, 100, blocks=(1, 2, 3, 4))
    then = msgspec.structs.replace(first, at=30.0, blocks=(1, 2, 3, 5))
    world, order = World([FastEngine(LARGE, cache_blocks=10)]), Noted()
    world.run(Gateway(world, order, Rules(hop=0.0)), [first, then], 60.0)
    saved = 3 * BLOCK_TOKENS * 0.9
    assert order.costs == pytest.approx([4 * BLOCK_TOKENS + 200, 4 * BLOCK_TOKENS + 200 - saved])
