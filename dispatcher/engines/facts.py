"""One reading of an engine's load, in the same words for every kind of engine."""

import msgspec


class TokenTimes(msgspec.Struct, frozen=True):
    """Times per output token since the engine's start: of two readings the difference of `seconds`
    over that of `count` is the mean between them. Both fall when the engine starts anew."""

    seconds: float
    """All of them together."""
    count: int
    """How many times that is; where an engine tells means of requests, how many of these."""


class EngineFacts(msgspec.Struct, frozen=True):
    """One reading of an engine's load; None where the page does not say."""

    waiting: int | None = None
    """Requests in the engine's own queue."""
    running: int | None = None
    """Requests that hold a slot."""
    kv: float | None = None
    """Share of the KV memory in use, 0 to 1; of several engine processes the fullest."""
    preemptions: int | None = None
    """Preemptions since the engine's start."""
    slots: int | None = None
    """Requests that it runs at once at most."""
    tpot: TokenTimes | None = None
    """Its time per output token; of some engines known only as each request ends."""
    generated: int | None = None
    """Tokens generated since the engine's start, or its steps where it counts tokens only as
    requests end: while one that runs gets any, this grows."""


NOTHING = EngineFacts()
"""What a page says that is none of this engine's."""
