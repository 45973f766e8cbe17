"""What a job costs its user: one code path, a row of terms for each kind of cost.

Costs are in units of the kind (weighted tokens, thousandths of a request), before the user's
weight divides them: the verbs do that, with the weight that stands in the job's record. All kinds
are scaled so that a typical job costs 1,000 or more, for the lift's fraction of one unit must stay
small beside a charge.
"""

from typing import Literal

import msgspec

from common.wire import Usage

Fairness = Literal["tokens", "requests"]

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CACHED_DISCOUNT = 0.9
"""w_in, w_out and γ of cost = w_in·(input - γ·cached) + w_out·output, after the Virtual Token
Counter (Sheng et al., OSDI 2024, arXiv 2401.00588), with cached input at a tenth of the price."""

REQUEST_COST = 1_000.0

OUTPUT_START = 200
"""Output tokens expected of a user of whom nothing is known."""
OUTPUT_ALPHA = 0.2
"""Weight of the newest answer in the mean that predicts the next."""


class Terms(msgspec.Struct, frozen=True):
    """What `enqueue` stores for `pop` to price: fixed + per_output · min(expected, max_output)."""

    fixed: float
    per_output: float
    max_output: int
    """Most output tokens; 0 where the path has no output."""


def terms(fairness: Fairness, input_tokens: int, max_output: int) -> Terms:
    """The terms of a job with this estimated input and this bound on its output, in tokens."""
    if fairness == "requests":
        return Terms(REQUEST_COST, 0.0, max_output)
    return Terms(INPUT_WEIGHT * input_tokens, OUTPUT_WEIGHT, max_output)


def real(fairness: Fairness, usage: Usage) -> float:
    """What a job with this usage costs, before weighting."""
    if fairness == "requests":
        return REQUEST_COST
    uncached = usage.input - CACHED_DISCOUNT * min(usage.cached, usage.input)
    return INPUT_WEIGHT * uncached + OUTPUT_WEIGHT * usage.output
