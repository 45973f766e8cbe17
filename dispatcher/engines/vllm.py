"""vLLM, 0.6 to 0.32.

Names: vllm/v1/metrics/loggers.py, and vllm/engine/metrics.py of the versions before 1.0 of its
engine; docs.vllm.ai, "Production Metrics". `gpu_cache_usage_perc` became `kv_cache_usage_perc`,
and `time_per_output_token_seconds` became `inter_token_latency_seconds`; some versions have both.
`request_time_per_output_token_seconds` tells the mean of each request as it ends, so it is the last
choice. Of data-parallel engines each has its series, with a label `engine`.

Tried on the real thing: 0.32.0 (tests/fixtures/vllm-0.32). Older names on written pages alone.
"""

from dispatcher.engines.adapter import Adapter, Refusal
from dispatcher.engines.facts import EngineFacts
from dispatcher.engines.pages import Names, histogram

WAITING, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS, GENERATED = "vllm:num_preemptions_total", "vllm:generation_tokens_total"
TPOT = (
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
)
NAMES = Names([WAITING, RUNNING, *KV, PREEMPTIONS, GENERATED, *histogram(*TPOT)])
DRAINING = (b"cannot schedule new futures", b"shutting down", b"shutdown")
"""What it says with a 500 while it waits for its last requests."""


def read(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a page."""
    page = NAMES.read(text, model)
    return EngineFacts(
        waiting=page.count(WAITING),
        running=page.count(RUNNING),
        kv=page.share(*KV),
        preemptions=page.count(PREEMPTIONS),
        tpot=page.times(*TPOT),
        generated=page.count(GENERATED),
    )


VLLM = Adapter(
    kind="vllm",
    paths=("/metrics",),
    shown=NAMES.shown,
    read=read,
    refusals=(Refusal(500, DRAINING),),
)
