"""The `/metrics` page of Text Generation Inference, of what a gateway reads and a little more.

In the form of its exporter: counters, gauges, histograms, an empty line after each. The bounds of
histograms are the model's, not TGI's. As there, gauges are absent until something was served.
"""

from __future__ import annotations

from sim.events import Gauges
from sim.settings import EngineSettings
from sim.stats import EngineStats, Histogram

CONTENT_TYPE = "text/plain; charset=utf-8"


def render(settings: EngineSettings, stats: EngineStats, gauges: Gauges | None) -> bytes:
    """The page; `gauges` None: nothing was served yet."""
    done = stats.finished_stop + stats.finished_length
    lines: list[str] = []
    if gauges is None:
        return b""
    _family(lines, "request_count", "counter", "Total number of requests",
            [("", done + stats.aborted + gauges.running + gauges.waiting)])  # fmt: skip
    _family(lines, "request_success", "counter", "Number of successful requests", [("", done)])
    text = "Number of successful inference calls per method (prefill or decode)"
    steps = [('{method="prefill"}', stats.ttft.count), ('{method="decode"}', stats.steps)]
    _family(lines, "batch_inference_success", "counter", text, steps)
    _family(lines, "batch_current_size", "gauge", "Current batch size", [("", gauges.running)])
    most = round(gauges.kv_usage * settings.kv_tokens)
    text = "Maximum tokens for the current batch"
    _family(lines, "batch_current_max_tokens", "gauge", text, [("", most)])
    _family(lines, "queue_size", "gauge", "Current queue size", [("", gauges.waiting)])
    text = "Mean time per token per request"
    _histogram(lines, "request_mean_time_per_token_duration", text, stats.time_per_output_token)
    text = "Time spent in the queue per request"
    _histogram(lines, "request_queue_duration", text, stats.queue_time)
    text = "Total time spent processing the request"
    _histogram(lines, "request_duration", text, stats.e2e)
    return ("\n".join(lines) + "\n").encode()


def _family(
    lines: list[str], name: str, kind: str, text: str, samples: list[tuple[str, int]]
) -> None:
    lines += [f"# HELP tgi_{name} {text}", f"# TYPE tgi_{name} {kind}"]
    lines += [f"tgi_{name}{labels} {value}" for labels, value in samples]
    lines.append("")


def _histogram(lines: list[str], name: str, text: str, histogram: Histogram) -> None:
    lines += [f"# HELP tgi_{name} {text}", f"# TYPE tgi_{name} histogram"]
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.cumulative(), strict=True):
        lines.append(f'tgi_{name}_bucket{{le="{bound}"}} {count}')
    lines += [f"tgi_{name}_sum {histogram.total!r}", f"tgi_{name}_count {histogram.count}", ""]
