"""The engine's `/metrics` page: the names, labels and buckets of vLLM 0.32 that a gateway reads, or
the page of another engine (`EngineSettings.engine`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from sim import metrics_sglang, metrics_tgi
from sim.events import Gauges
from sim.settings import EngineSettings, Face
from sim.stats import EngineStats, Histogram

CONTENT_TYPES: Mapping[Face, str] = {
    "vllm": "text/plain; version=1.0.0; charset=utf-8",
    "sglang": metrics_sglang.CONTENT_TYPE,
    "tgi": metrics_tgi.CONTENT_TYPE,
}
HISTORY_MAX = 256


class GaugeHistory:
    """Remembers the gauges long enough to show them `delay` seconds late.

    States closer than delay/200 count as one, the last of them; at most HISTORY_MAX are kept.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._states: deque[tuple[float, Gauges]] = deque(maxlen=HISTORY_MAX)

    def add(self, gauges: Gauges) -> None:
        """Note a new state; times must not fall."""
        since = gauges.at
        if self._states and since - self._states[-1][0] <= self._delay / 200:
            since, _ = self._states.pop()
        self._states.append((since, gauges))

    def shown(self, now: float) -> Gauges | None:
        """The newest state that is old enough to be shown; None before the first."""
        limit = now - self._delay
        return next((state for since, state in reversed(self._states) if since <= limit), None)


class _Page:
    """Collects samples; each value is divided over the engine labels."""

    def __init__(self, settings: EngineSettings, started: float) -> None:
        self._count = settings.engine_labels
        self._model = settings.models[0].replace("\\", "\\\\").replace('"', '\\"')
        self._started = started
        self.lines: list[str] = []

    def labels(self, engine: int, more: str = "") -> str:
        return f'{{engine="{engine}",{more}model_name="{self._model}"}}'

    def head(self, name: str, kind: str, text: str) -> None:
        self.lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]

    def share(self, value: int, engine: int) -> float:
        """This engine's part of a count; the parts add up to the whole."""
        return float(value // self._count + (engine < value % self._count))

    def gauge(self, name: str, text: str, value: int) -> None:
        self.head(name, "gauge", text)
        self._shares(name, value)

    def level(self, name: str, text: str, value: float) -> None:
        """A gauge that is the same for each engine."""
        self.head(name, "gauge", text)
        self.lines += [f"vllm:{name}{self.labels(i)} {value!r}" for i in range(self._count)]

    def counter(self, name: str, text: str, values: dict[str, int]) -> None:
        """A counter with one sample for each further label (`""`: none)."""
        self.head(f"{name}_total", "counter", text)
        for more, value in values.items():
            self._shares(f"{name}_total", value, more)
        self._created(name, text, values)

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self.head(name, "histogram", text)
        bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
        for i in range(self._count):
            for bound, count in zip(bounds, histogram.cumulative(), strict=True):
                labels = f'{{engine="{i}",le="{bound}",model_name="{self._model}"}}'
                self.lines.append(f"vllm:{name}_bucket{labels} {self.share(count, i)!r}")
            labels = self.labels(i)
            self.lines.append(f"vllm:{name}_count{labels} {self.share(histogram.count, i)!r}")
            self.lines.append(f"vllm:{name}_sum{labels} {histogram.total / self._count!r}")
        self._created(name, text, {"": 0})

    def _shares(self, name: str, value: int, more: str = "") -> None:
        for i in range(self._count):
            self.lines.append(f"vllm:{name}{self.labels(i, more)} {self.share(value, i)!r}")

    def _created(self, name: str, text: str, values: dict[str, int]) -> None:
        self.head(f"{name}_created", "gauge", text)
        for more in values:
            for i in range(self._count):
                labels = self.labels(i, more)
                self.lines.append(f"vllm:{name}_created{labels} {self._started!r}")


def render(
    settings: EngineSettings, stats: EngineStats, gauges: Gauges | None, started: float
) -> bytes:
    """The page. `started` is the engine's start in Unix seconds; gauges None: none yet."""
    if settings.engine == "tgi":
        return metrics_tgi.render(settings, stats, gauges)
    if settings.engine == "sglang":
        return metrics_sglang.render(settings, stats, gauges)
    page = _Page(settings, started)
    running = gauges.running if gauges else 0
    waiting = gauges.waiting if gauges else 0
    usage = gauges.kv_usage if gauges else 0.0
    page.gauge("num_requests_running", "Number of requests in model execution batches.", running)
    page.gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting)
    kv_name = "gpu_cache_usage_perc" if settings.old_metric_names else "kv_cache_usage_perc"
    page.level(kv_name, "KV-cache usage. 1 means 100 percent usage.", usage)
    _counters(page, stats)
    _rejections(page, settings, stats, started)
    _histograms(page, settings, stats)
    _cache_config(page, settings)
    return ("\n".join(page.lines) + "\n").encode()


