"""Settings of one simulated engine."""

from __future__ import annotations

from typing import Literal

import msgspec

Face = Literal["vllm", "tgi", "sglang"]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that shapes one simulated engine: speed, sizes, switches.

    The defaults are a small engine that serves about 20 streams at 90 tokens a second each.
    Raises ValueError for values under which the model could not make progress.
    """

    model: str | tuple[str, ...] = "sim"
    """Served model name, or several; the first is the one in metrics and in empty requests."""
    engine: Face = "vllm"
    """Whose metrics page, list of models and refusals it has; answers are vLLM's in any case."""
    max_num_seqs: int = 32
    """Sequences that may run at once."""
    step_ms: float = 10.0
    """Fixed time of one engine step, milliseconds."""
    per_seq_us: float = 50.0
    """Additional step time for each sequence in the batch, microseconds."""
    prefill_tokens_per_s: float = 20_000.0
    """Prompt tokens computed a second; a step that prefills lasts that much longer."""
    prefill_chunk_tokens: int = 2_048
    """Most prompt tokens in one step (chunked prefill)."""
    kv_tokens: int = 262_144
    """Tokens that fit in the KV cache; must hold `max_model_len`."""
    max_model_len: int = 8_192
    """Most tokens of prompt and answer together."""
    seed: int = 0
    """Decides texts and lengths. Engines with one seed give one answer to one request."""
    mean_output_tokens: int = 128
    """Mean of the (exponential) answer length where the request does not fix it."""
    priority_mode: bool = False
    """True: lower `priority` first, then arrival. False: arrival only, `priority` is ignored."""
    max_num_queued_reqs: int | None = None
    """Requests that may wait; one more is refused. None: no limit."""
    metrics_delay: float = 0.0
    """Seconds by which the gauges of `/metrics` are old."""
    old_metric_names: bool = False
    """True: `gpu_cache_usage_perc` and `time_per_output_token_seconds`, as before vLLM 0.10."""
    engine_labels: int = 1
    """Number of `engine` labels over which `/metrics` divides the numbers."""
    request_id_headers: bool = False
    """True: answers carry `X-Request-Id`, the request's own or a new one."""
    force_include_usage: bool = False
    """True: every event of a stream carries usage, asked for or not."""
    cached_tokens: int | None = None
    """Usage says that so many tokens of each prompt, at most all, were cached, as that of a vLLM
    with `--enable-prompt-tokens-details`; no answer is faster for it. None: it does not say."""
    sse_keep_alive_s: float = 0.0
    """Seconds between comments while a stream waits for its first event; 0: none."""
    embeddings: bool = True
    """False: `/v1/embeddings` is 404, as on a server of a generating model."""
    instance: str = ""
    """Mixed into the ids of answers, so that engines with one seed have different ids."""

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "prefill_tokens_per_s", "prefill_chunk_tokens",
                    "max_model_len", "mean_output_tokens", "engine_labels")  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        for name in ("step_ms", "per_seq_us", "metrics_delay", "sse_keep_alive_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if (self.cached_tokens or 0) < 0:
            raise ValueError("cached_tokens must not be negative")
        if self.step_ms + self.per_seq_us <= 0:
            raise ValueError("a step must take time: step_ms and per_seq_us are both 0")
        if self.kv_tokens < self.max_model_len:
            raise ValueError("kv_tokens must hold max_model_len, or a long request never runs")
        if not self.models or not all(self.models):
            raise ValueError("model must name at least one model, and none without a name")

    @property
    def models(self) -> tuple[str, ...]:
        """The served names; the first is the canonical one."""
        return (self.model,) if isinstance(self.model, str) else self.model
