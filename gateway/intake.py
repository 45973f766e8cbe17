"""What every request that becomes a job goes through: whose it is, its model, its class."""

import msgspec

from common.intake.answers import Refusal, unavailable
from common.intake.body import Fields
from common.intake.job import new_job
from common.intake.models import Models
from common.intake.policy import Policies
from common.intake.routes import Row
from common.jobs import Limits, NewJob
from common.wire import ServedModel
from gateway.auth import Keys, Principal, asker, choose_class, own_path
from gateway.background import demoted
from gateway.client import Client
from gateway.pages import find
from gateway.people import Who
from gateway.submit import Desk


class Accepted(msgspec.Struct, frozen=True):
    """A request that may be queued."""

    row: Row
    fields: Fields
    principal: Principal
    who: Who
    """Whom it is charged to."""
    model: ServedModel
    cls: str

    @property
    def stream(self) -> bool:
        """Whether its answer is an event stream."""
        return self.row.streams and self.fields.stream


class Intake:
    """Accepts requests of one gateway."""

    def __init__(self, keys: Keys, models: Models, policies: Policies, desk: Desk) -> None:
        self.keys = keys
        self._models = models
        self._policies = policies
        self._desk = desk

    def accept(
        self, row: Row, client: Client, fields: Fields, *, cls: bytes | None = None
    ) -> Accepted:
        """A request with these fields in its body. `cls`: the class asked for, over the header.
        Raises Refusal."""
        principal = self.keys.principal(client.authorization)
        model = find(self._models, principal, fields.model)
        if not self._models.accepts(model):
            raise Refusal(unavailable(self._desk.retry_after(model.name)))
        chosen = choose_class(principal, cls or client.cls, fields.service_tier)
        chosen = demoted(chosen, principal.background, client.headers, fields.top)
        who = asker(principal, client.headers, client.authorization, client.peer, fields.user)
        return Accepted(row, fields, principal, who, model, chosen)

    def job(
        self, a: Accepted, body: bytes, *, id: str = "", replica: str = "",
        wait_ms: int | None = None, keep_ms: int = 0, sink: str = "",
    ) -> NewJob:  # fmt: skip
        """Its job, as `new_job` makes it. Raises Refusal."""
        return new_job(
            a.row, a.fields, body, a.model, self._policies.of(a.model.name), user=a.who.user,
            sub=a.who.sub, weight=a.principal.weight, cls=a.cls, id=id, replica=replica,
            wait_ms=wait_ms, keep_ms=keep_ms, sink=sink,
        )  # fmt: skip

    def limits(self, a: Accepted) -> Limits:
        """How much of its kind may wait."""
        return self._policies.of(a.model.name).limits(a.cls, a.principal.key_jobs)

    def owner(self, client: Client, user: str | None = None) -> str:
        """Whose things a request is about that has no body to be queued: a path as the verbs know
        it. `user`: who it says it is for. Raises Refusal."""
        principal = self.keys.principal(client.authorization)
        return own_path(principal, client.headers, client.authorization, client.peer, user)
