"""Metrics of the dispatcher, on a registry passed in. Label sets are bounded: models and backends
as configured or announced, the three classes, the closed sets of outcomes and of reasons for which
nothing is sent; never a user."""

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.outcomes import Outcome
from common.wire import Usage

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class DispatcherMetrics:
    """What one dispatcher process exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        model, by_class = ("model",), ("model", "class")
        self._leader = Gauge("fairlane_leader", "1 while leading the model", model, registry=r)
        self._waiting = Gauge(
            "fairlane_queue_depth", "Jobs waiting, as the leader knows", by_class, registry=r
        )
        self._running = Gauge("fairlane_running", "Jobs run here", registry=r)
        self._refusals = Counter(
            "fairlane_admission_closed", "Rounds in which jobs wait and have no place, and why",
            ("model", "reason"), registry=r,
        )  # fmt: skip
        self._slots = Gauge(
            "fairlane_slots", "Slots of its engines, configured or learned; 0: unknown", model,
            registry=r,
        )  # fmt: skip
        self._reserved = Gauge(
            "fairlane_slots_reserved", "Kept for users with nothing in flight", model, registry=r
        )
        self._popped = Counter("fairlane_popped", "Jobs sent to engines", by_class, registry=r)
        self._requeued = Counter(
            "fairlane_requeued", "Runs given back to the queue", by_class, registry=r
        )
        self._ended = Counter(
            "fairlane_jobs", "Jobs ended, by outcome", (*by_class, "outcome"), registry=r
        )
        self._tokens = Counter("fairlane_tokens", "Tokens served", (*by_class, "kind"), registry=r)
        self._first_byte = Histogram(
            "fairlane_engine_first_byte_seconds", "From sending to the first byte", by_class,
            buckets=SECONDS, registry=r,
        )  # fmt: skip

        self._of_backends(r)

    def _of_backends(self, r: CollectorRegistry) -> None:
        backend = ("model", "backend")
        self._inflight = Gauge(
            "fairlane_backend_inflight", "Jobs in flight there", backend, registry=r
        )
        self._unstarted = Gauge(
            "fairlane_backend_unstarted", "Of these, without a first byte", backend, registry=r
        )
        self._foreign = Gauge(
            "fairlane_backend_foreign", "Waiting there, not ours", backend, registry=r
        )
        self._metrics_up = Gauge(
            "fairlane_backend_metrics_up", "1 while its metrics are fresh", backend, registry=r
        )
        self._tpot = Gauge(
            "fairlane_backend_tpot_seconds", "Mean gap between chunks there; absent: unknown",
            backend, registry=r,
        )  # fmt: skip
        self._backend_closed = Counter(
            "fairlane_backend_closed",
            "Looks, two a second, at which a class waits and has no place there, and why",
            (*backend, "class", "reason"), registry=r,
        )  # fmt: skip
        self._inflight_max = Gauge(
            "fairlane_backend_inflight_max",
            "Jobs in flight there up to which a class is sent, by its time per output token and by "
            "preemptions; absent: no limit",
            (*backend, "class"), registry=r,
        )  # fmt: skip

    def leads(self, model: str, leads: bool) -> None:
        """Whether this process may pop the model's jobs."""
        self._leader.labels(model).set(int(leads))

    def waiting(self, model: str, cls: str, jobs: int) -> None:
        """Jobs of a class that wait."""
        self._waiting.labels(model, cls).set(jobs)

    def running(self, jobs: int) -> None:
        """Jobs run by this process."""
        self._running.set(jobs)

    def backend(
        self, model: str, url: str, inflight: int, unstarted: int, foreign: int, fresh: bool
    ) -> None:
        """One backend as the leader counts it."""
        self._inflight.labels(model, url).set(inflight)
        self._unstarted.labels(model, url).set(unstarted)
        self._foreign.labels(model, url).set(foreign)
        self._metrics_up.labels(model, url).set(int(fresh))

    def tpot(self, model: str, url: str, seconds: float | None) -> None:
        """A backend's time per output token; None: not known."""
        _tell(self._tpot, (model, url), seconds)

    def inflight_max(self, model: str, url: str, cls: str, jobs: int | None) -> None:
        """The limit on jobs in flight at a backend for a class; None: there is none."""
        _tell(self._inflight_max, (model, url, cls), jobs)

    def backend_closed(self, model: str, url: str, cls: str, reason: str) -> None:
        """A class waits, and a backend has no place for it; `reason` is of a closed set."""
        self._backend_closed.labels(model, url, cls, reason).inc()

    def slots(self, model: str, slots: int, reserved: int) -> None:
        """Slots of the model's usable backends (0: unknown) and how many of them are kept."""
        self._slots.labels(model).set(slots)
        self._reserved.labels(model).set(reserved)

    def closed(self, model: str, reason: str) -> None:
        """A round in which jobs waited and had no place; `reason` is of a closed set."""
        self._refusals.labels(model, reason).inc()

    def popped(self, model: str, cls: str, jobs: int) -> None:
        """Jobs leased."""
        self._popped.labels(model, cls).inc(jobs)

    def requeued(self, model: str, cls: str) -> None:
        """A run given back."""
        self._requeued.labels(model, cls).inc()

    def first_byte(self, model: str, cls: str, seconds: float) -> None:
        """An engine's first byte."""
        self._first_byte.labels(model, cls).observe(seconds)

    def ended(self, model: str, cls: str, outcome: Outcome, usage: Usage, served: bool) -> None:
        """A job's end."""
        self._ended.labels(model, cls, str(outcome)).inc()
        if served:
            self._tokens.labels(model, cls, "input").inc(usage.input)
            self._tokens.labels(model, cls, "cached").inc(usage.cached)
            self._tokens.labels(model, cls, "output").inc(usage.output)


def _tell(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
    """Set a gauge; where nothing is known there is none."""
    if value is not None:
        gauge.labels(*labels).set(value)
        return
    with contextlib.suppress(KeyError):  # it was not known before either
        gauge.remove(*labels)
