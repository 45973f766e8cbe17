"""The text of a `/v1/responses` request's input."""

from __future__ import annotations

from sim.fields import ApiError, Fields, invalid


def response_text(fields: Fields) -> str:
    """All text of `instructions` and `input`, a string or items with content. Raises ApiError."""
    value = fields.get("input")
    if value is None:
        raise invalid("missing", "input", "Field required", fields.body)
    if not isinstance(value, str | list):
        raise invalid("string_type", "input", "Input should be a valid string", value)
    texts = [fields.get("instructions")]
    texts += [value] if isinstance(value, str) else [t for item in value for t in _item(item)]
    return "".join(text for text in texts if isinstance(text, str))


def _item(item: object) -> list[object]:
    if not isinstance(item, dict):
        raise ApiError(400, "input must be a string, or a list of items")
    content = item.get("content")
    if isinstance(content, list):
        return [part.get("text") for part in content if isinstance(part, dict)]
    return [content, item.get("output")]
