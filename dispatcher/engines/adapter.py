"""What is known of a kind of engine, as data."""

from collections.abc import Callable

import msgspec

from dispatcher.engines.facts import EngineFacts

MESSAGE_MAX = 4_096
"""A phrase is searched in so many bytes from the start of an answer."""


class Refusal(msgspec.Struct, frozen=True):
    """An answer by which an engine says that it is busy, or leaves: the job goes elsewhere."""

    status: int | None = None
    """Of the response; None: any, and an event of a stream whose head was sent already."""
    phrases: tuple[bytes, ...] = ()
    """One of these is in it; none: whatever it says."""

    def fits(self, status: int | None, body: bytes) -> bool:
        """Whether an answer is one; `status` None: it is an event of a stream."""
        if self.status is not None and self.status != status:
            return False
        said = body[:MESSAGE_MAX]
        return not self.phrases or any(phrase in said for phrase in self.phrases)


BUSY = (Refusal(429), Refusal(503))
"""What any server may say."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of engine."""

    kind: str
    """Its name in the configuration (`BackendSettings.engine`)."""
    paths: tuple[str, ...]
    """Where its metrics page may be, the best first."""
    shown: Callable[[bytes], bool]
    """Whether a page is its own."""
    read: Callable[[bytes, str | None], EngineFacts]
    """The facts of a page; the series of this model count, where there are any. Never raises."""
    refusals: tuple[Refusal, ...] = ()
    """Beyond BUSY."""