def _counters(page: _Page, stats: EngineStats) -> None:
    text = "Cumulative number of preemption from the engine."
    page.counter("num_preemptions", text, {"": stats.preemptions})
    page.counter("prompt_tokens", "Number of prefill tokens processed.", {"": stats.prompt_tokens})
    text = "Number of generation tokens processed."
    page.counter("generation_tokens", text, {"": stats.generation_tokens})
    finished = {
        'finished_reason="stop",': stats.finished_stop,
        'finished_reason="length",': stats.finished_length,
        'finished_reason="abort",': stats.aborted,
        'finished_reason="error",': 0,
        'finished_reason="repetition",': 0,
    }
    page.counter("request_success", "Count of successfully processed requests.", finished)


def _rejections(page: _Page, settings: EngineSettings, stats: EngineStats, started: float) -> None:
    """The one metric without an `engine` label: rejections come before an engine is chosen."""
    text = "Number of admission attempts rejected by a queue limit, by reason."
    model = settings.models[0]
    reasons = {"max_num_queued_reqs": stats.rejected, "max_num_queued_tokens": 0}
    page.head("admission_rejections_total", "counter", text)
    for reason, value in reasons.items():
        labels = f'{{model_name="{model}",reason="{reason}"}}'
        page.lines.append(f"vllm:admission_rejections_total{labels} {float(value)!r}")
    page.head("admission_rejections_created", "gauge", text)
    for reason in reasons:
        labels = f'{{model_name="{model}",reason="{reason}"}}'
        page.lines.append(f"vllm:admission_rejections_created{labels} {started!r}")


def _histograms(page: _Page, settings: EngineSettings, stats: EngineStats) -> None:
    text = "Histogram of number of tokens per engine_step."
    page.histogram("iteration_tokens_total", text, stats.iteration_tokens)
    text = "Histogram of time to first token in seconds."
    page.histogram("time_to_first_token_seconds", text, stats.ttft)
    if settings.old_metric_names:
        text = "Histogram of time per output token in seconds."
        page.histogram("time_per_output_token_seconds", text, stats.inter_token)
    else:
        text = "Histogram of inter-token latency in seconds."
        page.histogram("inter_token_latency_seconds", text, stats.inter_token)
        text = "Histogram of time_per_output_token_seconds per request."
        name = "request_time_per_output_token_seconds"
        page.histogram(name, text, stats.time_per_output_token)
    text = "Histogram of e2e request latency in seconds."
    page.histogram("e2e_request_latency_seconds", text, stats.e2e)
    text = "Histogram of time spent in WAITING phase for request."
    page.histogram("request_queue_time_seconds", text, stats.queue_time)


def _cache_config(page: _Page, settings: EngineSettings) -> None:
    page.head("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
    for i in range(settings.engine_labels):
        labels = (
            f'{{block_size="16",cache_dtype="auto",engine="{i}",'
            f'kv_cache_size_tokens="{settings.kv_tokens}",'
            f'num_gpu_blocks="{settings.kv_tokens // 16}"}}'
        )
        page.lines.append(f"vllm:cache_config_info{labels} 1.0")
