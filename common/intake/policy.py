"""What the settings of a model say of a job that is queued for it: price, weight, limits. Pure."""

from collections.abc import Mapping

import msgspec

from common.cost import Pricing, pricing
from common.jobs import Limits
from common.keys import CLASSES, Policy
from common.settings import GatewaySettings, ModelSettings


class ModelPolicy(msgspec.Struct, frozen=True):
    """One model's."""

    order: Policy
    """Its class policy, which the verbs of its queue go by."""
    pricing: Pricing
    interactive_weight: float
    """Factor of the weight of whoever sends an interactive job."""
    wait_ms: dict[str, int]
    """How long a job of each class may wait."""
    user_jobs: dict[str, int]
    """Most jobs of one user waiting in each class."""
    prefix_affinity: bool
    """Whether its prompts' beginnings are told to dispatchers, where it has several backends."""
    prefix_lookahead: bool
    """Whether they are where it has one."""
    settings: GatewaySettings

    def weight(self, weight: float, cls: str) -> float:
        """What divides the cost of a job in a class, of a user with this weight."""
        return weight * self.interactive_weight if cls == "interactive" else weight

    def limits(self, cls: str, key_jobs: int) -> Limits:
        """How much may wait; `key_jobs`: of all people of a key whose share is divided."""
        s = self.settings
        return Limits(
            user_jobs=self.user_jobs[cls],
            user_bytes=s.user_bytes_max,
            key_jobs=key_jobs,
            key_bytes=s.key_bytes_max,
            model_jobs=s.model_jobs_max,
            model_bytes=s.model_bytes_max,
        )


class Policies:
    """Of all models: of those in the configuration their own, of any other the default."""

    def __init__(self, models: Mapping[str, ModelSettings], gateway: GatewaySettings) -> None:
        self._gateway = gateway
        self._default = _policy(ModelSettings(), gateway)
        self.configure(models)

    def configure(self, models: Mapping[str, ModelSettings]) -> None:
        """Let these be the models of the configuration from now on, of an order as before."""
        self._of = {name: _policy(settings, self._gateway) for name, settings in models.items()}

    def of(self, model: str) -> ModelPolicy:
        """By the model's own name."""
        return self._of.get(model, self._default)


def _policy(model: ModelSettings, gateway: GatewaySettings) -> ModelPolicy:
    wait_s = {c: model.of_class(c).wait_s or gateway.wait_s(c) for c in CLASSES}
    return ModelPolicy(
        order=model.class_policy,
        pricing=pricing(model),
        interactive_weight=model.interactive_weight if model.class_policy == "weighted" else 1.0,
        wait_ms={c: max(1, int(s * 1000)) for c, s in wait_s.items()},
        user_jobs={c: model.of_class(c).jobs_max or gateway.jobs_max(c) for c in CLASSES},
        prefix_affinity=model.prefix_affinity,
        prefix_lookahead=model.prefix_lookahead > 0,
        settings=gateway,
    )
