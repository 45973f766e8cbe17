"""What is read of a request body, and the few edits that may be made to it. Pure.

Only the top level is decoded, its values kept as the bytes they came in, so numbers and nested
text are passed on as they were. Each step is linear in the body's length, and what is built per
value is bounded, however the body is made.
"""

import codecs
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from common.intake.answers import Refusal, bad_request

NESTING_MAX = 128
"""Deepest arrays and objects inside each other."""
VALUES_MAX = 200_000
"""Most strings, most arrays and objects, and most members of objects, each counted alone: what is
built for each costs many times its bytes in memory."""
_SMALL_BYTES = 256 << 10
"""A body below this cannot hold enough values to be worth counting."""
_UTF8_BYTES = 64 << 10
"""Text is checked in pieces of this size, for decoded it takes up to four times its bytes."""
CHOICES_MAX = 128
_INT_MAX = 2**31 - 1

Top = dict[str, msgspec.Raw]
"""The top level of a body: names to values as they came."""

_MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of every body; a null counts as absent."""

    top: Top
    model: str
    stream: bool
    include_usage: bool
    user: str | None
    max_output: int | None
    """max_completion_tokens, else max_tokens."""
    n: int
    service_tier: str | None


class _Rule(msgspec.Struct, frozen=True):
    """How one field is read, and what it is called where it is of another type."""

    decoder: msgspec.json.Decoder[Any]
    kind: str


_top = msgspec.json.Decoder(Top)
_STRING_RULE = _Rule(msgspec.json.Decoder(str), "a string")
_FLAG_RULE = _Rule(msgspec.json.Decoder(bool), "a boolean")
_COUNT_RULE = _Rule(
    msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=1, le=_INT_MAX)]),
    "an integer of at least 1",
)
_RULES = {
    "model": _STRING_RULE,
    "stream": _FLAG_RULE,
    "stream_options": _Rule(_top, "an object"),
    "user": _STRING_RULE,
    "max_tokens": _COUNT_RULE,
    "max_completion_tokens": _COUNT_RULE,
    "n": _Rule(
        msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=1, le=CHOICES_MAX)]),
        f"an integer from 1 to {CHOICES_MAX}",
    ),
    "priority": _Rule(
        msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=-_INT_MAX - 1, le=_INT_MAX)]),
        "an integer of 32 bits",
    ),
    "service_tier": _STRING_RULE,
}
_INCLUDE_USAGE = {"include_usage": _FLAG_RULE}

_TRUE = msgspec.Raw(b"true")
_NULL = b"null"
_KEY = re.compile(rb'[ \t\n\r]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"[ \t\n\r]*+:[ \t\n\r]*+', re.S)
_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")


def read(body: bytes) -> Fields:
    """The fields of a body. Raises Refusal (400) for all that DESIGN section 13 names."""
    top = read_top(body)
    found = _decoded(top, _RULES)
    model = found.get("model")
    if not model:
        raise bad_request("`model` is required: a string that names a model.", "model")
    options = found.get("stream_options")
    usage = _decoded(options, _INCLUDE_USAGE, "stream_options") if options else {}
    return Fields(
        top=top,
        model=model,
        stream=found.get("stream", False),
        include_usage=usage.get("include_usage", False),
        user=found.get("user") or None,
        max_output=found.get("max_completion_tokens") or found.get("max_tokens"),
        n=found.get("n", 1),
        service_tier=found.get("service_tier"),
    )


def read_top(body: bytes) -> Top:
    """The top level of a body. Raises Refusal where it is no JSON object that may be passed on."""
    _check_text(body)
    _check_shape(body)
    try:
        top = _top.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError:
        raise bad_request("The request body is not a JSON object.", code="invalid_json") from None
    except _MALFORMED:
        raise bad_request("The request body is not valid JSON.", code="invalid_json") from None
    if not _all_members(body, top):
        raise bad_request("The request body has a name twice.", code="duplicate_name")
    return top


def edited(
    fields: Fields, body: bytes, *, model: str, wants_usage: bool, keep_priority: bool = False
) -> bytes:
    """The body for the engine: the canonical model name, usage asked for where `wants_usage`,
    and no priority. The very same bytes where nothing is to be changed."""
    top = fields.top
    changes: Top = {}
    if fields.model != model:
        changes["model"] = msgspec.Raw(msgspec.json.encode(model))
    if wants_usage and not fields.include_usage:
        options = _decoded(top, {"stream_options": _RULES["stream_options"]})
        options = {**options.get("stream_options", {}), "include_usage": _TRUE}
        changes["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    drop = not keep_priority and "priority" in top
    if not changes and not drop:
        return body
    after = {**top, **changes}
    if drop:
        del after["priority"]
    return msgspec.json.encode(after)


def present(top: Top, name: str) -> msgspec.Raw | None:
    """A value that is there and not null."""
    raw = top.get(name)
    if raw is None or (len(raw) == 4 and bytes(raw) == _NULL):
        return None
    return raw


def count(top: Top, name: str) -> int | None:
    """A field that is an integer of at least 1, None where it is absent. Raises Refusal (400)."""
    return _decoded(top, {name: _COUNT_RULE}).get(name)


def _decoded(top: Top, rules: Mapping[str, _Rule], param: str = "") -> dict[str, Any]:
    """The fields that have a rule and are there; Refusal where one is of another type."""
    found = {}
    for name, raw in top.items():
        rule = rules.get(name)
        if rule is None or (len(raw) == 4 and bytes(raw) == _NULL):
            continue
        try:
            found[name] = rule.decoder.decode(raw)
        except _MALFORMED:
            raise bad_request(f"`{name}` must be {rule.kind}.", param or name) from None
    return found


def _check_text(body: bytes) -> None:
    """Refusal where the bytes are not UTF-8; msgspec does not look at what it skips."""
    if body.isascii():
        return
    view, at = memoryview(body), 0
    try:
        while at < len(body):
            end = at + _UTF8_BYTES
            at += codecs.utf_8_decode(view[at:end], "strict", end >= len(body))[1]
    except UnicodeDecodeError:
        raise bad_request("The request body is not valid UTF-8.", code="invalid_utf8") from None


def _check_shape(body: bytes) -> None:
    """Refusal where the nesting is too deep or the values are too many."""
    if len(body) < _SMALL_BYTES and body.count(b"[") + body.count(b"{") <= NESTING_MAX:
        return
    bare = _outside_strings(body)
    brackets = bare.translate(_TO_SQUARE, _NOT_BRACKETS)
    if len(brackets) // 2 > VALUES_MAX or bare.count(b":") > VALUES_MAX:
        raise _too_many()
    for _ in range(NESTING_MAX):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            return  # all gone; or they do not match, which the decoder will say
        brackets = inner
    if b"[]" in brackets:
        raise _too_deep()


def _outside_strings(body: bytes) -> bytes:
    """The body without its strings, as far as it is JSON."""
    pieces: list[bytes] = []
    at = 0
    while (quote := body.find(b'"', at)) >= 0:
        pieces.append(body[at:quote])
        if len(pieces) > VALUES_MAX:
            raise _too_many()
        at = body.find(b'"', quote + 1) + 1
        if at == 0:
            break
        if body[at - 2] == 0x5C:  # perhaps an escaped quote: the search above is the fast way
            string = _STRING.match(body, quote)
            if string is None:
                break
            at = string.end()
    else:
        pieces.append(body[at:])
    return b"".join(pieces)


def _all_members(body: bytes, top: Top) -> bool:
    """Whether the decoded top level holds every member of the body, that is, no name comes twice.

    The decoder keeps the last of equal names, in the place of the first. So the members are walked
    along the bytes: where one is missing or another stands in its place, the bytes differ or are
    left over.
    """
    at = body.index(b"{") + 1
    left = len(top)
    if left == 0:
        return True
    for raw in top.values():
        key = _KEY.match(body, at)
        if key is None or not body.startswith(raw, key.end()):
            return False
        at = _SPACE.match(body, key.end() + len(raw)).end()  # type: ignore[union-attr]
        left -= 1
        if body[at : at + 1] != (b"," if left else b"}"):
            return False
        at += 1
    return True


def _too_deep() -> Refusal:
    text = f"The request body is nested more than {NESTING_MAX} levels deep."
    return bad_request(text, code="nesting_too_deep")


def _too_many() -> Refusal:
    text = f"The request body has more than {VALUES_MAX} values of one kind."
    return bad_request(text, code="too_many_values")
