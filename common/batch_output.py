"""The lines of a batch's output and error files, as OpenAI's Batch API writes them. Pure.

A request that an engine answered has a `response`, whatever its status; one that was never
answered has an `error`. Which file a line belongs in is `answered`'s to say.
"""

import hashlib

import msgspec

EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
CANCELLED = ("batch_cancelled", "This request was not executed: the batch was cancelled.")
"""(code, message) of requests that a batch left undone."""
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")


def line_id(batch: str, number: int) -> str:
    """The id of a line of a batch's output: of its input's line number, so that a line written
    again is the same."""
    return "batch_req_" + hashlib.sha256(f"{batch}:{number}".encode()).hexdigest()[:32]


def answered(status: int) -> bool:
    """Whether a line of this status belongs in the output file; else in the error file."""
    return 200 <= status < 300


def response_line(id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """An engine's answer. A body that is no JSON is put in as a string."""
    return _line(
        id,
        custom_id,
        {"status_code": status, "request_id": request_id, "body": _embedded(body)},
        None,
    )


def error_line(id: str, custom_id: str, code: str, message: str) -> bytes:
    """A request without an answer."""
    return _line(id, custom_id, None, {"code": code, "message": message})


def _line(id: str, custom_id: str, response: object, error: object) -> bytes:
    line = {"id": id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _embedded(body: bytes) -> object:
    try:
        body.decode()
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body.decode(errors="replace")
    # Within JSON, line ends stand between tokens alone.
    return msgspec.Raw(body.translate(_LINE_ENDS_TO_SPACES))
