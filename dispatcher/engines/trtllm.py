"""TensorRT-LLM: its own server `trtllm-serve`, and Triton with its backend.

trtllm-serve has two pages (tensorrt_llm/serve/openai_server.py and metrics/collector.py of
NVIDIA/TensorRT-LLM, commit 050f80def8df): `/prometheus/metrics`, with `return_perf_metrics: true`
for requests and `enable_iter_perf_stats: true` for the load; and `/metrics`, a JSON list of what
iterations did, which is told once to whoever asks, answers late while nothing runs, and is empty
then. The first is read where it tells anything. Triton's (`nv_trt_llm_…`, README.md of triton-
inference-server/tensorrtllm_backend) is read where it is at `/metrics` of the backend's address: by
itself it is on a port of its own, 8002.

Tokens are counted as requests end, so that they grow is told by the number of the iteration alone,
on the JSON page. A percentage is refused, as everywhere: Triton's `fraction` is a share.

Tried: on pages written after these sources (tests/fixtures/trtllm), never on the real thing.
"""

import msgspec

from dispatcher.engines.adapter import Adapter
from dispatcher.engines.facts import NOTHING, EngineFacts
from dispatcher.engines.pages import VALUE_MAX, Names, as_share, histogram

WAITING, RUNNING = "trtllm_num_requests_waiting", "trtllm_num_requests_running"
KV, SLOTS = "trtllm_kv_cache_utilization", "trtllm_max_num_active_requests"
TPOT = "trtllm_time_per_output_token_seconds"
TRITON, TRITON_KV = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
NAMES = Names([WAITING, RUNNING, KV, SLOTS, *histogram(TPOT), TRITON, TRITON_KV])


class _Kv(msgspec.Struct, rename="camel"):
    max_num_blocks: int | None = None
    used_num_blocks: int | None = None


class _Iteration(msgspec.Struct, rename="camel"):
    iter: int | None = None
    num_active_requests: int | None = None
    num_queued_requests: int | None = None
    max_num_active_requests: int | None = None
    kv_cache_stats: _Kv | None = None


_iterations = msgspec.json.Decoder(list[_Iteration])


def shown(text: bytes) -> bool:
    """Whether a page is its own; a list without entries is its JSON page while nothing runs."""
    return NAMES.shown(text) or _decoded(text) is not None


def read(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a page, of either form."""
    iterations = _decoded(text)
    if iterations is not None:
        return _of_iteration(iterations[-1]) if iterations else NOTHING
    page = NAMES.read(text, model)
    waiting, running = page.count(WAITING), page.count(RUNNING)
    kv, slots = page.share(KV), page.count(SLOTS)
    if page.series(TRITON):
        waiting = page.count(TRITON, request_type="waiting")
        running = page.count(TRITON, request_type="scheduled")
        kv = page.share(TRITON_KV, kv_cache_block_type="fraction")
        slots = page.count(TRITON, request_type="max")
    return EngineFacts(
        waiting=waiting, running=running, kv=kv, slots=slots or None, tpot=page.times(TPOT)
    )


def _decoded(text: bytes) -> list[_Iteration] | None:
    if text.lstrip()[:1] != b"[":
        return None
    try:
        return _iterations.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _of_iteration(last: _Iteration) -> EngineFacts:
    kv = last.kv_cache_stats or _Kv()
    used, most = _count(kv.used_num_blocks), _count(kv.max_num_blocks)
    return EngineFacts(
        waiting=_count(last.num_queued_requests),
        running=_count(last.num_active_requests),
        kv=as_share(used / most) if used is not None and most else None,
        slots=_count(last.max_num_active_requests) or None,
        generated=_count(last.iter),
    )


def _count(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= VALUE_MAX else None


TRTLLM = Adapter(kind="trtllm", paths=("/prometheus/metrics", "/metrics"), shown=shown, read=read)
