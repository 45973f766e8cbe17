"""The gateway's metrics stay few, whatever they are asked to count."""

from prometheus_client import CollectorRegistry, generate_latest

from common.outcomes import Outcome
from gateway.metrics import OTHER, GatewayMetrics


def test_models_beyond_the_limit_share_one_label() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    sizes = []
    for n in range(1_000):
        metrics.opened(f"model-{n}", "standard")
        metrics.first_byte(f"model-{n}", "standard", 0.1)
        metrics.ended(f"model-{n}", "standard", Outcome.FINISHED)
        if n + 1 in (500, 1_000):
            sizes.append(len(generate_latest(registry)))
    models = {
        s.labels["model"] for f in registry.collect() for s in f.samples if "model" in s.labels
    }
    assert OTHER in models and len(models) == 201
    assert sizes[1] < 1.05 * sizes[0]
