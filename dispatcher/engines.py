"""What an engine's metrics page says of its load, whatever the engine calls it.

Pages are in Prometheus' text format and mostly of no interest: vLLM's has some 50 KB, of which
four lines are read. So lines are found by name first, and only those are parsed. What a page does
not say, or says in a way that cannot be true, is unknown (None), never 0.
"""

import math
import re
from collections.abc import Callable, Mapping

import msgspec

VALUE_MAX = 2.0**53
"""A larger count is no count."""
KV_SLACK = 0.01
"""A share may exceed 1 by rounding; beyond this it is something else, such as a percentage."""

_QUOTED = rb'"((?:[^"\\]|\\.)*+)"'
_SAMPLE = re.compile(
    rb'(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*+")*+)\})?'  # labels: braces may stand in quoted values
    rb"[ \t]*([^ \t{}#]++)"  # the value
    rb"(?:[ \t]++-?[0-9.eE+]++)?[ \t]*+(?:#.*)?\r?\Z"  # perhaps a time and an exemplar
)
"""What follows the name in a sample's line. Possessive, so that no line takes long."""
_LABEL = re.compile(rb"([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+" + _QUOTED)
_ESCAPED = re.compile(rb"\\(.)")


class EngineFacts(msgspec.Struct, frozen=True):
    """One reading of an engine's load; None where the page does not say."""

    waiting: int | None = None
    """Requests in the engine's own queue."""
    running: int | None = None
    """Requests that hold a slot."""
    kv: float | None = None
    """Share of the KV memory in use, 0 to 1; of several engine processes the fullest."""
    preemptions: int | None = None
    """Preemptions since the engine's start."""


class Names:
    """What a kind of engine calls each fact: newest name first, the first usable one counts."""

    def __init__(
        self,
        *,
        waiting: tuple[str, ...],
        running: tuple[str, ...],
        kv: tuple[str, ...],
        preemptions: tuple[str, ...],
    ) -> None:
        self.waiting = waiting
        self.running = running
        self.kv = kv
        self.preemptions = preemptions
        every = "|".join(map(re.escape, (*waiting, *running, *kv, *preemptions)))
        self.lines = re.compile(rb"\n(%s)([{ \t][^\n]*)(?=\n)" % every.encode())
        """Finds the samples of these names and no longer ones, and nothing else is parsed."""


_VLLM = Names(
    waiting=("vllm:num_requests_waiting",),
    running=("vllm:num_requests_running",),
    kv=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    preemptions=("vllm:num_preemptions_total",),
)


def read_vllm(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a vLLM metrics page: see `read`."""
    return read(_VLLM, text, model)


Reader = Callable[[bytes, str | None], EngineFacts]

READERS: Mapping[str, Reader] = {"vllm": read_vllm}
"""How the page of each kind of engine (`BackendSettings.engine`) is read."""


def read(names: Names, text: bytes, model: str | None) -> EngineFacts:
    """The facts on a page. Counts are summed over all series (one for each engine process).

    Only series whose `model_name` is `model` count, unless there are none: an engine may label
    them with another of its names. A series that is no number, negative or infinite makes its fact
    unknown. As in the format, a last line without its end is no line. Never raises.
    """
    samples: dict[str, list[bytes]] = {}
    for name, rest in names.lines.findall(b"\n" + text):
        samples.setdefault(name.decode(), []).append(rest.lstrip())
    wanted = None if model is None else model.encode("utf-8", "surrogatepass")

    def values(candidates: tuple[str, ...]) -> list[float]:
        each = (_values(samples.get(name, []), wanted) for name in candidates)
        return next((v for v in each if v), [])

    fullest = max(values(names.kv), default=math.inf)
    return EngineFacts(
        waiting=_sum(values(names.waiting)),
        running=_sum(values(names.running)),
        kv=min(1.0, fullest) if fullest <= 1.0 + KV_SLACK else None,
        preemptions=_sum(values(names.preemptions)),
    )


def _sum(values: list[float]) -> int | None:
    # Rounded up: an aggregating proxy may show means, and 0.3 waiting is not none.
    return math.ceil(math.fsum(values)) if values else None


def _values(samples: list[bytes], wanted: bytes | None) -> list[float]:
    """The values of the series that count; empty where there are none or one is unusable."""
    every: list[float] = []
    own: list[float] = []
    for sample in samples:
        found = _SAMPLE.match(sample)
        value = _number(found[2]) if found else math.nan
        every.append(value)
        if found and wanted is not None and _model(found[1] or b"") == wanted:
            own.append(value)
    counted = own or every
    return [] if any(math.isnan(v) for v in counted) else counted


def _number(text: bytes) -> float:
    """The value, or NaN where it is no number from 0 to VALUE_MAX."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    # Python's float also takes underscores, which the format does not have.
    return value if 0 <= value <= VALUE_MAX and b"_" not in text else math.nan


def _model(labels: bytes) -> bytes | None:
    """The `model_name` of a label list, its escapes undone."""
    for name, value in _LABEL.findall(labels):
        if name == b"model_name":
            return _ESCAPED.sub(lambda m: b"\n" if m[1] == b"n" else m[1], value)
    return None
