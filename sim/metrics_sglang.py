"""The `/metrics` page of SGLang, of what a gateway reads and a little more.

With several `engine_labels` each is a data-parallel rank. The bounds of histograms are the model's,
not SGLang's.
"""

from __future__ import annotations

from sim.events import Gauges
from sim.settings import EngineSettings
from sim.stats import EngineStats, Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class _Page:
    """Collects samples; each value of a scheduler is divided over the ranks."""

    def __init__(self, settings: EngineSettings) -> None:
        self._count = settings.engine_labels
        self._model = settings.models[0].replace("\\", "\\\\").replace('"', '\\"')
        self.lines: list[str] = []

    def head(self, name: str, kind: str, text: str) -> None:
        self.lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]

    def ranks(self, name: str, value: int, mode: str = "") -> None:
        """Parts of a count, which add up to the whole."""
        for i in range(self._count):
            share = float(value // self._count + (i < value % self._count))
            self.lines.append(f"sglang:{name}{self._of_rank(i, mode)} {share!r}")

    def level(self, name: str, text: str, value: float) -> None:
        """A gauge that is the same for each rank."""
        self.head(name, "gauge", text)
        self.lines += [f"sglang:{name}{self._of_rank(i)} {value!r}" for i in range(self._count)]

    def tokens(self, name: str, text: str, value: int) -> None:
        self.head(name, "counter", text)
        labels = f'{{engine_type="unified",is_streaming="True",model_name="{self._model}"}}'
        self.lines.append(f"sglang:{name}{labels} {float(value)!r}")

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        self.head(name, "histogram", text)
        labels = f'engine_type="unified",model_name="{self._model}"'
        self.lines.append(f"sglang:{name}_sum{{{labels}}} {histogram.total!r}")
        bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.cumulative(), strict=True):
            some = f'{{engine_type="unified",le="{bound}",model_name="{self._model}"}}'
            self.lines.append(f"sglang:{name}_bucket{some} {float(count)!r}")
        self.lines.append(f"sglang:{name}_count{{{labels}}} {float(histogram.count)!r}")

    def _of_rank(self, rank: int, mode: str = "") -> str:
        dp = f'dp_rank="{rank}",' if self._count > 1 else ""
        mode = f'mode="{mode}",' if mode else ""
        rest = f'moe_ep_rank="0",pp_rank="0",tp_rank="{rank}"'
        return f'{{{dp}engine_type="unified",{mode}model_name="{self._model}",{rest}}}'


def render(settings: EngineSettings, stats: EngineStats, gauges: Gauges | None) -> bytes:
    """The page; `gauges` None: all 0."""
    page = _Page(settings)
    page.head("num_running_reqs", "gauge", "The number of running requests.")
    page.ranks("num_running_reqs", gauges.running if gauges else 0)
    page.head("num_queue_reqs", "gauge", "The number of requests in the waiting queue.")
    page.ranks("num_queue_reqs", gauges.waiting if gauges else 0)
    page.level("token_usage", "The token usage.", gauges.kv_usage if gauges else 0.0)
    text = "Total number of retracted requests."
    page.head("num_retracted_requests_total", "counter", text)
    page.ranks("num_retracted_requests_total", stats.preemptions)
    text = "Total number of tokens processed (updated on each log interval). "
    text += "mode: prefill_compute, prefill_cache, decode."
    page.head("realtime_tokens_total", "counter", text)
    page.ranks("realtime_tokens_total", stats.prompt_tokens, "prefill_compute")
    page.ranks("realtime_tokens_total", stats.generation_tokens, "decode")
    page.tokens("prompt_tokens_total", "Number of prefill tokens processed.", stats.prompt_tokens)
    text = "Number of generation tokens processed."
    page.tokens("generation_tokens_total", text, stats.generation_tokens)
    text = "Histogram of time to first token in seconds."
    page.histogram("time_to_first_token_seconds", text, stats.ttft)
    text = "Histogram of inter-token latency in seconds."
    page.histogram("inter_token_latency_seconds", text, stats.inter_token)
    return ("\n".join(page.lines) + "\n").encode()
