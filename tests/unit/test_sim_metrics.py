"""The simulated `/metrics` page beside a captured one, and how it follows the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sim.engine import Engine
from sim.events import EngineRequest, Gauges
from sim.metrics import GaugeHistory, render
from sim.settings import EngineSettings
from sim.stats import Histogram
from sim.transport import EngineTransport
from tests.support.wait import pass_time

FIXTURES = Path(__file__).parent.parent / "fixtures" / "vllm-0.32"
READ_BY_GATEWAYS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count", "vllm:time_to_first_token_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket", "vllm:request_success_total",
    "vllm:admission_rejections_total", "vllm:cache_config_info",
}  # fmt: skip


def samples(page: bytes) -> list[Sample]:
    families = text_string_to_metric_families(page.decode())
    return [sample for family in families for sample in family.samples]


def busy(**changes: object) -> tuple[EngineSettings, Engine]:
    """An engine with two running, three waiting, and some steps behind it."""
    values: dict[str, object] = {"model": "tiny", "max_num_seqs": 2, **changes}
    settings = EngineSettings(**values)  # type: ignore[arg-type]
    engine = Engine(settings)
    for _ in range(5):
        engine.submit(0.0, EngineRequest(prompt_tokens=10, output_tokens=100))
    engine.advance(0.5)
    return settings, engine


def page_of(**changes: object) -> bytes:
    settings, engine = busy(**changes)
    return render(settings, engine.stats, engine.gauges(), 1_000.0)


def labelled(page: bytes) -> dict[str, set[frozenset[tuple[str, str]]]]:
    """The label sets of each metric, bucket bounds among them."""
    found: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for sample in samples(page):
        found.setdefault(sample.name, set()).add(frozenset(sample.labels.items()))
    return found


def total(page: bytes, name: str) -> float:
    return sum(sample.value for sample in samples(page) if sample.name == name)


def test_names_labels_and_buckets_are_the_real_ones() -> None:
    captured = (FIXTURES / "metrics_under_load.body").read_bytes()
    ours, theirs = labelled(page_of()), labelled(captured)
    assert ours.keys() >= READ_BY_GATEWAYS
    for name, labels in ours.items():
        if name != "vllm:cache_config_info":
            assert labels == theirs[name], name


def test_help_and_type_lines_are_the_real_ones() -> None:
    captured = (FIXTURES / "metrics_under_load.body").read_text().splitlines()
    ours = [line for line in page_of().decode().splitlines() if line.startswith("#")]
    assert ours and set(ours) <= set(captured)


def test_values_are_the_engine_s() -> None:
    _, engine = busy()
    page = page_of()
    assert total(page, "vllm:num_requests_running") == 2
    assert total(page, "vllm:num_requests_waiting") == 3
    assert total(page, "vllm:kv_cache_usage_perc") == engine.kv_usage() > 0
    tokens = total(page, "vllm:generation_tokens_total")
    assert tokens == engine.stats.generation_tokens > 50
    gaps = total(page, "vllm:inter_token_latency_seconds_count")
    assert gaps == tokens - 2
    assert total(page, "vllm:time_to_first_token_seconds_count") == 2
    mean = total(page, "vllm:inter_token_latency_seconds_sum") / gaps
    assert mean == pytest.approx(0.0101, rel=0.01)


def test_a_histogram_counts_at_and_below_each_bound() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [2, 3, 4, 5]
    assert (histogram.count, histogram.total) == (5, 16.0)


def test_old_names() -> None:
    names = {sample.name for sample in samples(page_of(old_metric_names=True))}
    assert "vllm:gpu_cache_usage_perc" in names
    assert "vllm:time_per_output_token_seconds_bucket" in names
    assert not {"vllm:kv_cache_usage_perc", "vllm:inter_token_latency_seconds_sum"} & names


@pytest.mark.parametrize("count", [2, 3])
def test_several_engine_labels_add_up(count: int) -> None:
    parts = samples(page_of(engine_labels=count))
    whole = {(s.name, s.labels.get("le"), s.labels.get("finished_reason")): s.value
             for s in samples(page_of()) if "engine" in s.labels}  # fmt: skip
    sums: dict[tuple[str, str | None, str | None], float] = {}
    for s in parts:
        key = (s.name, s.labels.get("le"), s.labels.get("finished_reason"))
        sums[key] = sums.get(key, 0.0) + s.value
    for key, value in whole.items():
        if not key[0].endswith(("_created", "_info", "_perc")):
            assert sums[key] == pytest.approx(value), key
    engines = {s.labels["engine"] for s in parts if s.name == "vllm:num_requests_waiting"}
    assert engines == {str(i) for i in range(count)}
    assert len({s.value for s in parts if s.name == "vllm:kv_cache_usage_perc"}) == 1
    for engine in engines:
        name = "vllm:inter_token_latency_seconds_bucket"
        buckets = [s.value for s in parts if s.name == name and s.labels["engine"] == engine]
        assert buckets and buckets == sorted(buckets)


def state(at: float, waiting: int) -> Gauges:
    return Gauges(at=at, running=1, waiting=waiting, free_slots=0, kv_usage=0.0, preemptions=0)


def test_history_shows_what_was_true_then() -> None:
    history = GaugeHistory(2.0)
    assert history.shown(0.0) is None
    for second in range(10):
        history.add(state(float(second), second))
    assert [_waiting(history, now) for now in (9.0, 9.9, 10.0, 11.0, 99.0)] == [7, 7, 8, 9, 9]


def test_history_is_bounded_and_still_reaches_back() -> None:
    history = GaugeHistory(2.0)
    for tick in range(100_000):
        history.add(state(tick / 10_000, tick))
    assert _waiting(history, 9.9999) == pytest.approx(80_000, abs=200)


def test_without_delay_the_latest_is_shown() -> None:
    history = GaugeHistory(0.0)
    history.add(state(1.0, 4))
    history.add(state(1.0, 5))
    assert _waiting(history, 1.0) == 5


def _waiting(history: GaugeHistory, now: float) -> int | None:
    shown = history.shown(now)
    return shown.waiting if shown else None


@pytest.mark.looptime
async def test_delayed_gauges_over_http() -> None:
    transport = EngineTransport(EngineSettings(max_num_seqs=1, metrics_delay=3.0))
    async with httpx.AsyncClient(transport=transport, base_url="http://e", timeout=None) as client:
        body = {"prompt": "x", "max_tokens": 2_000, "ignore_eos": True}
        calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        seen = []
        for _ in range(5):
            page = (await client.get("/metrics")).content
            seen.append(total(page, "vllm:num_requests_waiting"))
            await pass_time(1.0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert seen == [0, 0, 0, 2, 2]
