"""What an engine's JSON says of tokens and errors, whatever its exact shape.

Nothing here raises on what an engine sends: a body that cannot be read has no usage, and is an
error whose message is its text.
"""

from typing import Any

import msgspec

from common.wire import Usage

MESSAGE_CHARS_MAX = 4096
"""The most text of an unstructured error body that becomes a message."""

_COUNT_MAX = 2**53
"""Larger counts are no counts: they would not survive as doubles."""

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding may raise; nesting beyond the interpreter's limit is a RecursionError."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error in OpenAI's terms."""

    message: str
    type: str
    param: str | None
    code: str | int | None
    status: int | None
    """The HTTP status that `code` names, if it is one of 400..599, else the one known before."""
    body: bytes
    """The JSON envelope for a client that has seen no byte: the engine's own where it is one."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Tokens(msgspec.Struct):
    """A usage as chat and completions have it, or as responses do."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _WithUsage(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"null")


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tokens = msgspec.json.Decoder(_Tokens)
_with_usage = msgspec.json.Decoder(_WithUsage)


def decode_object(data: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """The top level of a JSON object, its values as they were; None where it is none."""
    try:
        return _object.decode(data)
    except MALFORMED:
        return None


def read_usage(body: bytes) -> Usage | None:
    """The usage of a whole answer: chat, completions, embeddings, responses."""
    try:
        return read_tokens(_with_usage.decode(body).usage)
    except MALFORMED:
        return None


def read_tokens(usage: msgspec.Raw) -> Usage | None:
    """A `usage` value's counts; None for null, `{}` and what holds no count."""
    try:
        tokens = _tokens.decode(usage)
    except MALFORMED:
        return None
    counts = tokens.prompt_tokens, tokens.completion_tokens
    details = tokens.prompt_tokens_details
    if counts == (None, None):
        counts, details = (tokens.input_tokens, tokens.output_tokens), tokens.input_tokens_details
    if counts == (None, None):
        return None
    read, written = counts[0] or 0, counts[1] or 0
    if not (0 <= read <= _COUNT_MAX and 0 <= written <= _COUNT_MAX):
        return None
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Usage(input=read, cached=max(0, min(cached, read)), output=written)


def make_error(
    message: str,
    *,
    type: str = "server_error",
    param: str | None = None,
    code: str | int | None = None,
    status: int | None = 502,
) -> ErrorInfo:
    """An error with an envelope of its own."""
    error = {"message": message, "type": type, "param": param, "code": code}
    body = msgspec.json.encode({"error": error})
    return ErrorInfo(message, type, param, code, status, body)


def read_error(body: bytes, status: int | None = None) -> ErrorInfo:
    """An engine's error, from an error body or from an event of a stream.

    `status` is the response's own, where it has one. `ErrorInfo.body` is `body` unchanged if it is
    OpenAI's envelope, or Anthropic's, and a new envelope for everything else: `{"error": "…"}`,
    `{"detail": …}`, an object without an envelope, an incomplete one, plain text, nothing.
    """
    try:
        top: Any = msgspec.json.decode(body)
    except MALFORMED:
        top = None
    fields = _error_fields(top)
    message = _message(fields) or _text(body)
    code = fields.get("code")
    if isinstance(code, bool) or not isinstance(code, str | int):
        code = None
    status = _status_of(code) or status
    kind = fields.get("type") or fields.get("error_type")
    if not isinstance(kind, str):
        client_fault = status is not None and status < 500
        kind = "invalid_request_error" if client_fault else "server_error"
    param = fields.get("param")
    if not isinstance(param, str):
        param = None
    if _is_envelope(top):
        return ErrorInfo(message, kind, param, code, status, body)
    return make_error(message, type=kind, param=param, code=code, status=status)


def _error_fields(top: object) -> dict[str, Any]:
    """The object that holds `message` and its like."""
    if not isinstance(top, dict):
        return {"message": top} if isinstance(top, str) else {}
    error = top.get("error")
    if isinstance(error, dict):
        return error
    return {**top, "message": error} if isinstance(error, str) else top


def _message(fields: dict[str, Any]) -> str:
    """The text of an error; of FastAPI's `detail`, the messages of its entries."""
    for key in ("message", "detail", "msg"):
        value = fields.get(key)
        if isinstance(value, list):
            entries = [entry.get("msg") for entry in value if isinstance(entry, dict)]
            value = "; ".join(entry for entry in entries if isinstance(entry, str))
        if isinstance(value, str) and value:
            return value
    return ""


def _text(body: bytes) -> str:
    text = body.decode("utf-8", "replace").strip()
    return text[:MESSAGE_CHARS_MAX] or "The engine answered with an error and no message."


def _status_of(code: str | int | None) -> int | None:
    if isinstance(code, str) and len(code) == 3 and code.isascii() and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else None


def _is_envelope(top: object) -> bool:
    error = top.get("error") if isinstance(top, dict) else None
    if not isinstance(top, dict) or not isinstance(error, dict):
        return False
    if not (isinstance(error.get("message"), str) and isinstance(error.get("type"), str)):
        return False
    openai = "param" in error and "code" in error
    return bool(error["message"]) and (openai or top.get("type") == "error")
