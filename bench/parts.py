"""The parts of a run on this machine, in their order."""

from collections.abc import Callable, Coroutine
from typing import Any

from bench import flood, latency, memory, scrape, throughput, verbs
from bench.report import Part

PARTS: dict[str, Callable[..., Coroutine[Any, Any, Part]]] = {
    "latency": latency.measure,
    "short": throughput.measure_short,
    "streams": throughput.measure_streams,
    "memory": memory.measure,
    "flood": flood.measure,
    "verbs": verbs.measure,
    "scrape": scrape.measure,
}
"""Each takes `cores` and the keyword `quick`."""
