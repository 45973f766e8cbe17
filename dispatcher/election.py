"""Who leads a model: which dispatcher asks when, and whether it may pop.

Redis decides (the verb `lead`); this state machine only says when to ask. Rendezvous hashing names
a preferred dispatcher for each model, so that the models spread over the dispatchers. It asks
often; the others wait until the lease has been over for a while, and hand it back once the
preferred one is there and steady.

Times are seconds on this process's own monotonic clock and are never compared with another's.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from common.jobs import Led

Action = Literal["take", "renew", "give"]

STAND_IN_S = 0.3
"""Dispatchers other than the preferred one wait so long after a lease has run out."""
ASK_S = 0.25
"""The preferred dispatcher asks this often while another leads or the leader is unknown."""
STEADY_S = 10.0
"""A preferred dispatcher seen for so long without a break is given the lead."""
RETRY_S = (0.1, 0.2, 0.4, 0.5)
"""Pauses after errors of the broker; the last repeats."""


def preferred(model: str, dispatchers: Iterable[str]) -> str:
    """The dispatcher with the highest hash for this model; "" of none.

    Rendezvous hashing (Thaler and Ravishankar, 1998): one that comes or goes moves only the models
    it leads.
    """
    return max(dispatchers, key=lambda name: (_weight(model, name), name), default="")


def _weight(model: str, dispatcher: str) -> bytes:
    return hashlib.sha256(f"{dispatcher}\0{model}".encode("utf-8", "surrogatepass")).digest()


class Election:
    """One dispatcher's part in the election for one model.

    `tick` names the next call of the verb `lead`; exactly one of `led` and `failed` must follow
    before it names another.
    """

    def __init__(self, me: str, model: str, *, lease_ms: int = 2_000, renew_ms: int = 500) -> None:
        self.me = me
        self.model = model
        self.lease_ms = lease_ms
        self.term = 0
        """The number under which it leads; meaningless while it does not."""
        self.leads = False
        """Whether it was the leader when Redis was last heard; `may_pop` is the right to act."""
        self.has_led = False
        """Whether it ever led: then a missing leader hash means that Redis lost something."""
        self._lease_s = lease_ms / 1000
        self._renew_s = renew_ms / 1000
        self._margin_s = self._lease_s / 10
        self._live: Mapping[str, float] = {}
        self._leaving = False
        self._pending: Action | None = None
        self._issued_at = -math.inf
        self._confirmed_at = -math.inf
        self._led_since = 0.0
        self._free_at: float | None = None
        self._next_try = 0.0
        self._errors = 0

    def see(self, live: Mapping[str, float]) -> None:
        """The other dispatchers that serve the model now, and since when each is seen unbroken."""
        self._live = live

    def leave(self) -> None:
        """Give up the lead at the next tick and never take it again."""
        self._leaving = True

    def preferred(self) -> str:
        """Who of those seen, itself included unless it leaves, should lead."""
        others = set(self._live) - {self.me}
        return preferred(self.model, others if self._leaving else {*others, self.me})

    def may_pop(self, now: float) -> bool:
        """Whether it leads beyond doubt.

        The lease in Redis began after the call was issued, so it outlasts issue + lease here; the
        margin leaves time for what is done with the answer.
        """
        return self.leads and now < self._confirmed_at + self._lease_s - self._margin_s

    def tick(self, now: float) -> Action | None:
        """The call to make now, if any."""
        if self._pending is not None or now < self._due(now):
            return None
        self._issued_at = now
        if not self.leads:
            self._pending = "take"
        elif self._leaving or self._heir_is_steady(now):
            self._pending = "give"
            # From here on the lease may be gone, whatever comes back.
            self._confirmed_at = -math.inf
        else:
            self._pending = "renew"
        return self._pending

    def wait(self, now: float) -> float:
        """Seconds until `tick` may have something to say; infinite while a call is under way."""
        if self._pending is not None:
            return math.inf
        return max(0.0, self._due(now) - now)

    def led(self, now: float, reply: Led) -> None:
        """The answer to the call under way."""
        action, self._pending = self._pending, None
        self._errors = 0
        if reply.word == "leader" and action in ("take", "renew"):
            if not self.leads:
                self._led_since = now
            self.leads = self.has_led = True
            self.term = reply.term
            self._confirmed_at = self._issued_at
            return
        self.leads = False
        self._confirmed_at = -math.inf
        if reply.word == "held":
            self._free_at = now + reply.left_ms / 1000
        elif reply.word == "given":
            # Its heir gets a whole lease's time before this one comes back to stand in.
            self._free_at = now + self._lease_s
        else:
            self._free_at = now
            self._issued_at = -math.inf

    def freed(self, now: float, giver: str) -> None:
        """The leader says that it gave up the lead: its lease need not run out first, and it is
        not the one to be preferred."""
        if not self.leads:
            self._live = {name: since for name, since in self._live.items() if name != giver}
            self._free_at = now
            self._issued_at = -math.inf

    def failed(self, now: float) -> None:
        """The call under way ended with an error: it may have been carried out or not."""
        self._pending = None
        self._next_try = now + RETRY_S[min(self._errors, len(RETRY_S) - 1)]
        self._errors += 1

    def _due(self, now: float) -> float:
        """When the next call is to be made."""
        if self._leaving and not self.leads:
            return math.inf
        if self._errors:
            return self._next_try
        if self.leads:
            gives = self._leaving or self._heir_is_steady(now)
            return now if gives else self._issued_at + self._renew_s
        if self.preferred() == self.me:
            return self._issued_at + ASK_S
        if self._free_at is None:
            self._free_at = now
        return self._free_at + STAND_IN_S

    def _heir_is_steady(self, now: float) -> bool:
        heir = self.preferred()
        if heir in ("", self.me):
            return False
        return max(self._live[heir], self._led_since) <= now - STEADY_S
