"""How prompts begin: what engines keep of them, and what they look like to the product.

Prompts are told by blocks of BLOCK_TOKENS tokens. Two with equal blocks, from the first on, begin
alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from common.intake.prefix import hashes
from dispatcher.prefix import split
from sim.fairness.traces import BLOCK_TOKENS

_BLOCK_BYTES = 4 * BLOCK_TOKENS
"""As English text has them."""


class BlockCache:
    """The KV cache of one engine: blocks, those used longest ago forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()

    def take(self, blocks: Sequence[int]) -> int:
        """How many tokens of a prompt it has, from the first on; then it has them all."""
        found = sum(1 for _ in takewhile(self._kept.__contains__, blocks))
        for block in reversed(blocks[: self._most]):  # a prompt loses its end first
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return found * BLOCK_TOKENS


def beginning(blocks: Sequence[int]) -> list[bytes]:
    """The hashes that the gateway takes of a prompt with these blocks."""
    text = b"".join(b"%016x" % block * (_BLOCK_BYTES // 16) for block in blocks)
    return split(hashes("m", {"prompt": msgspec.Raw(text)}, ("prompt",)))
