"""Metrics of the dispatcher, on a registry passed in. Label sets are bounded: models and backends
as configured or announced, the three classes, the closed sets of outcomes and of reasons for which
nothing is sent; never a user."""

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.keys import CLASSES
from common.outcomes import Outcome
from common.wire import Usage

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

BACKEND_STATES = ("closed", "open", "half_open")


class DispatcherMetrics:
    """What one dispatcher process exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        model, by_class = ("model",), ("model", "class")
        self._demand(r)
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
        self._yielded = Counter("fairlane_yielded", "Of these, for others", model, registry=r)
        self._ended = Counter(
            "fairlane_jobs", "Jobs ended, by outcome", (*by_class, "outcome"), registry=r
        )
        self._tokens = Counter("fairlane_tokens", "Tokens served", (*by_class, "kind"), registry=r)
        self._first_byte = Histogram(
            "fairlane_engine_first_byte_seconds", "From sending to the first byte", by_class,
            buckets=SECONDS, registry=r,
        )  # fmt: skip

        self._of_backends(r)
        self._of_health(r)

    def _of_backends(self, r: CollectorRegistry) -> None:
        """What the leader counts at each of them."""
        backend = ("model", "backend")
        self._inflight = Gauge(
            "fairlane_backend_inflight", "Jobs in flight there", backend, registry=r
        )
        self._unstarted = Gauge(
            "fairlane_backend_unstarted", "Of these, without a first byte", backend, registry=r
        )
        self._foreign = Gauge(
            "fairlane_backend_foreign", "Waiting there, not ours; absent: unknown", backend,
            registry=r,
        )  # fmt: skip
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
        self._told: dict[tuple[str, str], set[tuple[str, str]]] = {}
        """Of each backend, the classes and reasons that were counted."""
        self._inflight_max = Gauge(
            "fairlane_backend_inflight_max",
            "Jobs in flight there up to which a class is sent, by its time per output token and by "
            "preemptions; absent: no limit",
            (*backend, "class"), registry=r,
        )  # fmt: skip

    def _of_health(self, r: CollectorRegistry) -> None:
        """What tells of backends that fail, and of the runs that it costs."""
        self._retried = Counter(
            "fairlane_retries", "Runs given back, and why: refused, broken, silent, stopping",
            ("model", "reason"), registry=r,
        )  # fmt: skip
        self._state = Gauge(
            "fairlane_backend_state", "1 for the state of its circuit breaker, 0 for the others",
            ("model", "backend", "state"), registry=r,
        )  # fmt: skip

    def _demand(self, r: CollectorRegistry) -> None:
        """Gauges of what is asked for, and of whether it can be had."""
        self._leader = Gauge("fairlane_leader", "1 while leading the model", ("model",), registry=r)
        self._waiting = Gauge(
            "fairlane_queue_depth", "Jobs waiting, as the leader knows", ("model", "class"),
            registry=r,
        )  # fmt: skip
        self._wanted = Gauge(
            "fairlane_wanted_slots", "Jobs that wait or run, as far as their classes' limits let "
            "them run at once, as the leader knows", ("model",), registry=r,
        )  # fmt: skip
        self._sources = Gauge(
            "fairlane_source_good", "1 while what this source of backends says can be used",
            ("source",), registry=r,
        )  # fmt: skip

    def leads(self, model: str, leads: bool) -> None:
        """Whether this process may pop the model's jobs; else it tells nothing of its queue."""
        self._leader.labels(model).set(int(leads))
        if not leads:
            told = [(self._waiting, (model, c)) for c in CLASSES] + [(self._wanted, (model,))]
            for gauge, labels in told:
                with contextlib.suppress(KeyError):  # nothing was told before either
                    gauge.remove(*labels)

    def wanted(self, model: str, slots: int) -> None:
        """How many slots the model's jobs would take at once."""
        self._wanted.labels(model).set(slots)

    def waiting(self, model: str, cls: str, jobs: int) -> None:
        """Jobs of a class that wait."""
        self._waiting.labels(model, cls).set(jobs)

    def running(self, jobs: int) -> None:
        """Jobs run by this process."""
        self._running.set(jobs)

    def backend(
        self, model: str, url: str, inflight: int, unstarted: int, foreign: int | None, fresh: bool
    ) -> None:
        """One backend as the leader counts it; `foreign` None: not known."""
        self._inflight.labels(model, url).set(inflight)
        self._unstarted.labels(model, url).set(unstarted)
        _tell(self._foreign, (model, url), foreign)
        self._metrics_up.labels(model, url).set(int(fresh))

    def forget_backend(self, model: str, url: str) -> None:
        """It is gone."""
        gauges = (self._inflight, self._unstarted, self._foreign, self._metrics_up, self._tpot)
        for gauge in gauges:
            with contextlib.suppress(KeyError):  # it was never measured
                gauge.remove(model, url)
        more = [(self._state, (state,)) for state in BACKEND_STATES]
        more += [(self._inflight_max, (c,)) for c in CLASSES]
        for gauge, labels in more:
            with contextlib.suppress(KeyError):
                gauge.remove(model, url, *labels)
        for cls, reason in self._told.pop((model, url), set()):
            self._backend_closed.remove(model, url, cls, reason)

    def forget_model(self, model: str) -> None:
        """It is forgotten, and its backends before it."""
        for metric in vars(self).values():
            if isinstance(metric, Gauge | Counter | Histogram) and "model" in metric._labelnames:
                metric.remove_by_labels({"model": model})

    def source(self, source: str, good: bool) -> None:
        """Whether what a source of backends said last could be used."""
        self._sources.labels(source).set(int(good))

    def tpot(self, model: str, url: str, seconds: float | None) -> None:
        """A backend's time per output token; None: not known."""
        _tell(self._tpot, (model, url), seconds)

    def inflight_max(self, model: str, url: str, cls: str, jobs: int | None) -> None:
        """The limit on jobs in flight at a backend for a class; None: there is none."""
        _tell(self._inflight_max, (model, url, cls), jobs)

    def backend_closed(self, model: str, url: str, cls: str, reason: str) -> None:
        """A class waits, and a backend has no place for it; `reason` is of a closed set."""
        self._backend_closed.labels(model, url, cls, reason).inc()
        self._told.setdefault((model, url), set()).add((cls, reason))

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

    def retried(self, model: str, reason: str) -> None:
        """A run is given back because of its backend; `reason` is of a closed set."""
        self._retried.labels(model, reason).inc()

    def backend_state(self, model: str, url: str, state: str) -> None:
        """The state of a backend's breaker, one of BACKEND_STATES."""
        for each in BACKEND_STATES:
            self._state.labels(model, url, each).set(int(each == state))

    def yielded(self, model: str) -> None:
        """A batch job taken out of its engine for another."""
        self._yielded.labels(model).inc()

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
