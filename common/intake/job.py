"""From a request's fields to the job that is queued for it. Pure."""

import os

from common.intake import body as bodies
from common.intake.policy import ModelPolicy
from common.intake.prefix import hashes
from common.intake.routes import Row, max_output
from common.jobs import NewJob
from common.wire import JobMeta, ServedModel, encode_meta


def job_id() -> str:
    """A new job's id: 128 random bits as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def new_job(
    row: Row,
    fields: bodies.Fields,
    body: bytes,
    model: ServedModel,
    policy: ModelPolicy,
    *,
    user: str,
    sub: str,
    weight: float,
    cls: str,
    id: str = "",
    replica: str = "",
    wait_ms: int | None = None,
    keep_ms: int = 0,
    sink: str = "",
) -> NewJob:
    """The job of a body that `bodies.read` read, for whom it is charged to, in a class.

    `weight`: the user's own, whatever the class. `replica`: the gateway that waits for its answer;
    without one the job is durable, and `keep_ms` and `sink` are as in NewJob. `wait_ms` None: as
    long as the model's settings say. Raises Refusal (400) for what the row cannot read.
    """
    stream = row.streams and fields.stream
    estimate = row.estimate(fields)
    most = max_output(row, fields, estimate.choices)
    follows = policy.prefix_affinity and (model.backends > 1 or policy.prefix_lookahead)
    meta = JobMeta(
        path=row.path, dialect=row.dialect, stream=stream, wants_usage=fields.include_usage,
        choices=estimate.choices, input=estimate.input, max_output=most,
        prefix=hashes(model.name, fields.top, row.prompt) if follows else b"",
        keep_ms=keep_ms, sink=sink,
    )  # fmt: skip
    return NewJob(
        id=id or job_id(),
        user=user,
        sub=sub,
        cls=cls,
        wait_ms=policy.wait_ms[cls] if wait_ms is None else wait_ms,
        terms=policy.pricing.terms(estimate.input, most),
        weight=policy.weight(weight, cls),
        replica=replica,
        meta=encode_meta(meta),
        body=bodies.edited(fields, body, model=model.name, wants_usage=stream and row.usage),
        keep_ms=keep_ms,
        sink=sink,
    )
