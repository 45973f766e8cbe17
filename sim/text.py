"""The answers of the simulated engine: deterministic gibberish that a test can compute itself.

One token is one word; every token but the first of an answer begins with a space, so a text of n
words is n tokens and a cut answer can be continued at the exact token.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

WORDS = (
    "the", "queue", "moves", "at", "dawn", "and", "every", "lane", "waits", "for", "its", "turn",
    "while", "quiet", "engines", "count", "tokens", "in", "rows", "of", "amber", "light", "a",
    "river", "carries", "small", "words", "past", "stone", "walls", "under", "seven", "bridges",
    "who", "asked", "first", "no", "one", "knows", "but", "order", "holds", "like", "winter", "ice",
    "café", "naïve", "東京", "queue.", "Then,", "it", "began", "again:", "slowly", "with", "care",
    "\"so\"", "said", "keeper", "🚦", "green", "means", "go;", "end.\n",
)  # fmt: skip
"""64 words without spaces: ASCII, a few multi-byte ones, and some that JSON must escape."""

FinishReason = Literal["stop", "length"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014): 64 well-mixed bits."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def text_base(seed: int, fingerprint: str) -> int:
    """The 64-bit start of an answer's random sequence."""
    digest = hashlib.sha256(f"{seed}:{fingerprint}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def token_text(base: int, index: int) -> str:
    """Token `index` of the answer that begins at `base`."""
    word = WORDS[_mix(base + index * _GOLDEN & _MASK) & 63]
    return word if index == 0 else " " + word


def expected_text(seed: int, request_fingerprint: str, n_tokens: int) -> list[str]:
    """The first `n_tokens` tokens of an answer; joined, they are its text."""
    base = text_base(seed, request_fingerprint)
    return [token_text(base, index) for index in range(n_tokens)]


def count_tokens(text: str) -> int:
    """Tokens in a text that the engine wrote (or a prefix of it cut between tokens)."""
    return text.count(" ") + 1 if text else 0


def drawn_length(seed: int, fingerprint: str, mean: int) -> int:
    """The answer's own length in tokens, at least 1: exponential with the given mean."""
    uniform = (_mix(text_base(seed, fingerprint) ^ _GOLDEN) >> 11) / (1 << 53)
    return max(1, round(-mean * math.log(1.0 - uniform)))


def plan_length(
    drawn: int, max_tokens: int, min_tokens: int = 0, ignore_eos: bool = False
) -> tuple[int, FinishReason]:
    """How many tokens a request gets, and why it ends there.

    `drawn` is where the model itself would stop; `ignore_eos` lets it never stop, `min_tokens`
    not before that many. `max_tokens` (at least 1) ends it in any case.
    """
    if ignore_eos:
        return max_tokens, "length"
    own = max(drawn, min_tokens, 1)
    return (own, "stop") if own < max_tokens else (max_tokens, "length")
