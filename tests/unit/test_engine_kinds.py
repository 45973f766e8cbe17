"""The pages of engines other than vLLM, whose a page is, and which answers say "busy".

What is expected of a page is what prometheus_client's parser, or json, reads from it."""

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.engines.facts import NOTHING, EngineFacts, TokenTimes
from dispatcher.engines.kinds import ADAPTERS, busy, recognise

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
PAGES = [p for kind in ADAPTERS for p in sorted((FIXTURES / kind).glob("*.[tj]*"))]


class Read:
    """A page as another parser reads it."""

    def __init__(self, path: Path) -> None:
        self.samples = [
            s for f in text_string_to_metric_families(path.read_text()) for s in f.samples
        ]

    def sum(self, name: str, **labels: str) -> int:
        found = [s.value for s in self.samples if s.name == name
                 and all(s.labels.get(k, v) == v for k, v in labels.items())]  # fmt: skip
        assert found, name
        return int(sum(found))

    def one(self, name: str, **labels: str) -> float:
        (found,) = [s.value for s in self.samples if s.name == name
                    and labels.items() <= s.labels.items()]  # fmt: skip
        return found

    def times(self, name: str) -> TokenTimes:
        return TokenTimes(self.one(f"{name}_sum"), int(self.one(f"{name}_count")))


def facts(kind: str, file: str, model: str | None = "tiny") -> EngineFacts:
    page = (FIXTURES / kind / file).read_bytes()
    assert recognise(page) == kind
    assert ADAPTERS[kind].read(page, None) == ADAPTERS[kind].read(page, "other")
    return ADAPTERS[kind].read(page, model)


def test_tgi() -> None:
    page = Read(FIXTURES / "tgi" / "metrics.txt")
    steps = "tgi_batch_inference_success_total"  # how this parser calls any counter
    assert facts("tgi", "metrics.txt") == EngineFacts(
        waiting=page.sum("tgi_queue_size"),
        running=page.sum("tgi_batch_current_size"),
        tpot=page.times("tgi_request_mean_time_per_token_duration"),
        generated=page.sum(steps, method="prefill") + page.sum(steps, method="decode"),
    )
    assert facts("tgi", "metrics.txt").kv is None, "it tells nothing of its memory"


@pytest.mark.parametrize("file", ["metrics.txt", "metrics_ranks_priority.txt"])
def test_sglang(file: str) -> None:
    """Data-parallel ranks are summed, and no part of a whole is counted beside the whole."""
    page = Read(FIXTURES / "sglang" / file)
    assert facts("sglang", file) == EngineFacts(
        waiting=page.sum("sglang:num_queue_reqs", priority=""),
        running=page.sum("sglang:num_running_reqs", priority=""),
        kv=max(s.value for s in page.samples if s.name == "sglang:token_usage"),
        preemptions=page.sum("sglang:num_retracted_requests_total"),
        tpot=page.times("sglang:inter_token_latency_seconds"),
        generated=page.sum("sglang:realtime_tokens_total", mode="decode"),
    )


def test_sglang_of_older_versions() -> None:
    page = Read(FIXTURES / "sglang" / "metrics_0.4.txt")
    tpot = page.times("sglang:time_per_output_token_seconds")
    assert facts("sglang", "metrics_0.4.txt") == EngineFacts(
        waiting=page.sum("sglang:num_queue_reqs"),
        running=page.sum("sglang:num_running_reqs"),
        kv=page.one("sglang:token_usage"),
        tpot=tpot,
        generated=tpot.count,
    )


def test_sglang_s_processes_of_one_rank_tell_of_one_queue() -> None:
    name = "sglang:num_queue_reqs"
    lines = [f'{name}{{dp_rank="{dp}",tp_rank="{tp}"}} {dp + 2 + tp}\n'
             for dp in range(2) for tp in range(4)]  # fmt: skip
    assert ADAPTERS["sglang"].read("".join(lines).encode(), None).waiting == 5 + 6
    broken = f'{name}{{dp_rank="0"}} 3\n{name}{{dp_rank="1"}} NaN\n'
    assert ADAPTERS["sglang"].read(broken.encode(), None) == NOTHING


@pytest.mark.parametrize("file", ["metrics.txt", "metrics_kv.txt"])
def test_llamacpp(file: str) -> None:
    page = Read(FIXTURES / "llamacpp" / file)
    seconds = page.one("llamacpp:tokens_predicted_seconds_total")
    tokens = page.sum("llamacpp:tokens_predicted_total")
    assert facts("llamacpp", file) == EngineFacts(
        waiting=page.sum("llamacpp:requests_deferred"),
        running=page.sum("llamacpp:requests_processing"),
        kv=page.one("llamacpp:kv_cache_usage_ratio") if "kv" in file else None,
        tpot=TokenTimes(seconds, tokens),
        generated=page.sum("llamacpp:n_decode_total"),
    )


