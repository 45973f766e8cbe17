"""Which other dispatchers serve which models, by what they announce. Pure; times are seconds of one
clock."""

from collections.abc import Collection, Iterable, Mapping

KNOWN_S = 3.0
"""A model announced for so long was there before us: its missing leader hash means a loss."""


class Others:
    """The others as one dispatcher sees them."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._seen: dict[str, float] = {}
        """Model -> since when it has been announced."""
        self._live: dict[str, Mapping[str, float]] = {}

    def note(
        self, now: float, serving: Mapping[str, Collection[str]], models: Iterable[str]
    ) -> None:
        """What is announced now: model -> dispatchers; `models`: those that are served here."""
        for model in serving:
            self._seen.setdefault(model, now)
        for model in models:
            before, live = self.of(model), serving.get(model, ())
            self._live[model] = {d: before.get(d, now) for d in live if d != self._me}

    def of(self, model: str) -> Mapping[str, float]:
        """The others that serve a model -> since when without a break."""
        return self._live.get(model, {})

    def known(self, now: float, model: str) -> bool:
        """Whether it has been announced for KNOWN_S."""
        since = self._seen.get(model)
        return since is not None and now - since > KNOWN_S

    def forget(self, model: str) -> None:
        """It is served here no more."""
        self._live.pop(model, None)
        self._seen.pop(model, None)
