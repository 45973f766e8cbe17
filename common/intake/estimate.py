"""How many tokens a request is likely to be, from the bytes of its body. Pure.

A rough count is enough: it decides the order at first, and the engine's own usage corrects the
charge at the end. Text counts by its bytes as JSON has them, at BYTES_PER_TOKEN; pictures and
sound have a fixed cost each, whatever the length of their base64.
"""

import msgspec

from common.intake.answers import bad_request
from common.intake.body import Fields, Top, present

BYTES_PER_TOKEN = 4
"""English text has about four characters a token."""
MESSAGE_TOKENS = 4
"""What the chat template adds to each message."""
IMAGE_TOKENS = 1_000
AUDIO_TOKENS = 1_000
VIDEO_TOKENS = 4_000
OTHER_TOKENS = 50
"""A part of a kind that is not known here."""
OUTPUT_UNKNOWN = 1 << 20
"""Bound on the output of one choice where the request sets none: no bound, for what is expected
of the user is then the smaller one."""
_ITEMS_MAX = 100_000
"""Most prompts or inputs in one request."""


class Estimate(msgspec.Struct, frozen=True):
    """Tokens of the input, and how many answers (`n` times prompts) there will be."""

    input: int
    choices: int


class _Part(msgspec.Struct, gc=False):
    type: msgspec.Raw = msgspec.Raw(b"")
    text: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw(b"")
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    reasoning: msgspec.Raw = msgspec.Raw(b"")
    reasoning_content: msgspec.Raw = msgspec.Raw(b"")


class _Item(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")
    summary: msgspec.Raw = msgspec.Raw(b"")
    arguments: msgspec.Raw = msgspec.Raw(b"")


_items = msgspec.json.Decoder(list[_Item])
_messages = msgspec.json.Decoder(list[_Message])
_parts = msgspec.json.Decoder(list[_Part])

_PARTS: dict[bytes, int] = {
    b'"image_url"': IMAGE_TOKENS,
    b'"image"': IMAGE_TOKENS,
    b'"image_pil"': IMAGE_TOKENS,
    b'"image_embeds"': IMAGE_TOKENS,
    b'"input_file"': IMAGE_TOKENS,
    b'"input_image"': IMAGE_TOKENS,
    b'"input_audio"': AUDIO_TOKENS,
    b'"audio_url"': AUDIO_TOKENS,
    b'"video"': VIDEO_TOKENS,
    b'"video_url"': VIDEO_TOKENS,
}


def chat(fields: Fields) -> Estimate:
    """Of `messages`, `tools` and `functions`."""
    raw = present(fields.top, "messages")
    if raw is None:
        raise bad_request("`messages` is required: an array of messages.", "messages")
    try:
        messages = _messages.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        raise bad_request("`messages` must be an array of objects.", "messages") from None
    size = _json_bytes(fields.top, "tools") + _json_bytes(fields.top, "functions")
    tokens = MESSAGE_TOKENS * len(messages)
    for m in messages:
        size += len(m.tool_calls) + len(m.reasoning) + len(m.reasoning_content)
        tokens += _content(m.content)
    return Estimate(_tokens(size) + tokens, fields.n)


def completions(fields: Fields) -> Estimate:
    """Of `prompt`: a string, tokens, or an array of either."""
    raw = present(fields.top, "prompt")
    if raw is None:
        embeds = _json_bytes(fields.top, "prompt_embeds")
        if not embeds:
            raise bad_request("`prompt` is required.", "prompt")
        return Estimate(OTHER_TOKENS, fields.n)
    tokens, prompts = _texts(raw, "prompt")
    return Estimate(tokens, fields.n * max(1, prompts))


def embeddings(fields: Fields) -> Estimate:
    """Of `input`, which is as a prompt, or `messages` where the engine takes those."""
    raw = present(fields.top, "input")
    if raw is not None:
        return Estimate(_texts(raw, "input")[0], 1)
    if present(fields.top, "messages") is not None:
        return Estimate(chat(fields).input, 1)
    raise bad_request("`input` is required.", "input")


def responses(fields: Fields) -> Estimate:
    """Of `input`, a string or an array of items, `instructions` and `tools`. What is stored under
    `previous_response_id`, or in a prompt template, only the engine knows."""
    size = _json_bytes(fields.top, "instructions") + _json_bytes(fields.top, "tools")
    raw = present(fields.top, "input")
    if raw is None:
        return Estimate(_tokens(size) + OTHER_TOKENS, 1)
    if _first(raw) == 0x22:
        return Estimate(_tokens(size + len(raw) - 2) + MESSAGE_TOKENS, 1)
    try:
        items = _items.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        text = "`input` must be a string or an array of objects."
        raise bad_request(text, "input") from None
    tokens = MESSAGE_TOKENS * len(items)
    for item in items:
        size += len(item.arguments)
        tokens += _content(item.content) + _content(item.output) + _content(item.summary)
    return Estimate(_tokens(size) + tokens, 1)


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


def _json_bytes(top: Top, name: str) -> int:
    raw = present(top, name)
    return 0 if raw is None else len(raw)


def _first(raw: msgspec.Raw) -> int:
    """The first byte of a value, 0 for none."""
    return memoryview(raw)[0] if len(raw) else 0


def _content(raw: msgspec.Raw) -> int:
    """Tokens of a message's content: a string, null, parts, or what may come."""
    first = _first(raw)
    if first == 0x22:
        return _tokens(len(raw) - 2)
    if first != 0x5B:
        return 0 if len(raw) == 4 else OTHER_TOKENS if first else 0
    try:
        parts = _parts.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return _tokens(len(raw))
    tokens = size = 0
    for part in parts:
        if len(part.text):
            size += len(part.text)
        else:
            tokens += _PARTS.get(bytes(part.type)[:32], OTHER_TOKENS)
    return tokens + _tokens(size)


def _texts(raw: msgspec.Raw, name: str) -> tuple[int, int]:
    """(tokens, how many) of a string, an array of strings, of tokens, or of arrays of tokens.

    Nothing is built for each element: quotes, brackets and commas are counted instead, and what
    else an array may hold the engine will refuse.
    """
    first = _first(raw)
    if first == 0x22:
        return _tokens(len(raw) - 2), 1
    if first != 0x5B:
        raise bad_request(f"`{name}` must be a string or an array.", name)
    data = bytes(raw)
    inner = data[1:-1].lstrip(b" \t\r\n")
    if inner.startswith(b'"'):
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        items = data.count(b'"') // 2
        tokens = _tokens(max(0, len(raw) - 3 * items))
    elif inner.startswith(b"["):
        items = data.count(b"[") - 1
        tokens = data.count(b",") + 1
    elif inner.startswith(b"{"):
        items = data.count(b"{")
        tokens = _tokens(len(data))
    else:
        return (data.count(b",") + 1 if inner else 0), 1
    if items > _ITEMS_MAX:
        raise bad_request(f"`{name}` has more than {_ITEMS_MAX} items.", name)
    return tokens, items
