"""The bodies of `/v1/jobs`: what is asked for, and how a job is shown. Pure."""

import hashlib
from typing import Annotated, Any

import msgspec

from common.durable import Result, Status
from common.intake.answers import Answer, Refusal, bad_request, ending
from common.intake.body import Top, read_top
from common.intake.routes import ROWS, Row
from common.job_settings import TTL_S_MAX, TTL_S_MIN
from common.keys import CLASSES
from common.outcomes import Outcome
from common.wire import Usage
from gateway.durables import NOWHERE, Standing
from gateway.webhook import UnsafeUrlError, check_url

METADATA_MAX, METADATA_KEY_MAX, METADATA_VALUE_MAX = 16, 64, 512
"""Pairs; characters."""
Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=METADATA_KEY_MAX)],
        Annotated[str, msgspec.Meta(max_length=METADATA_VALUE_MAX)],
    ],
    msgspec.Meta(max_length=METADATA_MAX),
]
METADATA_TEXT = (
    f"`metadata` must be an object of at most {METADATA_MAX} strings of at most "
    f"{METADATA_VALUE_MAX} characters, with names of at most {METADATA_KEY_MAX}."
)

NO_JOB = Answer(status=404, message="There is no such job.", param="id", code="job_not_found")
"""The same for one that never was and for another's."""
GONE = Answer(
    status=410, message="The answer of this job is not kept any more.", code="job_expired"
)
_ROWS = {row.path: row for row in ROWS}
_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's submitter wants."""

    row: Row
    body: bytes
    """Of the request to the path."""
    cls: bytes | None
    user: str | None
    metadata: dict[str, str]
    webhook: str
    ttl_s: int
    key: str | None

    def digest(self) -> str:
        """Of all that is asked for."""
        what = (self.row.path, self.cls, self.user, self.metadata, self.webhook, self.ttl_s)
        return hashlib.sha256(msgspec.json.encode(what) + self.body).hexdigest()


_TYPES: dict[str, tuple[Any, str]] = {
    "path": (str, "a string"),
    "class": (str, "a string"),
    "user": (Annotated[str, msgspec.Meta(min_length=1)], "a string that is not empty"),
    "webhook": (str, "a string"),
    "ttl": (
        Annotated[int, msgspec.Meta(ge=TTL_S_MIN, le=TTL_S_MAX)],
        f"seconds, from {TTL_S_MIN} to {TTL_S_MAX}",
    ),
    "idempotency_key": (str, "a string"),
}
_DECODERS = {name: msgspec.json.Decoder(kind) for name, (kind, _) in _TYPES.items()}
_METADATA = msgspec.json.Decoder(Metadata)


def read(body: bytes, ttl_s: int, *, private: bool) -> Asked:
    """What a body asks for. `ttl_s`: where it does not say; `private`: as in `check_url`. Raises
    Refusal (400)."""
    top = {n: raw for n, raw in read_top(body).items() if bytes(memoryview(raw)[:5]) != b"null"}
    for name in top:
        if name not in _TYPES and name not in ("body", "metadata"):
            raise bad_request(f"A job has no field `{name[:64]}`.", name[:64])
    found = {name: _decoded(top, name) for name in _TYPES if name in top}
    row = _ROWS.get(found.get("path", ""))
    if row is None:
        raise bad_request(f"`path` must be one of {', '.join(_ROWS)}.", "path")
    if bytes(memoryview(top.get("body", b""))[:1]) != b"{":
        raise bad_request("`body` is required: the JSON object to be sent to `path`.", "body")
    cls = found.get("class")
    if cls is not None and cls not in CLASSES:
        raise bad_request(f"`class` must be one of {', '.join(CLASSES)}.", "class")
    webhook = found.get("webhook", "")
    if "webhook" in found:
        checked_webhook(webhook, private)
    return Asked(
        row=row,
        body=bytes(top["body"]),
        cls=cls.encode() if cls else None,
        user=found.get("user"),
        metadata=_metadata(top),
        webhook=webhook,
        ttl_s=found.get("ttl", ttl_s),
        key=found.get("idempotency_key"),
    )


def checked_webhook(url: str, private: bool) -> None:
    """Raises Refusal (400) for a URL to which no webhook may go."""
    try:
        check_url(url, private)
    except UnsafeUrlError as e:
        raise bad_request(str(e), "webhook", "invalid_webhook") from None


def _decoded(top: Top, name: str) -> Any:
    try:
        return _DECODERS[name].decode(top[name])
    except _ERRORS:
        raise bad_request(f"`{name}` must be {_TYPES[name][1]}.", name) from None


def _metadata(top: Top) -> dict[str, str]:
    if "metadata" not in top:
        return {}
    try:
        return _METADATA.decode(top["metadata"])
    except _ERRORS:
        raise bad_request(METADATA_TEXT, "metadata") from None


def shown(
    status: Status, standing: Standing = NOWHERE, result: Result | None = None
) -> dict[str, object]:
    """A job as the API shows it; times in seconds since the epoch, `eta` in seconds."""
    about = status.about
    ended = _seconds(status.ended_ms)
    return {
        "id": about.id,
        "object": "job",
        "state": status.state,
        "path": about.path,
        "model": about.model,
        "class": about.cls,
        "stream": about.stream,
        "position": standing.place if status.state == "queued" else None,
        "eta": None if standing.eta_s is None else round(standing.eta_s, 1),
        "created_at": about.created_ms // 1000,
        "started_at": _seconds(status.started_ms),
        "ended_at": ended,
        "expires_at": None if ended is None else ended + about.ttl_s,
        "tries": status.tries,
        "usage": usage(status.usage),
        "metadata": about.metadata,
        "webhook": about.webhook or None,
        "status_code": result.status or None if result else None,
        "result": _result(status, result),
        "error": error(status, result),
    }


def usage(found: Usage | None) -> dict[str, int] | None:
    """Tokens as the engine counted them."""
    if found is None:
        return None
    return {
        "input_tokens": found.input,
        "cached_tokens": found.cached,
        "output_tokens": found.output,
        "total_tokens": found.input + found.output,
    }


def error(status: Status, result: Result | None = None) -> object:
    """Why a job failed: an error object of OpenAI's shape, of one that the engine refused its own.
    None while it has not ended, or has well."""
    if not status.over or status.state == "completed":
        return None
    own = engine_error(result.body) if result and status.outcome is Outcome.REFUSED else None
    return own or error_of(status.outcome, status.message)


def error_of(outcome: Outcome | None, message: str) -> object:
    """An outcome as an error object."""
    if outcome is None:
        return msgspec.json.decode(GONE.body())["error"]
    return msgspec.json.decode(ending(outcome, message).body())["error"]


def engine_error(body: bytes) -> object:
    """The error object in a body of an engine's, None where there is none."""
    try:
        found = msgspec.json.decode(body)
    except _ERRORS:
        return None
    return found.get("error") if isinstance(found, dict) else None


def _result(status: Status, result: Result | None) -> msgspec.Raw | None:
    """The body of a job that is no stream, where it ended well and is JSON."""
    if result is None or result.stream or status.state != "completed":
        return None
    try:
        result.body.decode()  # which decoding as raw JSON does not look at
        msgspec.json.decode(result.body, type=msgspec.Raw)
    except _ERRORS:
        return None
    return msgspec.Raw(result.body)


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000


def refusal_of(status: Status) -> Refusal | None:
    """410 for a job of which nothing is left but its description."""
    return Refusal(GONE) if status.state == "unknown" else None
