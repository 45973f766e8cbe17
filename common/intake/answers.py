"""Errors as OpenAI's API shapes them: as an HTTP answer, or as the event that ends a stream.

What each failure is called stands in two tables here and nowhere else. No text here holds a
prompt, a secret, a path or the name of a part.
"""

import math
from collections.abc import Sequence

import msgspec

from common.outcomes import HTTP_STATUS, Outcome

RETRY_S_MIN, RETRY_S_MAX = 1, 60
"""Bounds of Retry-After: clients ignore longer ones."""
_NAMES_MAX = 50
"""Most model names listed in one message."""
_NAME_CHARS_MAX = 100

Headers = list[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One error, before it is known whether a status can still carry it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def head(self, length: int) -> Headers:
        """Its headers, for a body of `length` bytes."""
        head = [JSON_TYPE, (b"content-length", b"%d" % length), *self.headers]
        if self.retry_after_s is not None:
            head.append((b"retry-after", b"%d" % self.retry_after_s))
        return head


class Refusal(Exception):
    """A request that goes no further; `answer` is what its client gets."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """400, with the field to blame where there is one."""
    return Refusal(Answer(status=400, message=message, param=param, code=code))


UNAUTHORIZED = Answer(
    status=401,
    message="Incorrect API key provided.",
    code="invalid_api_key",
    headers=((b"www-authenticate", b"Bearer"),),
)
"""The same for every wrong, missing or malformed key."""

NO_ROUTE = Answer(status=404, message="There is nothing at this path.", code="not_found")
INTERNAL = Answer(status=500, message="An internal error occurred.", type="server_error")
COMPRESSED = Answer(
    status=415,
    message="Compressed request bodies are not supported.",
    code="unsupported_content_encoding",
)

TOO_SLOW = Answer(
    status=408, message="The request body did not arrive in time.", code="request_timeout"
)


def too_large(limit: int) -> Answer:
    """413, naming the limit in bytes."""
    return Answer(
        status=413,
        message=f"The request body is larger than {limit} bytes.",
        code="request_too_large",
    )


def wrong_method(allowed: Sequence[str]) -> Answer:
    """405 with the methods that there are."""
    return Answer(
        status=405,
        message=f"This path answers to {', '.join(allowed)} only.",
        code="method_not_allowed",
        headers=((b"allow", ", ".join(allowed).encode()),),
    )


def unknown_model(name: str, usable: Sequence[str]) -> Answer:
    """404; `usable` is what the key may use."""
    shown = ", ".join(f"`{n}`" for n in usable[:_NAMES_MAX])
    if len(usable) > _NAMES_MAX:
        shown += ", …"
    known = f"Available: {shown}." if usable else "No model is available."
    if len(name) > _NAME_CHARS_MAX:
        name = name[:_NAME_CHARS_MAX] + "…"
    return Answer(
        status=404,
        message=f"The model `{name}` does not exist or you may not use it. {known}",
        param="model",
        code="model_not_found",
    )


def unavailable(retry_after_s: int, message: str = "", close: bool = False) -> Answer:
    """503: we have no capacity, whoever asks. `close` ends the connection too."""
    return Answer(
        status=503,
        message=message or "The service is not available just now. Try again later.",
        type="server_error",
        code="service_unavailable",
        retry_after_s=retry_after_s,
        headers=((b"connection", b"close"),) if close else (),
    )


_ENDINGS: dict[Outcome, tuple[str, str]] = {
    Outcome.FINISHED: ("no_answer", "The engine ended without an answer."),
    Outcome.REFUSED: ("engine_error", "The engine refused the request."),
    Outcome.FAILED: ("engine_error", "The engine failed."),
    Outcome.TIMEOUT: ("engine_timeout", "The engine did not answer in time."),
    Outcome.TRIES: ("engine_unreachable", "The engines could not be reached."),
    Outcome.ORPHANED: ("answer_interrupted", "The connection to the engine was lost."),
    Outcome.CANCELLED: ("cancelled", "The request was cancelled."),
    Outcome.GATEWAY_DEAD: ("service_unavailable", "The service was interrupted."),
    Outcome.DEADLINE: ("queue_timeout", "The request waited too long in the queue."),
    Outcome.LOST: ("answer_interrupted", "A part of the answer was lost."),
    Outcome.REJECTED_USER: ("queue_full", "Too many of your requests are waiting."),
    Outcome.REJECTED_MODEL: ("service_unavailable", "Too many requests are waiting."),
    Outcome.REJECTED_UNAVAILABLE: ("service_unavailable", "The service is not available."),
}
"""Outcome -> (code, message used where the end frame brings none)."""


def ending(outcome: Outcome, message: str = "", retry_after_s: int = RETRY_S_MIN) -> Answer:
    """How a job's end is told to a client that has not got its whole answer."""
    code, text = _ENDINGS[outcome]
    status = HTTP_STATUS[outcome]
    status = 502 if status == 200 else status
    retried = status in (429, 503, 504)
    return Answer(
        status=status,
        message=message or text,
        type="rate_limit_error" if status == 429 else "server_error",
        code=code,
        retry_after_s=retry_after_s if retried else None,
    )


def retry_after(waiting: int, drain: float) -> int:
    """Seconds until about `waiting` jobs are through at `drain` jobs a second, 1 to 60; an
    unknown rate counts as one a second."""
    return whole_retry_s(waiting / drain if drain > 0 else float(waiting))


def whole_retry_s(seconds: float) -> int:
    """Seconds as Retry-After tells them: whole, 1 to 60."""
    return max(RETRY_S_MIN, min(RETRY_S_MAX, math.ceil(min(seconds, RETRY_S_MAX))))


DONE = b"data: [DONE]\n\n"
"""What ends every stream of chat and text completions."""
_RESPONSE_ENDS = tuple(
    b'"type":"response.%s"}\n\n' % how for how in (b"completed", b"incomplete", b"failed")
)
_ENDS = {"responses": _RESPONSE_ENDS}
TAIL_BYTES = max(map(len, _RESPONSE_ENDS))
"""So many of a stream's last bytes are enough for `ended`."""


def ended(tail: bytes, dialect: str) -> bool:
    """Whether the last bytes of a stream are those that end every one of its dialect."""
    return tail.endswith(_ENDS.get(dialect, DONE))


def error_event(body: bytes, dialect: str = "chat") -> bytes:
    """The bytes that end a begun stream: an error, then the dialect's end.

    `body` is a JSON error body; its line ends, which stand between tokens only, become spaces.
    """
    if dialect == "responses":
        return _failed_response(body)
    return b"data: " + body.translate(_LINE_ENDS_TO_SPACES) + b"\n\n" + DONE


def _failed_response(body: bytes) -> bytes:
    """`response.failed`, of a response of which only this is known."""
    try:
        error = msgspec.json.decode(body)["error"]
        code = response_code(error["code"] or error["type"])
        shown = {"code": code, "message": str(error["message"])}
    except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError, RecursionError):
        shown = {"code": "server_error", "message": "The engine failed."}
    response = {
        "id": "", "object": "response", "created_at": 0, "status": "failed", "error": shown,
        "incomplete_details": None, "model": "", "output": [], "usage": None,
    }  # fmt: skip
    data = {"response": response, "sequence_number": 0, "type": "response.failed"}
    return b"event: response.failed\ndata: " + msgspec.json.encode(data) + b"\n\n"


def response_code(code: object) -> str:
    """The code of a response's error: engines give a status, OpenAI has words for them."""
    text = str(code or "server_error")
    if not text.isdecimal():
        return text
    if text == "429":
        return "rate_limit_exceeded"
    return "invalid_prompt" if text.startswith("4") else "server_error"


_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")
