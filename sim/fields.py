"""The fields of a request body, and refusals in the words of vLLM 0.32."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A request that is answered with an error; `body` is the JSON to send."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.content_type = "application/json"
        self.body = error_body(status, message, kind, param)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> bytes:
    """An error in vLLM's shape."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def overloaded() -> ApiError:
    """The refusal of a full waiting queue (`--max-num-queued-reqs`)."""
    message = (
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance."
    )
    return ApiError(503, message, "Service Unavailable")


class Fields:
    """Typed access to a body, with vLLM's messages for wrong types."""

    def __init__(self, body: dict[str, object]) -> None:
        self.body = body

    def get(self, name: str) -> object:
        """The value as it is; None when absent."""
        return self.body.get(name)

    def flag(self, name: str) -> bool:
        """A boolean; absent or null is False. Raises ApiError, as all below do."""
        value = self.body.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise invalid("bool_type", name, "Input should be a valid boolean", value)

    def mapping(self, name: str) -> dict[str, object]:
        """An object; absent or null is empty."""
        value = self.body.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", name, message, value)

    def integer(self, name: str) -> int | None:
        """An optional integer; whole floats, booleans and digits in a string pass, as in vLLM."""
        value = self.body.get(name)
        if value is None and (name != "priority" or name not in self.body):
            return None
        if isinstance(value, float) and not value.is_integer():
            text = "Input should be a valid integer, got a number with a fractional part"
            raise invalid("int_from_float", name, text, value)
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                text = "Input should be a valid integer, unable to parse string as an integer"
                raise invalid("int_parsing", name, text, value) from None
        if not isinstance(value, int | float):
            raise invalid("int_type", name, "Input should be a valid integer", value)
        return int(value)

    def number(self, name: str) -> float | None:
        """An optional number."""
        value = self.body.get(name)
        if isinstance(value, str):
            text = "Input should be a valid number, unable to parse string as a number"
            raise invalid("float_parsing", name, text, value)
        if value is not None and not isinstance(value, int | float):
            raise invalid("float_type", name, "Input should be a valid number", value)
        return None if value is None else float(value)


def invalid(kind: str, field: str | None, message: str, value: object, more: str = "") -> ApiError:
    """A body of the wrong shape, in the words of vLLM's validation handler."""
    place = f"body.{field}" if field else "body"
    shown = str(value)
    if isinstance(value, list | dict):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    error = f"{{'type': '{kind}', 'loc': '{place}', 'msg': '{message}', 'input': '{shown}'{more}}}"
    return ApiError(400, f"1 validation error:\n  {error}", "Bad Request", place)


def decode_object(body: bytes) -> dict[str, object]:
    """The body as a JSON object. Raises ApiError for anything else."""
    if not body:
        raise invalid("missing", None, "Field required", None)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        more = ", 'ctx': {'error': 'Expecting value'}"
        raise invalid("json_invalid", str(len(body)), "JSON decode error", {}, more) from None
    if isinstance(decoded, dict):
        return decoded
    message = "Input should be a valid dictionary or object to extract fields from"
    raise invalid("model_attributes_type", None, message, decoded)
