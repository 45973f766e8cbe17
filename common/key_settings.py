"""Settings of API keys: whom each stands for, and how its requests are told apart."""

import hashlib
import re
from typing import Annotated, Literal

import msgspec

from common.job_settings import webhook_key
from common.setting_types import Count, Name, PriorityClass

PATTERN_CHARS_MAX = 500
KEY_JOBS_MAX = 10_000
"""Most jobs of all sub-users of a key waiting in one class, where the key does not say."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}\Z")
"""The name of a header, RFC 9110 section 5.1."""
_SECRETS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
"""Headers that name nobody in public: a user's name shows in Redis."""
_HEADER, _BODY_USER = "header:", "body:user"


def split_rule(text: str, separator: str) -> tuple[str, str | None]:
    """The name and the pattern of `name<separator>pattern`; None where there is no pattern."""
    name, found, pattern = text.partition(separator)
    return name.strip(), pattern.strip() if found else None


class BackgroundRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which requests of a key nobody waits for; exactly one of the three tests is set.

    Patterns are regular expressions of Python's `re`, searched anywhere in the text. They are the
    operator's own: one that backtracks without end holds up the gateway.
    """

    header: str | None = None
    """`Name: pattern`, or a bare `Name`: the header is there."""
    metadata: str | None = None
    """`key=pattern`, or a bare `key`: the body's `metadata` has it, with a string for value."""
    system: str | None = None
    """A pattern in the first system or developer message, or in the first message of all where
    there is none of these; 4 KiB of it are searched."""
    to: PriorityClass = "batch"
    """The class of such requests, where it is lower than the one they would have."""

    def __post_init__(self) -> None:
        tests = [t for t in (self.header, self.metadata, self.system) if t is not None]
        if len(tests) != 1:
            raise ValueError("a background rule has exactly one of `header`, `metadata`, `system`")
        pattern: str | None = self.system
        if self.header is not None:
            name, pattern = split_rule(self.header, ":")
            if not _TOKEN.match(name):
                raise ValueError(f"a background rule's header has no such name: {name!r}")
        elif self.metadata is not None:
            name, pattern = split_rule(self.metadata, "=")
            if not 1 <= len(name) <= 256:
                raise ValueError("a background rule's metadata is `key=pattern` or a bare `key`")
        _check_pattern(pattern)


class KeySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One API key and whom it stands for. Exactly one of `secret` and `sha256` is set."""

    secret: str | None = None
    sha256: str | None = None
    """Hex SHA-256 of the secret, so that the file need not hold it."""
    user: Name
    weight: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] = 1.0
    """Share of service relative to the other users."""
    classes: Annotated[list[PriorityClass], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["standard"]
    )
    """Classes it may use; the first is its default."""
    models: list[Name] = []
    """Models it may use; empty: all."""
    role: Literal["user", "admin"] = "user"
    """`admin` may use `/admin` besides."""
    comments: bool = True
    """Whether waiting streams get comment lines (they commit the status 200)."""
    user_from: Annotated[list[str], msgspec.Meta(max_length=8)] = []
    """Where the key's requests say which of its people asks: `header:<Name>` or `body:user`, the
    first that is present. Only a key with this is believed. Empty: the key is one user."""
    sub_users: Literal["share", "separate"] = "share"
    """`share`: the people divide the key's share, and none gains by forging or leaving out who it
    is. `separate`: each is a user of its own, `<user>/<person>`, with the key's weight: for front
    ends that can be trusted, for who can forge the name there has as many shares as names."""
    jobs_max: Count | None = None
    """Most jobs of all its people together waiting in one class of a model, with `sub_users =
    "share"`; absent: 10,000."""
    background: Annotated[list[BackgroundRule], msgspec.Meta(max_length=32)] = []
    """Requests that nobody waits for, such as the titles that chat front ends ask for."""
    webhook_secret: str | None = None
    """Signs the webhooks of this key's user; with several keys that have one, a webhook has the
    signature of each. Absent: `gateway.webhook_secret`."""

    def __post_init__(self) -> None:
        if (self.secret is None) == (self.sha256 is None):
            raise ValueError("a key needs exactly one of `secret` and `sha256`")
        if self.secret is not None and not 8 <= len(self.secret) <= 4096:
            raise ValueError("a key's `secret` has 8 to 4096 characters")
        if self.sha256 is not None and (
            len(self.sha256) != 64 or set(self.sha256.lower()) - set("0123456789abcdef")
        ):
            raise ValueError("a key's `sha256` is 64 hexadecimal digits")
        if self.webhook_secret is not None:
            webhook_key(self.webhook_secret)
        for source in self.user_from:
            _check_source(source)
        if not self.user_from and self.sub_users == "separate":
            raise ValueError('a key with sub_users = "separate" needs `user_from`')
        if self.jobs_max is not None and not self.shares:
            raise ValueError('a key\'s `jobs_max` needs `user_from` and sub_users = "share"')

    @property
    def shares(self) -> bool:
        """Whether its share is divided among sub-users."""
        return bool(self.user_from) and self.sub_users == "share"

    def key_jobs(self) -> int:
        """Most jobs of all its sub-users waiting in one class of a model."""
        return KEY_JOBS_MAX if self.jobs_max is None else self.jobs_max

    def stands_for(self, user: str) -> bool:
        """Whether a job's user is this key's, or one of its people that are users of their own."""
        own = self.sub_users == "separate" and user.startswith(f"{self.user}/")
        return own or user == self.user

    def headers(self) -> list[str]:
        """Names of the headers that may say who asks, in their order, lower case."""
        return [s.removeprefix(_HEADER).lower() for s in self.user_from if s != _BODY_USER]

    def digest(self) -> str:
        """Lower-case hex SHA-256 of the secret: the only form the gateway compares."""
        if self.sha256 is not None:
            return self.sha256.lower()
        return hashlib.sha256((self.secret or "").encode()).hexdigest()


def check_keys(keys: list[KeySettings]) -> None:
    """Raises ValueError where keys contradict each other."""
    digests = [k.digest() for k in keys]
    if len(set(digests)) != len(digests):
        raise ValueError("two [[keys]] have the same secret")
    first: dict[str, KeySettings] = {}
    for key in keys:
        other = first.setdefault(key.user, key)
        if other.weight != key.weight:
            raise ValueError(f"keys of user {key.user!r} have different weights")
        if other.shares != key.shares:
            raise ValueError(f"of the keys of user {key.user!r} only some divide its share")
    for prefix in {f"{k.user}/" for k in keys if k.sub_users == "separate"}:
        for user in first:
            if user.startswith(prefix):
                raise ValueError(f"user {user!r} has a name that a person of {prefix[:-1]!r} may")


def _check_source(source: str) -> None:
    if source == _BODY_USER:
        return
    name = source.removeprefix(_HEADER)
    if name == source:
        raise ValueError(f"`user_from` has `header:<Name>` or `body:user`, not {source!r}")
    if not _TOKEN.match(name):
        raise ValueError(f"`user_from` names no HTTP header: {source!r}")
    if name.lower() in _SECRETS:
        raise ValueError(f"`user_from` may not name a header that holds a secret: {source!r}")


def _check_pattern(pattern: str | None) -> None:
    if pattern is None:
        return
    if not 1 <= len(pattern) <= PATTERN_CHARS_MAX:
        raise ValueError(f"a background rule's pattern has 1 to {PATTERN_CHARS_MAX} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(f"a background rule's pattern is none: {e}") from None
