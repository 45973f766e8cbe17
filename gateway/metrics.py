"""Metrics of the gateway, on a registry passed in. Label sets are bounded: models that are known
(else `other`), the three classes, the closed set of outcomes, statuses; never a user or a path."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.metrics import SECONDS
from common.outcomes import Outcome

OTHER = "other"
_MODELS_MAX = 200
"""Most models with series of their own; the rest share one."""


class GatewayMetrics:
    """What one gateway process exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        by_class = ("model", "class")
        self._open = Gauge(
            "fairlane_gateway_open", "Requests waiting or being answered", by_class,
            registry=registry,
        )  # fmt: skip
        self._ended = Counter(
            "fairlane_gateway_requests", "Requests that were queued, by how they ended",
            (*by_class, "outcome"), registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "fairlane_gateway_refused", "Requests refused before they were queued", ("status",),
            registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "fairlane_gateway_first_byte_seconds", "From acceptance to the first bytes", by_class,
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._bodies = Gauge(
            "fairlane_gateway_bodies_bytes", "Bodies kept of jobs not started", registry=registry
        )
        self._followers = Gauge(
            "fairlane_gateway_followers", "Streams of durable jobs being followed",
            registry=registry,
        )  # fmt: skip
        self._jobs = Counter(
            "fairlane_gateway_jobs", "Durable jobs that were put on the queue", ("kind",),
            registry=registry,
        )  # fmt: skip
        self._webhooks = Counter(
            "fairlane_gateway_webhooks", "Webhooks that were sent, by what came of it",
            ("outcome",), registry=registry,
        )  # fmt: skip
        self._models: dict[str, str] = {}
        self._open_of: dict[tuple[str, str], Gauge] = {}
        self._ended_of: dict[tuple[str, str, Outcome], Counter] = {}
        self._first_of: dict[tuple[str, str], Histogram] = {}

    def opened(self, model: str, cls: str) -> None:
        """A request of a known model was accepted; `ended` follows."""
        self._gauge(model, cls).inc()

    def ended(self, model: str, cls: str, outcome: Outcome) -> None:
        """It ended."""
        self._gauge(model, cls).dec()
        key = (model, cls, outcome)
        child = self._ended_of.get(key)
        if child is None:
            child = self._ended.labels(self._label(model), cls, str(outcome))
            self._ended_of[key] = child
        child.inc()

    def first_byte(self, model: str, cls: str, seconds: float) -> None:
        """The first byte of its answer came."""
        child = self._first_of.get((model, cls))
        if child is None:
            child = self._first.labels(self._label(model), cls)
            self._first_of[(model, cls)] = child
        child.observe(seconds)

    def refused(self, status: int) -> None:
        """A request that was not queued."""
        self._refused.labels(str(status)).inc()

    def followers(self, number: Callable[[], float]) -> None:
        """Whom to ask, at each scrape, for the streams of durable jobs that are followed."""
        self._followers.set_function(number)

    def job(self, kind: str) -> None:
        """A durable job was put on the queue: a `job` or a `response`."""
        self._jobs.labels(kind).inc()

    def webhook(self, outcome: str) -> None:
        """One try of a webhook: `delivered`, `refused`, or `given_up`."""
        self._webhooks.labels(outcome).inc()

    def bodies(self, size: Callable[[], float]) -> None:
        """Whom to ask, at each scrape, for the bytes of bodies kept."""
        self._bodies.set_function(size)

    def _gauge(self, model: str, cls: str) -> Gauge:
        child = self._open_of.get((model, cls))
        if child is None:
            child = self._open.labels(self._label(model), cls)
            self._open_of[(model, cls)] = child
        return child

    def _label(self, model: str) -> str:
        if model not in self._models:
            self._models[model] = model if len(self._models) < _MODELS_MAX else OTHER
        return self._models[model]
