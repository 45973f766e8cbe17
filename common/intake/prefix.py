"""Hashes of how a prompt begins, by which a dispatcher sends it where that beginning is computed.

An engine keeps the KV cache of what it has computed, and takes from it the longest beginning that
a new prompt shares. Equal beginnings have equal hashes here: the hash at each boundary covers all
the bytes before it. What a chat template puts first comes first: tools, then messages. It is the
JSON that is hashed, as it came, not the text in it: a client writes the earlier turns of a
conversation again as it wrote them before, nothing has to be decoded, and no kind of content is a
special case. Pure.
"""

from collections.abc import Sequence
from hashlib import blake2b

from common.intake.body import Top, present
from common.wire import PREFIX_HASH_BYTES, PREFIX_HASHES_MAX

BLOCK = 1024
"""Bytes between boundaries at first. Two prompts that share less than a block, about 256 tokens,
are not worth sending to the same engine."""
FINE = 4
"""From so many blocks on, boundaries are this part of the way so far apart, not a block: what is
shared is known to a fifth, and 24 hashes reach 235 kB."""
_SEED = ("cache_salt", "chat_template", "chat_template_kwargs", "documents")
"""Fields with which the same messages are another prompt, or not shared at all."""


def boundaries(most: int = PREFIX_HASHES_MAX) -> tuple[int, ...]:
    """The first `most` byte counts at which a hash is taken."""
    found: list[int] = []
    blocks = 0
    for _ in range(most):
        blocks += max(1, blocks // FINE)
        found.append(blocks * BLOCK)
    return tuple(found)


_BOUNDARIES = boundaries()


def hashes(model: str, top: Top, names: Sequence[str]) -> bytes:
    """Of a prompt that these fields of a body make: a hash for each boundary it reaches, one after
    another; none where it is shorter than a block. `model`: its own name, not an alias."""
    parts = [raw for name in names if (raw := present(top, name)) is not None]
    size = sum(map(len, parts))
    if size < BLOCK:
        return b""
    state = blake2b(model.encode(), digest_size=PREFIX_HASH_BYTES)
    for name in _SEED:
        raw = present(top, name)
        state.update(b"\0" if raw is None else b"\0" + bytes(raw))
    text = b"".join(memoryview(raw)[: _BOUNDARIES[-1]] for raw in parts)
    found, at = [], 0
    for boundary in _BOUNDARIES:
        if boundary > len(text):
            break
        state.update(text[at:boundary])
        found.append(state.digest())
        at = boundary
    return b"".join(found)
