"""Costs: the published formulas, and no way to gain by how a request is cut up or reported."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost import (
    OUTPUT_START,
    REQUEST_COST,
    TIME_MOST_MS,
    TIME_START_MS,
    TYPICAL,
    Pricing,
    Terms,
    pricing,
)
from common.settings import LEAST, ModelSettings, Price, TokenWeights
from common.wire import Usage

tokens = st.integers(0, 10**7)
seconds = st.floats(0, 10_000)
WEIGHTS = st.floats(LEAST, 1_000)
PRICES = st.floats(LEAST, 1_000_000)

KINDS = {
    "requests": ModelSettings(fairness="requests"),
    "tokens": ModelSettings(),
    "time": ModelSettings(fairness="time"),
    "price": ModelSettings(fairness="price", price=Price(input=0.3, cached_input=0.03, output=1.2)),
    "kv": ModelSettings(fairness="kv"),
}
ALL = {name: pricing(settings) for name, settings in KINDS.items()}
kinds = pytest.mark.parametrize("kind", ALL.values(), ids=list(ALL))


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        (Usage(100, 0, 0), 100.0),
        (Usage(0, 0, 100), 200.0),
        (Usage(100, 100, 0), 10.0),
        (Usage(100, 50, 10), 50 + 5 + 20),
        (Usage(0, 0, 0), 0.0),
    ],
)
def test_tokens_are_weighted_tokens_as_they_are(usage: Usage, cost: float) -> None:
    assert ALL["tokens"].real(usage, 9.0) == pytest.approx(cost)


def test_tokens_with_weights_of_their_own() -> None:
    weights = TokenWeights(input=1, cached=0.5, output=4)
    assert pricing(ModelSettings(tokens=weights)).real(Usage(100, 40, 10), 1.0) == 60 + 20 + 40


def test_time_is_milliseconds_whatever_is_reported() -> None:
    assert ALL["time"].real(Usage(10, 0, 1_000), 2.5) == 2_500
    assert ALL["time"].real(Usage(10, 0, 1_000), -1.0) == 0, "clocks that disagree"


def test_prices_keep_their_ratio() -> None:
    """Of 0.3, 0.03 and 1.2 a million 600 in and 200 out are 420 millionths, in tenths of these."""
    price = ALL["price"]
    assert price.real(TYPICAL, 0.0) == pytest.approx(4_200)
    assert price.real(Usage(1_000, 1_000, 0), 0.0) == pytest.approx(300)
    assert price.real(Usage(0, 0, 1_000), 0.0) == pytest.approx(12_000)


def test_cached_input_without_a_price_costs_as_other_input() -> None:
    price = pricing(ModelSettings(fairness="price", price=Price(input=1, output=2)))
    assert price.real(Usage(50, 50, 0), 0.0) == price.real(Usage(50, 0, 0), 0.0) > 0


def test_a_model_without_the_price_it_needs_has_none() -> None:
    broken = msgspec.structs.replace(ModelSettings(), tokens=TokenWeights())
    msgspec.structs.force_setattr(broken, "fairness", "price")
    with pytest.raises(ValueError, match="needs `price`"):
        pricing(broken)


def test_kv_is_the_tokens_held_summed_over_the_iterations() -> None:
    """100 in, 3 out: 100·3 + 9/2; in units of 100 token-iterations."""
    kv = ALL["kv"]
    assert kv.real(Usage(100, 0, 3), 0.0) == pytest.approx(3.045)
    assert kv.real(Usage(100, 0, 0), 0.0) == kv.real(Usage(100, 0, 1), 0.0) > 0
    held = sum(600 + d + 0.5 for d in range(200))
    assert kv.real(TYPICAL, 0.0) == pytest.approx(held / 100)


def test_terms_give_what_pop_prices() -> None:
    assert ALL["tokens"].terms(120, 500) == Terms(120.0, 2.0, 0.0, 500)
    assert ALL["requests"].terms(120, 500) == Terms(REQUEST_COST, 0.0, 0.0, 500)
    assert ALL["time"].terms(120, 500) == Terms(0.0, 1.0, 0.0, TIME_MOST_MS)
    assert ALL["kv"].terms(120, 500) == Terms(0.0, 1.2, 0.005, 500)
    assert ALL["kv"].terms(120, 0).most == 1
    assert ALL["tokens"].terms(120, 0).most == 0


def test_what_is_expected_of_a_new_user_has_the_unit_that_is_learned() -> None:
    usage = Usage(10, 0, 77)
    for name, kind in ALL.items():
        timed = name == "time"
        assert kind.start == (TIME_START_MS if timed else OUTPUT_START)
        assert kind.unit(usage, 1.5) == (1_500 if timed else 77)
        assert kind.learns(100)
        assert kind.learns(0) == timed, "embeddings teach nothing of output"


@kinds
def test_a_typical_job_costs_a_thousand_or_more(kind: Pricing) -> None:
    assert 1_000 <= kind.real(TYPICAL, TIME_START_MS / 1000) < 10_000


@given(PRICES, PRICES)
def test_whatever_the_prices_a_typical_job_costs_a_thousand_or_more(a: float, b: float) -> None:
    made = pricing(ModelSettings(fairness="price", price=Price(input=a, output=b)))
    assert 999.999 <= made.real(TYPICAL, 0.0) <= 10_000.001


@given(WEIGHTS, st.floats(0, 1), WEIGHTS)
def test_whatever_the_weights_a_typical_job_costs_a_thousand_or_more(
    a: float, share: float, b: float
) -> None:
    weights = TokenWeights(input=a, cached=a * share, output=b)
    assert 999.999 <= pricing(ModelSettings(tokens=weights)).real(TYPICAL, 0.0) <= 10_000.001


@kinds
@given(a=tokens, b=tokens, c=tokens, s=st.floats(-10, 10_000))
def test_no_cost_is_negative_even_if_an_engine_reports_nonsense(
    kind: Pricing, a: int, b: int, c: int, s: float
) -> None:
    assert kind.real(Usage(a, b, c), s) >= 0


@kinds
@given(a=tokens, cached=tokens, c=tokens, more=tokens, s=seconds, longer=seconds)
def test_more_never_costs_less(
    kind: Pricing, a: int, cached: int, c: int, more: int, s: float, longer: float
) -> None:
    cached = min(cached, a)
    cost = kind.real(Usage(a, cached, c), s)
    at_least = cost * (1 - 1e-12)
    assert kind.real(Usage(a + more, cached, c), s) >= at_least
    assert kind.real(Usage(a, cached, c + more), s) >= at_least
    assert kind.real(Usage(a, cached, c), s + longer) >= at_least


@kinds
@given(a=tokens, cached=tokens, c=tokens, s=seconds)
def test_a_cache_hit_never_costs_more(kind: Pricing, a: int, cached: int, c: int, s: float) -> None:
    without = kind.real(Usage(a, 0, c), s)
    assert kind.real(Usage(a, min(cached, a), c), s) <= without * (1 + 1e-12)


@kinds
@given(a=tokens, c=st.integers(1, 10**6), ms=st.integers(0, 10**7))
def test_an_exact_estimate_is_what_is_charged(kind: Pricing, a: int, c: int, ms: int) -> None:
    usage, t = Usage(a, 0, c), kind.terms(a, c)
    x = min(kind.unit(usage, ms / 1000), t.most)
    estimate = t.fixed + t.per_unit * x + t.per_square * x * x
    assert estimate == pytest.approx(kind.real(usage, ms / 1000))


@kinds
@given(a=st.integers(1, 10**6), c=st.integers(1, 10**6), parts=st.integers(1, 10))
def test_a_request_cut_up_costs_no_less_in_all(kind: Pricing, a: int, c: int, parts: int) -> None:
    """Answers in turns: each later part has the earlier output as input, all of it cached."""
    whole = kind.real(Usage(a, 0, c * parts), 4.0 * parts)
    cut = sum(
        kind.real(Usage(a + c * n, a + c * n if n else 0, c), 4.0) for n in range(parts)
    )  # fmt: skip
    assert cut >= whole * (1 - 1e-9)
