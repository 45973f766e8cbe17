"""What `common.client.Client` takes, gives and raises."""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.durable import TTL_S, Status
from common.errors import FairlaneError
from common.intake.answers import Answer


class RequestError(FairlaneError):
    """A request that cannot be queued as it is; `answer` says why as the HTTP API would."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.message)
        self.answer = answer


class QueueFullError(FairlaneError):
    """The user, or the model, has as many jobs waiting as may: submit it again later."""


class UnknownJobError(FairlaneError):
    """There is no job of this id, or its answer was kept its time."""


class JobFailedError(FairlaneError):
    """A job ended without an answer."""

    def __init__(self, status: Status) -> None:
        super().__init__(
            f"job {status.about.id} is {status.state}: {status.message or 'no answer'}"
        )
        self.status = status


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request to be queued."""

    body: Mapping[str, Any] | bytes
    """As the HTTP API takes it, with `model`."""
    path: str = "/v1/chat/completions"
    user: str | None = None
    """Who is charged; None: the client's."""
    sub: str = ""
    """Who of those that divide the user's share."""
    cls: str | None = None
    """`interactive`, `standard` or `batch`; None: the client's."""
    weight: float | None = None
    wait_s: float | None = None
    """Seconds that it may wait; None: `job_wait_s` of the gateways, whatever its class, a day where
    nothing else is set."""
    ttl_s: int = TTL_S
    """Its answer is kept so long."""
    metadata: Mapping[str, str] = {}
    idempotency_key: str = ""
    """The same key and user give the same job, whose answer is made once."""
    sink: str = ""
    """The list of ended jobs that tells of this one (`Client.ended`): letters, digits and `-`."""


class Piece(msgspec.Struct, frozen=True):
    """A part of an answer, as the engine sent it: whole events of a stream."""

    id: str
    """Its place, for `after`."""
    attempt: int
    """Another one than before: what broke off begins anew."""
    data: bytes
