"""Which of a key's people asks: sub-users that divide its share, or users of their own. Pure.

Only what the key's own settings name is looked at: another header, or the same one with another
key, says nothing.
"""

from collections.abc import Iterable

import msgspec

from common.intake.answers import bad_request
from common.key_settings import KeySettings
from common.keys import path

NAME_BYTES_MAX = 256
"""Longest name of a person."""
NOBODY = "-"
"""The person of all requests of a key that name none. No name can be it: see `_name`."""
_BODY = b""

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, and values."""


class Who(msgspec.Struct, frozen=True):
    """Who is charged: a user, and of a key whose share is divided the person (else empty)."""

    user: str
    sub: str = ""

    @property
    def path(self) -> str:
        """As the verbs know it."""
        return path(self.user, self.sub)


class People(msgspec.Struct, frozen=True):
    """How one key's requests say who asks."""

    user: str
    sources: tuple[bytes, ...] = ()
    """Names of headers in lower case; empty bytes: the body's `user`. The first present counts."""
    separate: bool = False

    def who(self, headers: Headers, body_user: str | None) -> Who:
        """Whom a request is for. Raises Refusal (400) for a name that is too long, or a header
        that is there twice."""
        if not self.sources:
            return Who(self.user)
        name = _name(self._named(headers, body_user))
        if self.separate:
            return Who(f"{self.user}/{name}")
        return Who(self.user, name)

    def _named(self, headers: Headers, body_user: str | None) -> str:
        found = {s: b"" for s in self.sources if s}
        seen: set[bytes] = set()
        for header, value in headers:
            if header not in found:
                continue
            if header in seen:
                text = header.decode("latin-1")
                raise bad_request(f"The header `{text}` is there twice.", text)
            seen.add(header)
            found[header] = value.strip()
        for source in self.sources:
            value = found[source] if source else (body_user or "").strip().encode(errors="replace")
            if len(value) > NAME_BYTES_MAX:
                param = source.decode("latin-1") or "user"
                text = f"`{param}` is longer than {NAME_BYTES_MAX} bytes."
                raise bad_request(text, param)
            if value:
                return _text(value)
        return ""


def people(key: KeySettings) -> People:
    """Of a key's settings."""
    sources = (s.removeprefix("header:").lower().encode() for s in key.user_from)
    return People(
        key.user,
        tuple(_BODY if s == b"body:user" else s for s in sources),
        key.sub_users == "separate",
    )


def _text(value: bytes) -> str:
    """Header values are bytes: UTF-8 where they are, else one character each."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _name(given: str) -> str:
    """A name that is NOBODY only where none was given: one of dashes alone gets another dash."""
    return given if given.strip(NOBODY) else given + NOBODY
