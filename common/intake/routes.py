"""The route table: one row for each path whose requests are queued."""

from collections.abc import Callable

import msgspec

from common.intake import estimate
from common.intake.body import Fields, count
from common.intake.estimate import Estimate


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One path: how its bodies are read. The model's name is the body's `model` in all."""

    path: str
    """Ours and the engine's."""
    dialect: str
    """How its events are read and written: a row of the dispatcher's dialects."""
    streams: bool
    """Whether `stream` may ask for an event stream."""
    usage: bool
    """Whether streams take `stream_options.include_usage`."""
    estimate: Callable[[Fields], Estimate]
    output: int
    """Bound on the output tokens of one choice where the request sets none; 0: has no output."""
    limit: str = ""
    """The field that bounds its output, where that is not the one of chat and completions."""
    prompt: tuple[str, ...] = ()
    """Fields that make its prompt, in the order in which chat templates put them; none: an engine
    need not have seen it before."""


RESPONSES = "/v1/responses"

ROWS = (
    Row(
        path="/v1/chat/completions", dialect="chat", streams=True, usage=True,
        estimate=estimate.chat, output=estimate.OUTPUT_UNKNOWN,
        prompt=("tools", "functions", "messages"),
    ),
    Row(
        path="/v1/completions", dialect="completions", streams=True, usage=True,
        estimate=estimate.completions, output=16,  # the default of OpenAI's API and of vLLM
        prompt=("prompt",),
    ),
    Row(
        path="/v1/embeddings", dialect="embeddings", streams=False, usage=False,
        estimate=estimate.embeddings, output=0,
    ),
    Row(
        path=RESPONSES, dialect="responses", streams=True, usage=False,
        estimate=estimate.responses, output=estimate.OUTPUT_UNKNOWN, limit="max_output_tokens",
        prompt=("tools", "instructions", "input"),
    ),
)  # fmt: skip


def max_output(row: Row, fields: Fields, choices: int) -> int:
    """Most output tokens of all choices together; 0 where the path has no output."""
    most = count(fields.top, row.limit) if row.limit else fields.max_output
    return min(most or row.output, row.output and 2**31) * choices
