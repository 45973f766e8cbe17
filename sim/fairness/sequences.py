"""What `sim.fairness.engine` has inside, and what it tells of it."""

from collections.abc import Sequence
from typing import Literal

import msgspec


class Happened(msgspec.Struct, frozen=True):
    """A sequence's first token, or its end."""

    at: float
    kind: Literal["first", "end"]
    id: int
    cached: int = 0
    """Of a first token: tokens of the prompt that were computed before."""


class Running:
    """A request inside the engine. Of one that decodes `kv` and `generated` are as at tick `since`;
    what it got from then on is told by the ticks that passed."""

    __slots__ = ("blocks", "cached", "chunk", "ends", "generated", "id", "key", "kv", "output",
                 "prompt", "since", "to_prefill")  # fmt: skip

    def __init__(
        self, number: int, prompt: int, output: int, priority: int, blocks: Sequence[int]
    ) -> None:
        self.blocks = blocks
        self.cached = 0
        self.id = number
        self.key = (priority, number)
        self.prompt = self.to_prefill = prompt
        self.output = output
        self.chunk = self.kv = self.generated = self.since = 0
        self.ends = -1
        """The tick at which its last token comes; -1: it does not decode."""
