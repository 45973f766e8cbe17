"""What Fairlane promises of fairness, in virtual time. The measures can fail: others fail them.

Floods run with ten seeds, the longer scenarios with fewer, to keep the whole below a minute;
`python -m sim --scenario … --seeds 10` prints all of them.
"""

import pytest

from sim.fairness.cases import Case
from sim.fairness.contest import Row, compare, run
from sim.fairness.measures import behind, weights_of
from sim.fairness.policies import POLICIES
from sim.fairness.scenarios import SCENARIOS


def rows(scenario: str, seeds: int, *policies: str) -> dict[str, Row]:
    return {r.policy: r for r in compare(SCENARIOS[scenario], range(seeds), policies)}


def test_a_light_user_beside_a_flood_waits_little() -> None:
    found = rows("flood", 10, "fifo", "fair")
    assert found["fair"].better >= 15
    assert found["fair"].tokens >= 0.98
    assert found["fifo"].better < 1.1


def test_with_learned_slots_and_a_reserve_a_flood_is_hardly_felt() -> None:
    found = rows("flood-warm", 10, "fair", "reserve")
    assert found["reserve"].alone <= 5
    assert found["reserve"].better >= 100
    assert found["reserve"].tokens >= 0.97
    assert found["fair"].alone > 20


def test_an_engine_never_seen_is_learned_within_the_first_seconds_of_a_flood() -> None:
    scenario, waits = SCENARIOS["flood"], []
    for seed in range(10):
        result = run(scenario.make(seed), POLICIES["reserve"])
        waits += [((j.seen or 999) - j.arrival.at, j.arrival.at) for j in result.jobs
                  if j.arrival.user == "C"]  # fmt: skip
    early = [wait > 0.3 for wait, at in waits if at < 10]
    later = [wait > 0.3 for wait, at in waits if at >= 10]
    assert sum(early) > len(early) / 2  # nothing is known yet
    assert sum(later) < len(later) / 10  # now and then it is tried whether there are more


def test_backlogged_users_get_equal_service_whatever_the_size_of_their_requests() -> None:
    found = rows("sizes", 2, "rr", "fair", "reserve")
    assert found["rr"].ratio_min > 6
    for policy in ("fair", "reserve"):
        assert 0.9 <= found[policy].ratio_min <= found[policy].ratio_max <= 1.1
        assert found[policy].jain > 0.99
        assert found[policy].behind < 3 * (1_024 + 2 * 640)  # three of the largest requests
    assert found["rr"].behind > 100_000


def test_each_kind_of_cost_is_fair_in_its_own_way() -> None:
    found = rows("sizes", 1, "rr", "by-requests", "by-time", "by-kv")
    assert found["by-requests"].ratio == pytest.approx(found["rr"].ratio, rel=0.05)
    assert found["by-time"].ratio == pytest.approx(1.1, abs=0.15)  # long prompts are quick to read
    assert found["by-kv"].ratio == pytest.approx(1 / 8, rel=0.2)  # 64 times the memory, 8 the work


def test_backlogged_users_get_service_by_their_weights() -> None:
    found = rows("sizes-weighted", 2, "rr", "fair", "reserve")
    for policy in ("fair", "reserve"):
        assert 2.7 <= found[policy].ratio_min <= found[policy].ratio_max <= 3.3
    assert found["rr"].ratio_min > 6


def test_nobody_saves_up_service_by_being_away() -> None:
    found = rows("returning", 2, "fair", "reserve", "no-lift")
    assert found["fair"].share <= 0.55
    assert found["reserve"].share <= 0.55
    assert found["no-lift"].share > 0.9


def test_light_users_of_a_real_trace_wait_less_at_no_cost() -> None:
    found = rows("azure", 3, "fair")
    assert found["fair"].better >= 6
    assert found["fair"].tokens >= 0.995


def test_the_model_of_the_arena_waits_as_the_real_engine_did() -> None:
    found = rows("arena", 1, "fair")
    # Measured on an A10G: 57.8 s and 130 s first in first out, 1.5 s and 11.4 s with VTC inside.
    assert found["direct"].p50 == pytest.approx(57.8, rel=0.1)
    assert found["direct"].p95 == pytest.approx(130.2, rel=0.1)
    assert found["fair"].better > 6


def test_under_twofold_overload_interactive_users_begin_within_5_s() -> None:
    found = rows("overload", 1, "fifo", "reserve")
    assert found["reserve"].p99 <= 5
    assert found["fifo"].p99 > 100


def test_batch_takes_what_chat_leaves() -> None:
    found = rows("batch", 1, "reserve", "headroom-4", "headroom-8")
    assert found["reserve"].alone99 <= 1.5
    assert found["reserve"].rest >= 0.85
    assert found["reserve"].idle >= 0.9
    # Free slots alone do not give both: chat that waits for none costs batch a quarter.
    assert found["headroom-4"].alone99 > 3 * found["reserve"].alone99
    assert found["headroom-8"].rest < 0.85


@pytest.mark.parametrize("scenario", ["azure", "servegen"])
def test_nobody_is_far_behind_a_max_min_fair_division(scenario: str) -> None:
    case: Case = SCENARIOS[scenario].make(0)
    weights = weights_of(case.arrivals)
    far = {p: behind(run(case, POLICIES[p]), weights, case.horizon or 0) for p in
           ("direct", "fair", "reserve")}  # fmt: skip
    most = 3 * max(a.work for a in case.arrivals)  # three of the largest requests
    assert far["fair"] < most
    assert far["reserve"] < most
    assert far["direct"] > 1.5 * max(far["fair"], far["reserve"])


def test_a_seed_gives_the_same_figures_again() -> None:
    assert rows("flood", 1, "reserve") == rows("flood", 1, "reserve")
