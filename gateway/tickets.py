"""One open job as its gateway holds it."""

from common import keys
from common.jobs import Limits, NewJob
from common.reply import Reply


class Ticket:
    """One job as its gateway holds it."""

    __slots__ = (
        "accepted", "arrival", "at", "closed", "cls", "deadline", "floor", "limits", "new",
        "reply", "resubmits", "user",
    )  # fmt: skip

    def __init__(self, new: NewJob, limits: Limits, reply: Reply, now: float) -> None:
        self.new: NewJob | None = new
        """Kept until the job's answer begins to be handed on."""
        self.limits = limits
        self.reply = reply
        self.cls = new.cls
        self.user = keys.path(new.user, new.sub)
        """As the verbs know it."""
        self.at = now
        """When it was accepted, on the loop's clock."""
        self.deadline = now + new.wait_ms / 1000
        self.arrival = 0
        self.floor = 0
        self.accepted = False
        self.resubmits = 0
        self.closed = False

    @property
    def job(self) -> str:
        """The job's id."""
        return self.reply.job

    @property
    def model(self) -> str:
        """The job's model."""
        return self.reply.model

    @property
    def heard(self) -> bool:
        """Whether a dispatcher was heard of it: then that one has it, not the queue."""
        return self.reply.dispatcher is not None