def test_trtllm_by_its_prometheus_page() -> None:
    page = Read(FIXTURES / "trtllm" / "prometheus.txt")
    assert facts("trtllm", "prometheus.txt") == EngineFacts(
        waiting=page.sum("trtllm_num_requests_waiting"),
        running=page.sum("trtllm_num_requests_running"),
        kv=page.one("trtllm_kv_cache_utilization"),
        slots=page.sum("trtllm_max_num_active_requests"),
        tpot=page.times("trtllm_time_per_output_token_seconds"),
    )


def test_trtllm_by_its_newest_iteration() -> None:
    last = json.loads((FIXTURES / "trtllm" / "iterations.json").read_text())[-1]
    kv = last["kvCacheStats"]
    assert facts("trtllm", "iterations.json") == EngineFacts(
        waiting=last["numQueuedRequests"],
        running=last["numActiveRequests"],
        kv=kv["usedNumBlocks"] / kv["maxNumBlocks"],
        slots=last["maxNumActiveRequests"],
        generated=last["iter"],
    )


def test_trtllm_by_triton_s_page() -> None:
    page = Read(FIXTURES / "trtllm" / "triton.txt")
    requests = "nv_trt_llm_request_metrics"
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    assert facts("trtllm", "triton.txt") == EngineFacts(
        waiting=page.sum(requests, request_type="waiting"),
        running=page.sum(requests, request_type="scheduled"),
        kv=page.one(blocks, kv_cache_block_type="fraction"),
        slots=page.sum(requests, request_type="max"),
    )


@pytest.mark.parametrize(
    "page",
    [
        b"[]",
        b'[{"iter":-1,"numQueuedRequests":-2,"kvCacheStats":{"maxNumBlocks":0,"usedNumBlocks":0}}]',
        b'[{"kvCacheStats":{"maxNumBlocks":4,"usedNumBlocks":400}},{"maxNumActiveRequests":0}]',
        b'[{"kvCacheStats":{"maxNumBlocks":4,"usedNumBlocks":400}}]',
    ],
)
def test_iterations_that_tell_nothing_are_unknown(page: bytes) -> None:
    assert recognise(page) == "trtllm"
    assert ADAPTERS["trtllm"].read(page, None) == NOTHING


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("page", [b"[" * 100_000, b"[1, 2]", b'["x"]', b'[{"iter":"x"}]', b"\xff["])
def test_other_json_is_nobody_s(kind: str, page: bytes) -> None:
    assert recognise(page) is None
    assert ADAPTERS[kind].read(page, None) == NOTHING


@pytest.mark.parametrize("path", PAGES, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_a_page_is_one_kind_s_and_tells_the_others_nothing(path: Path) -> None:
    page = path.read_bytes()
    for kind, adapter in ADAPTERS.items():
        assert adapter.shown(page) is (kind == path.parent.name)
        assert (adapter.read(page, None) != NOTHING) is (kind == path.parent.name)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("sglang", "sglang:token_usage 61.0"),
        ("llamacpp", "llamacpp:kv_cache_usage_ratio 41.5"),
        ("trtllm", "trtllm_kv_cache_utilization 43.75"),
        ("trtllm", 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 43.75'),
    ],
)
def test_a_percentage_is_no_share(kind: str, line: str) -> None:
    assert ADAPTERS[kind].read(f"{line}\n".encode(), None).kv is None


@pytest.mark.parametrize(
    "page", [b"", b"<html>tgi_queue_size</html>\n", b"# HELP tgi_queue_size x\n"]
)
def test_pages_of_no_known_engine(page: bytes) -> None:
    assert recognise(page) is None


# --- which answers say "busy, not me"

TGI = b'{"error":"Model is overloaded","error_type":"overloaded"}'
SGLANG = b'{"object":"error","message":"The request queue is full.","type":"503","code":503}'
LLAMACPP = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
DRAINS = b'{"error":{"message":"cannot schedule new futures after shutdown","code":500}}'


@pytest.mark.parametrize(
    ("kind", "status", "body", "is_busy"),
    [
        ("tgi", 429, TGI, True),
        ("tgi", None, TGI, True),
        ("tgi", None, SGLANG, False),
        ("tgi", 500, DRAINS, False),
        ("sglang", 503, SGLANG, True),
        ("sglang", None, SGLANG, True),
        ("sglang", None, DRAINS, False),
        ("llamacpp", 503, LLAMACPP, True),
        ("llamacpp", None, LLAMACPP, False),
        ("vllm", 500, DRAINS, True),
        ("vllm", None, DRAINS, False),
        ("vllm", 500, b"EngineCore encountered an issue", False),
        ("vllm", 400, TGI, False),
        ("trtllm", 429, b"", True),
        (None, 500, DRAINS, True),
        (None, None, TGI, True),
        ("none", None, SGLANG, True),
        ("none", 200, b"", False),
    ],
)
def test_refusals(kind: str | None, status: int | None, body: bytes, is_busy: bool) -> None:
    assert busy(kind, status, body) is is_busy
