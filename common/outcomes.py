"""How a job ended: the closed set, and what each means to a client that has seen no byte yet."""

from enum import StrEnum


class Outcome(StrEnum):
    """One value for each way a job can end; metric label, log field and key of the status table.

    *Rejected* never entered the queue; *cancelled*, *deadline* and *gateway_dead* entered it and
    were left unserved or cut short by the asking side; the others reached an engine.
    """

    FINISHED = "finished"
    """The engine's whole answer was handed on."""
    REFUSED = "refused"
    """The engine itself answered with an error status before any event; passed on unchanged."""
    FAILED = "failed"
    """The engine failed after its first byte: what came was handed on, then one error event."""
    TIMEOUT = "timeout"
    """No first byte, or no further byte, within the time a backend is given."""
    TRIES = "tries"
    """Given up after connections to backends broke, or leases ran out, too often."""
    ORPHANED = "orphaned"
    """The dispatcher that ran it is gone, after its first byte."""
    CANCELLED = "cancelled"
    """Its client went away."""
    GATEWAY_DEAD = "gateway_dead"
    """The gateway replica that would hand on its answer is gone."""
    DEADLINE = "deadline"
    """It waited longer than its class may."""
    LOST = "lost"
    """A part of its answer was lost between dispatcher and gateway and cannot be sent again."""
    REJECTED_USER = "rejected_user"
    """Its user's own share of the queue is full."""
    REJECTED_MODEL = "rejected_model"
    """The model's queue is full."""
    REJECTED_UNAVAILABLE = "rejected_unavailable"
    """Redis, or every dispatcher of the model, is out of reach."""


HTTP_STATUS: dict[Outcome, int] = {
    Outcome.FINISHED: 200,
    Outcome.REFUSED: 502,
    Outcome.FAILED: 502,
    Outcome.TIMEOUT: 504,
    Outcome.TRIES: 502,
    Outcome.ORPHANED: 502,
    Outcome.CANCELLED: 499,
    Outcome.GATEWAY_DEAD: 503,
    Outcome.DEADLINE: 504,
    Outcome.LOST: 502,
    Outcome.REJECTED_USER: 429,
    Outcome.REJECTED_MODEL: 503,
    Outcome.REJECTED_UNAVAILABLE: 503,
}
"""Status answered where no header was sent yet (REFUSED: only if the engine's own is unusable)."""
