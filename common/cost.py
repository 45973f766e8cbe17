"""What a job costs its user: one formula, of which each kind of fairness is a row of coefficients.

    cost = request + input·(p - cached) + cached·cached + output·d + ms·t + held·(p·d + d²/2)

with p input and d output tokens, t milliseconds in the engine. The kinds:

- `requests`: each job the same, 1,000.
- `tokens`: weighted tokens. Weights 1 and 2 for input and output are those of the Virtual Token
  Counter (Sheng et al., OSDI 2024, arXiv 2401.00588); cached input counts a tenth.
- `time`: milliseconds from sending the request to the end of the answer, as the dispatcher sees
  them. What a job waits inside the engine counts, for the queue there is kept short, and so does
  the time in which its client does not take what has come.
- `price`: money, by the model's prices.
- `kv`: KV-token time, the sum over decode iterations of the tokens held in KV memory, p·d + d²/2
  (Justitia, arXiv 2510.17015). A job without output holds its input for one iteration; several
  answers to one request count as one long answer.

Costs are before the user's weight divides them: the verbs do that, with the weight that stands in
the job's record. Each kind is scaled by a power of ten so that a typical job, 600 tokens in and
200 out, costs 1,000 to 9,999: the lift's fraction of one unit must stay small beside a charge, and
counters small enough for a double to hold that fraction. With the default weights, `tokens` are
weighted tokens as they are.
"""

import math

import msgspec

from common.settings import ModelSettings
from common.wire import Usage

OUTPUT_START = 200
"""Output tokens expected of a user of whom nothing is known."""
TIME_START_MS = 5_000
"""The same of milliseconds in the engine: 200 tokens at 25 ms."""
OUTPUT_ALPHA = 0.2
"""Weight of the newest answer in the mean that predicts the next."""

REQUEST_COST = 1_000.0
LEAST_COST = 10.0
"""A job costs so much more where a token of its input costs less than 1: one without output would
else be free, and its user never had had any service."""
TYPICAL = Usage(600, 0, 200)
"""The job by which a kind is scaled: with weights 1 and 2 its tokens cost 1,000."""
TIME_MOST_MS = 86_400_000


class Terms(msgspec.Struct, frozen=True):
    """What `enqueue` stores for `pop` to price: fixed + per_unit·x + per_square·x², where x is
    the least of what is expected of the user and `most`."""

    fixed: float
    per_unit: float
    per_square: float
    most: int
    """Most units: output tokens, 0 where the path has none; with `time` milliseconds."""


class Pricing(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients of one model, scaled: what its jobs cost, expected and in the end."""

    request: float = 0.0
    input: float = 0.0
    cached: float = 0.0
    """At most `input`, so that a cache hit never raises a cost."""
    output: float = 0.0
    ms: float = 0.0
    """Not 0: the unit that is learned of a user is milliseconds, not output tokens."""
    held: float = 0.0

    @property
    def start(self) -> int:
        """Units expected of a user of whom nothing is known."""
        return TIME_START_MS if self.ms else OUTPUT_START

    def terms(self, input_tokens: int, most_output: int) -> Terms:
        """Of a job with this estimated input and this bound on its output, in tokens."""
        fixed = self.request + self.input * input_tokens
        if self.ms:
            return Terms(fixed, self.ms, 0.0, TIME_MOST_MS)
        most = max(1, most_output) if self.held else most_output
        return Terms(fixed, self.output + self.held * input_tokens, self.held / 2, most)

    def real(self, usage: Usage, seconds: float) -> float:
        """What a job cost that used this and was `seconds` in the engine; never negative."""
        cached = min(usage.cached, usage.input)
        held = max(1, usage.output) if self.held else 0
        return (
            self.request
            + self.input * (usage.input - cached)
            + self.cached * cached
            + self.output * usage.output
            + self.ms * max(0.0, seconds) * 1000
            + self.held * (usage.input * held + held * held / 2)
        )

    def unit(self, usage: Usage, seconds: float) -> int:
        """What a finished job teaches of its user: output tokens, or milliseconds."""
        return round(max(0.0, seconds) * 1000) if self.ms else usage.output

    def learns(self, most_output: int) -> bool:
        """Whether a job with this bound on its output teaches anything."""
        return bool(self.ms) or most_output > 0


def pricing(settings: ModelSettings) -> Pricing:
    """The coefficients that a model's settings ask for."""
    match settings.fairness:
        case "requests":
            return Pricing(request=REQUEST_COST)
        case "time":
            return Pricing(ms=1.0)
        case "kv":
            return _scaled(Pricing(held=1.0))
        case "price":
            price = settings.price
            if price is None:
                raise ValueError('fairness = "price" needs `price`')
            cached = price.input if price.cached_input is None else price.cached_input
            return _scaled(Pricing(input=price.input, cached=cached, output=price.output))
    weights = settings.tokens
    return _scaled(Pricing(input=weights.input, cached=weights.cached, output=weights.output))


def _scaled(raw: Pricing) -> Pricing:
    """The same in units of a power of ten, of which a typical job costs 1,000 to 9,999."""
    power = 3 - math.floor(math.log10(raw.real(TYPICAL, 0.0)))

    def scale(value: float) -> float:
        return value * 10.0**power if power >= 0 else value / 10.0**-power

    free = not raw.held and scale(raw.input) < 1
    return Pricing(
        request=LEAST_COST if free else 0.0, input=scale(raw.input), cached=scale(raw.cached),
        output=scale(raw.output), held=scale(raw.held),
    )  # fmt: skip
