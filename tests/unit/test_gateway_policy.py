"""What the settings of a model say of a job: price, weight, waits and limits."""

from common.cost import pricing
from common.intake.policy import Policies
from common.jobs import Limits
from common.settings import ClassSettings, GatewaySettings, ModelSettings

GATEWAY = GatewaySettings(
    user_jobs_max=11, user_batch_jobs_max=22, user_bytes_max=2_000, key_bytes_max=3_000,
    model_jobs_max=44, model_bytes_max=5_000, wait_interactive_s=1, wait_standard_s=2,
    wait_batch_s=3,
)  # fmt: skip
MODELS = {
    "w": ModelSettings(interactive_weight=3, class_={"batch": ClassSettings(wait_s=0.5)}),
    "s": ModelSettings(
        class_policy="strict",
        fairness="time",
        class_={"standard": ClassSettings(jobs_max=7), "interactive": ClassSettings(wait_s=9)},
    ),
}
POLICIES = Policies(MODELS, GATEWAY)


def test_an_interactive_job_weighs_more_where_classes_are_weighted() -> None:
    assert [POLICIES.of("w").weight(2.0, c) for c in ("interactive", "standard", "batch")] == [
        6.0, 2.0, 2.0,
    ]  # fmt: skip
    assert [POLICIES.of("s").weight(2.0, c) for c in ("interactive", "standard", "batch")] == [
        2.0, 2.0, 2.0,
    ]  # fmt: skip
    assert POLICIES.of("unknown").weight(1.0, "interactive") == 4.0


def test_each_model_has_its_own_order_and_prices() -> None:
    assert [POLICIES.of(m).order for m in ("w", "s", "unknown")] == [
        "weighted", "strict", "weighted",
    ]  # fmt: skip
    assert POLICIES.of("s").pricing == pricing(MODELS["s"])
    assert POLICIES.of("unknown").pricing == pricing(ModelSettings())


def test_the_model_says_how_long_a_class_waits_else_the_gateway() -> None:
    assert POLICIES.of("w").wait_ms == {"interactive": 1_000, "standard": 2_000, "batch": 500}
    assert POLICIES.of("s").wait_ms == {"interactive": 9_000, "standard": 2_000, "batch": 3_000}


def test_limits() -> None:
    expected = Limits(
        user_jobs=11, user_bytes=2_000, key_jobs=99, key_bytes=3_000, model_jobs=44,
        model_bytes=5_000,
    )  # fmt: skip
    assert POLICIES.of("w").limits("standard", 99) == expected
    assert POLICIES.of("w").limits("batch", 99).user_jobs == 22
    assert POLICIES.of("s").limits("standard", 99).user_jobs == 7
    assert POLICIES.of("s").limits("batch", 99).user_jobs == 22
