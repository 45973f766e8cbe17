"""Who asks: from the Authorization header to a user, a weight, and what they may use. Pure."""

import hashlib
from collections.abc import Sequence

import msgspec

from common.intake.answers import UNAUTHORIZED, Refusal, bad_request
from common.key_settings import KeySettings
from common.keys import CLASSES
from gateway.background import Rule, compiled
from gateway.people import Headers, People, Who, people

CLASS_HEADER = "X-Fairlane-Class"
_TIERS = {"priority": "interactive", "default": "standard", "flex": "batch"}
_DIGEST_CHARS = 16
"""Of a bearer token's digest, as a user's name where there are no keys: 64 bits."""


class Principal(msgspec.Struct, frozen=True):
    """Who asks, and what they may use."""

    user: str
    """Empty without keys: `open_user` names it then."""
    weight: float
    classes: tuple[str, ...]
    """The first is the default."""
    models: frozenset[str]
    """Empty: all."""
    comments: bool
    people: People | None = None
    """How its requests say who asks; None without keys."""
    key_jobs: int = 0
    """Most jobs of all people that divide its share waiting in one class of a model."""
    background: tuple[Rule, ...] = ()
    """Which of its requests nobody waits for."""
    admin: bool = False
    """Whether it may use `/admin`."""

    def may_use(self, *names: str) -> bool:
        """Whether a model of any of these names is allowed."""
        return not self.models or not self.models.isdisjoint(names)


_ANYONE = Principal("", 1.0, ("standard", "interactive", "batch"), frozenset(), True)


class Keys:
    """The API keys, by the SHA-256 of their secrets: a secret itself is never kept or compared."""

    def __init__(self, keys: Sequence[KeySettings]) -> None:
        self.configure(keys)

    def configure(self, keys: Sequence[KeySettings]) -> None:
        """Let these be the keys from now on."""
        self._by_digest = {
            k.digest(): Principal(
                k.user, k.weight, tuple(k.classes), frozenset(k.models), k.comments, people(k),
                k.key_jobs(), compiled(k.background), k.role == "admin",
            )
            for k in keys
        }  # fmt: skip

    @property
    def open(self) -> bool:
        """Whether there are no keys, so that anyone may ask."""
        return not self._by_digest

    def principal(self, authorization: bytes | None) -> Principal:
        """Raises Refusal, always the same 401, where the key is not known."""
        if not self._by_digest:
            return _ANYONE
        # Hashed whatever it is, so that the answer takes the same time.
        digest = hashlib.sha256(_bearer(authorization) or b"").hexdigest()
        principal = self._by_digest.get(digest)
        if principal is None:
            raise Refusal(UNAUTHORIZED)
        return principal


def _bearer(authorization: bytes | None) -> bytes | None:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def open_user(body_user: str | None, authorization: bytes | None, peer: str) -> str:
    """Whom a request without keys counts for: the body's `user`, else the holder of its token,
    else its address."""
    if body_user:
        return body_user
    token = _bearer(authorization)
    if token:
        return "k-" + hashlib.sha256(token).hexdigest()[:_DIGEST_CHARS]
    return peer


def asker(
    principal: Principal,
    headers: Headers,
    authorization: bytes | None,
    peer: str,
    user: str | None = None,
) -> Who:
    """Whom a request is for. `user`: whom it names in its body, or where others do in theirs.
    Raises Refusal as `People.who`."""
    if principal.people is None:
        return Who(open_user(user, authorization, peer))
    return principal.people.who(headers, user)


def own_path(
    principal: Principal,
    headers: Headers,
    authorization: bytes | None,
    peer: str,
    user: str | None = None,
) -> str:
    """Whose things a request without a body of its own is about, as `keys.path` names them: of whom
    a queued request with these headers would be for. A person whom no header names sees what
    nobody's requests are. Raises Refusal as `asker`."""
    return asker(principal, headers, authorization, peer, user).path


def choose_class(principal: Principal, header: bytes | None, tier: str | None) -> str:
    """The class asked for, or the nearest lower one the key may use, else its highest.

    Raises Refusal (400) for a header that names no class.
    """
    if header is not None:
        asked = header.decode("latin-1").strip().lower()
        if asked not in CLASSES:
            text = f"`{CLASS_HEADER}` must be one of {', '.join(CLASSES)}."
            raise bad_request(text, CLASS_HEADER, "invalid_class")
    else:
        asked = _TIERS.get(tier or "", principal.classes[0])
    if asked in principal.classes:
        return asked
    lower = CLASSES[CLASSES.index(asked) :]
    return next(c for c in (*lower, *CLASSES) if c in principal.classes)
