"""SGLang, 0.4 to 0.5, started with `--enable-metrics`.

Names: python/sglang/srt/observability/metrics_collector.py of sgl-project/sglang, commit
016d8605e458 (before: srt/metrics/collector.py); docs.sglang.io, "Production Metrics".
`time_per_output_token_seconds` became `inter_token_latency_seconds`. `generation_tokens_total` is
counted as requests end, `realtime_tokens_total` every few steps, and the count of gaps between
tokens at once.

Each scheduler process has its series: those that differ in `dp_rank` have queues of their own,
which are summed. Those of one rank tell of the same queue, so the greatest counts: a process for
each `tp_rank` and `pp_rank`, and with `--enable-priority-scheduling` the whole under `priority=""`
beside its parts under each priority.

A full queue (`--max-queued-requests`) is refused with 503 and "The request queue is full."; a
stream's head is sent before, and the refusal is its first event. A request that waits may be thrown
out by a more urgent one: it ran nothing either.

Tried: on pages written after that source and its documentation (tests/fixtures/sglang), never on
the real thing.
"""

from dispatcher.engines.adapter import Adapter, Refusal
from dispatcher.engines.facts import EngineFacts
from dispatcher.engines.pages import Names, Page, as_count, histogram

WAITING, RUNNING, KV = "sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage"
PREEMPTIONS = "sglang:num_retracted_requests_total"
TPOT = ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")
REALTIME = "sglang:realtime_tokens_total"
NAMES = Names([WAITING, RUNNING, KV, PREEMPTIONS, REALTIME, *histogram(*TPOT)])
REFUSED = (b"The request queue is full", b"aborted by a higher priority request")


def read(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a page."""
    page = NAMES.read(text, model)
    tpot = page.times(*TPOT)
    decoded = page.count(REALTIME, mode="decode")
    if decoded is None and tpot is not None:
        decoded = tpot.count
    return EngineFacts(
        waiting=_of_ranks(page, WAITING),
        running=_of_ranks(page, RUNNING),
        kv=page.share(KV),
        preemptions=_of_ranks(page, PREEMPTIONS),
        tpot=tpot,
        generated=decoded,
    )


def _of_ranks(page: Page, name: str) -> int | None:
    """The sum over data-parallel ranks; of the series of one the greatest."""
    ranks: dict[str, float] = {}
    for series in page.series(name):
        rank = series.labels.get("dp_rank", "")
        ranks[rank] = max(ranks.get(rank, 0.0), series.value)
    return as_count(list(ranks.values()))


SGLANG = Adapter(
    kind="sglang",
    paths=("/metrics",),
    shown=NAMES.shown,
    read=read,
    refusals=(Refusal(None, REFUSED),),
)
