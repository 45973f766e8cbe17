"""Requests that nobody waits for: which rules of a key name them, and what class they get. Pure.

Chat front ends ask the model for titles, tags and follow-up questions beside what a person asked,
with the same key. A rule tells them apart by a header, the body's `metadata`, or a pattern.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from common.intake.body import Top, present
from common.key_settings import BackgroundRule, split_rule
from common.keys import CLASSES
from gateway.people import Headers

SEARCHED_BYTES = 4 << 10
"""How much of a message's text, or of a value, a pattern is searched in."""
_PARTS_MAX = 64
"""Most parts of one message that are read."""

_MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError)


class _Message(msgspec.Struct, gc=False):
    role: msgspec.Raw = msgspec.Raw(b"")
    content: msgspec.Raw = msgspec.Raw(b"")


class _Part(msgspec.Struct, gc=False):
    text: msgspec.Raw = msgspec.Raw(b"")


_messages = msgspec.json.Decoder(list[_Message])
_parts = msgspec.json.Decoder(list[_Part])
_members = msgspec.json.Decoder(Top)
_string = msgspec.json.Decoder(str)
_NOTHING = msgspec.Raw(b"")
_INSTRUCTING = (b'"system"', b'"developer"')


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule, compiled. Neither `header` nor `metadata`: it looks at the first message."""

    to: str
    header: bytes = b""
    """A name in lower case."""
    metadata: str = ""
    pattern: re.Pattern[str] | None = None
    """None: that it is there is enough."""

    def fits(self, text: str | None) -> bool:
        """Whether what was found (None: nothing) is what the rule means."""
        if text is None:
            return False
        return self.pattern is None or self.pattern.search(text) is not None


def compiled(rules: Sequence[BackgroundRule]) -> tuple[Rule, ...]:
    """Rules of a key's settings, which have checked the patterns."""
    return tuple(_compiled(rule) for rule in rules)


def _compiled(rule: BackgroundRule) -> Rule:
    if rule.header is not None:
        name, pattern = split_rule(rule.header, ":")
        return Rule(to=rule.to, header=name.lower().encode(), pattern=_pattern(pattern))
    if rule.metadata is not None:
        name, pattern = split_rule(rule.metadata, "=")
        return Rule(to=rule.to, metadata=name, pattern=_pattern(pattern))
    return Rule(to=rule.to, pattern=_pattern(rule.system))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    return None if text is None else re.compile(text)


def demoted(cls: str, rules: Sequence[Rule], headers: Headers, top: Top) -> str:
    """The class of a request that would have `cls`: the lowest that a fitting rule names, and
    never a higher one. What cannot be read fits no rule; the engine will say what is wrong."""
    found = cls
    metadata: Top | None = None
    message: tuple[str | None] | None = None
    for rule in rules:
        if CLASSES.index(rule.to) <= CLASSES.index(found):
            continue
        if rule.header:
            fits = any(map(rule.fits, _values(headers, rule.header)))
        elif rule.metadata:
            metadata = _metadata(top) if metadata is None else metadata
            fits = rule.fits(_beginning(metadata.get(rule.metadata, _NOTHING)))
        else:
            message = (_instructions(top),) if message is None else message
            fits = rule.fits(message[0])
        if fits:
            found = rule.to
    return found


def _values(headers: Headers, wanted: bytes) -> Iterable[str]:
    return (v.decode("latin-1")[:SEARCHED_BYTES] for name, v in headers if name == wanted)


def _metadata(top: Top) -> Top:
    """The members of `metadata`."""
    raw = present(top, "metadata")
    if raw is None:
        return {}
    try:
        return _members.decode(raw)
    except _MALFORMED:
        return {}


def _instructions(top: Top) -> str | None:
    """The beginning of the first system or developer message; of the first message of all where
    there is none, for some front ends put what they ask for there."""
    raw = present(top, "messages")
    if raw is None:  # of a response
        return _beginning(present(top, "instructions") or _NOTHING)
    try:
        messages = _messages.decode(raw)
    except _MALFORMED:
        return None
    for message in messages:
        if bytes(message.role) in _INSTRUCTING:
            return _content(message.content)
    return _content(messages[0].content) if messages else None


def _content(raw: msgspec.Raw) -> str | None:
    """The text of a message's content: a string, or the text parts one after the other."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return _beginning(raw)
    try:
        parts = _parts.decode(raw)
    except _MALFORMED:
        return None
    texts = (_beginning(part.text) for part in parts[:_PARTS_MAX])
    return "\n".join(text for text in texts if text is not None)[:SEARCHED_BYTES]


def _beginning(raw: msgspec.Raw) -> str | None:
    """The beginning of a JSON string; None where it is another value."""
    if bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        return _string.decode(raw).encode()[:SEARCHED_BYTES].decode(errors="ignore")
    except _MALFORMED:
        return None
