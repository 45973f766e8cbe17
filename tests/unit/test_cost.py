"""Costs: the published formula, and no way to gain by how a request is cut up or reported."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cost import REQUEST_COST, Terms, real, terms
from common.wire import Usage

tokens = st.integers(0, 10**9)


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        (Usage(100, 0, 0), 100.0),
        (Usage(0, 0, 100), 200.0),
        (Usage(100, 100, 0), 10.0),
        (Usage(100, 50, 10), 100 - 45 + 20),
        (Usage(0, 0, 0), 0.0),
    ],
)
def test_tokens(usage: Usage, cost: float) -> None:
    assert real("tokens", usage) == pytest.approx(cost)


def test_terms_give_what_pop_prices() -> None:
    assert terms("tokens", 120, 500) == Terms(120.0, 2.0, 500)
    assert terms("requests", 120, 500) == Terms(REQUEST_COST, 0.0, 500)


@given(tokens, tokens, tokens)
def test_a_request_costs_the_same_whatever_it_holds(a: int, b: int, c: int) -> None:
    assert real("requests", Usage(a, b, c)) == REQUEST_COST


@given(tokens, tokens, tokens)
def test_no_cost_is_negative_even_if_an_engine_reports_nonsense(a: int, b: int, c: int) -> None:
    assert real("tokens", Usage(a, b, c)) >= 0


@given(tokens, tokens, tokens, tokens)
def test_more_tokens_never_cost_less(a: int, cached: int, c: int, more: int) -> None:
    cached = min(cached, a)
    cost = real("tokens", Usage(a, cached, c))
    assert real("tokens", Usage(a + more, cached, c)) >= cost
    assert real("tokens", Usage(a, cached, c + more)) >= cost
    assert real("tokens", Usage(a, 0, c)) >= cost


@given(tokens, tokens)
def test_an_exact_estimate_is_what_is_charged(a: int, out: int) -> None:
    t = terms("tokens", a, out)
    assert t.fixed + t.per_output * min(out, t.max_output) == real("tokens", Usage(a, 0, out))
