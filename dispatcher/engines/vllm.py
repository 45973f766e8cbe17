"""vLLM."""

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


def read(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a page. Never raises."""
    page = NAMES.read(text, model)
    return EngineFacts(
        waiting=page.count(WAITING),
        running=page.count(RUNNING),
        kv=page.share(*KV),
        preemptions=page.count(PREEMPTIONS),
        tpot=page.times(*TPOT),
        generated=page.count(GENERATED),
    )
