"""The measures of the simulation, and the oracle that it is checked against."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.fairness.jobs import Arrival, Job, Result, Sample
from sim.fairness.measures import behind, fair_share, ideal, jain, percentile, weights_of

amounts = st.floats(0.0, 1e6)
users = st.text("abcdef", min_size=1, max_size=2)


def test_percentile_is_the_least_value_that_the_share_does_not_exceed() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0.25, 0.5, 0.51, 0.95, 1.0)] == [1, 2, 3, 4, 4]
    assert math.isnan(percentile([], 0.5))


def test_jain_is_one_for_equals_and_one_in_n_for_a_winner() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert math.isnan(jain([]))


@given(
    demand=st.dictionaries(users, amounts, max_size=6),
    capacity=amounts,
    weights=st.dictionaries(users, st.sampled_from([0.5, 1.0, 3.0]), max_size=6),
)
def test_fair_share_is_max_min_fair(
    demand: dict[str, float], capacity: float, weights: dict[str, float]
) -> None:
    share = fair_share(demand, capacity, weights)
    assert share.keys() == demand.keys()
    assert sum(share.values()) == pytest.approx(min(capacity, sum(demand.values())), abs=1e-3)
    assert all(share[u] <= demand[u] + 1e-3 for u in demand)
    level = {u: share[u] / weights.get(u, 1.0) for u in demand}
    for user in demand:
        if share[user] < demand[user] - 1e-3:  # who wants more has no less than anybody
            assert level[user] >= max(level.values()) - 1e-3


def test_the_ideal_divides_what_was_given_among_those_who_had_work_left() -> None:
    arrivals = [
        Arrival(0.0, "a", 100, 0), Arrival(0.0, "b", 100, 0), Arrival(1.0, "c", 10, 0),
    ]  # fmt: skip
    samples = [
        Sample(0.0, {}, 0, 0), Sample(1.0, {"a": 60.0}, 0, 0),
        Sample(2.0, {"a": 100.0, "c": 10.0}, 0, 0),
        Sample(3.0, {"a": 100.0, "b": 100.0, "c": 10.0}, 0, 0),
    ]  # fmt: skip
    result = Result([Job(n, a) for n, a in enumerate(arrivals)], samples, 3.0)
    fair = ideal(result, {})
    assert fair[1] == {"a": 30.0, "b": 30.0, "c": 0.0}
    assert fair[2] == {"a": 50.0, "b": 50.0, "c": 10.0}
    assert behind(result, {}) == 50.0
    assert behind(result, {}, until=1.0) == 30.0
    assert ideal(result, {"a": 3.0})[1] == {"a": 45.0, "b": 15.0, "c": 0.0}


def test_interactive_users_weigh_more() -> None:
    arrivals = [Arrival(0.0, "a", 1, 1, "interactive", 2.0), Arrival(0.0, "b", 1, 1)]
    assert weights_of(arrivals, 4.0) == {"a": 8.0, "b": 1.0}
