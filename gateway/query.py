"""What is read of a request's query and headers. Pure."""

from collections.abc import Mapping
from typing import Literal
from urllib.parse import parse_qs

from common.intake.answers import bad_request
from gateway.client import Client


def query(client: Client) -> dict[str, str]:
    """The fields of the query, of one that is there twice the last. Raises Refusal (400)."""
    raw: bytes = client.scope["query_string"]
    try:
        return {k: v[-1] for k, v in parse_qs(raw.decode(), max_num_fields=16).items()}
    except ValueError:
        raise bad_request("The query is not one of UTF-8 with at most 16 fields.") from None


def limit(fields: Mapping[str, str], most: int, default: int) -> int:
    """`limit`, from 1 to `most`. Raises Refusal (400)."""
    text = fields.get("limit")
    if text is None:
        return default
    found = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    if not 1 <= found <= most:
        raise bad_request(f"`limit` must be from 1 to {most}.", "limit")
    return found


def order(fields: Mapping[str, str]) -> Literal["asc", "desc"]:
    """`order`: newest first unless it says otherwise. Raises Refusal (400)."""
    text = fields.get("order", "desc")
    if text not in ("asc", "desc"):
        raise bad_request("`order` must be 'asc' or 'desc'.", "order")
    return "asc" if text == "asc" else "desc"


def header(client: Client, name: bytes) -> bytes | None:
    """The first header of this name, which is in lower case; None where there is none."""
    return next((v for n, v in client.headers if n == name), None)
