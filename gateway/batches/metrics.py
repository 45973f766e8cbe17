"""Metrics of a batch worker, on a registry passed in. Label sets are closed; never a user."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 300.0)


class BatchMetrics:
    """What one worker process exports."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        self._active = Gauge("fairlane_batches_active", "Batches that are not over", registry=r)
        self._running = Gauge("fairlane_batches_running", "Batches in hand here", registry=r)
        self._ended = Counter(
            "fairlane_batches_ended", "Batches that ended here, by status", ("status",), registry=r
        )
        self._lines = Counter(
            "fairlane_batch_lines", "Lines of batches: put on the queue (again: not for the first "
            "time), with a result in the output or the error file, refused by the queue's limits",
            ("what",), registry=r,
        )  # fmt: skip
        self._turns = Histogram(
            "fairlane_batch_turn_seconds", "Turns of batches", buckets=_SECONDS, registry=r
        )
        self._failed = Counter(
            "fairlane_batch_turns_failed", "Turns that an error ended, by its kind", ("kind",),
            registry=r,
        )  # fmt: skip

    def active(self, n: int) -> None:
        """Batches that are not over."""
        self._active.set(n)

    def running(self, n: int) -> None:
        """Batches in hand."""
        self._running.set(n)

    def ended(self, status: str) -> None:
        """A batch is over."""
        self._ended.labels(status).inc()

    def lines(self, what: str, n: int) -> None:
        """`fed`, `again`, `full`, `output` or `error`."""
        if n:
            self._lines.labels(what).inc(n)

    def turn(self, seconds: float) -> None:
        """A turn is over."""
        self._turns.observe(seconds)

    def failed(self, kind: str) -> None:
        """An error ended a turn: `redis`, `store` or `lost`."""
        self._failed.labels(kind).inc()
