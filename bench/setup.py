"""How Fairlane is set up for a measurement."""

from collections.abc import Mapping

import msgspec


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How Fairlane is set up."""

    slots: int | None = None
    """Of each engine; None: it finds out."""
    reserved: int | None = None
    """Slots for users with nothing in flight; None: as it is by default."""
    weights: Mapping[int, float] = {}
    """Of users by their number, where it is not 1."""
    tpot_ms: float | None = None
    """Target of time per output token; None: there is none."""
    gateways: int = 1
    dispatchers: int = 1
