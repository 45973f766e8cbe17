"""Where a webhook may go, and how it is signed: the form of standard-webhooks. Pure."""

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

URL_CHARS_MAX = 2_048
RETRIES_S = (5, 300, 1_800, 7_200, 18_000, 36_000)
"""A webhook that was not taken is sent again after these times, each up to a fifth longer; then it
is given up, some 17 hours after the job's end."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LOCAL = ("localhost", "local", "internal")
"""Names, and ends of names, that mean machines nearby."""


class UnsafeUrlError(ValueError):
    """A webhook may not go there; the text is for the user."""


def check_url(url: str, private: bool) -> None:
    """Raises UnsafeUrlError where a URL is no webhook's, as far as that shows in it. `private`:
    whether it may go to addresses that are not public."""
    if len(url) > URL_CHARS_MAX:
        raise UnsafeUrlError(f"`webhook` has more than {URL_CHARS_MAX} characters.")
    if not (url.isascii() and url.isprintable()) or " " in url or "\\" in url:
        raise UnsafeUrlError("`webhook` is no URL: of other characters it has their %-escapes.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UnsafeUrlError("`webhook` is no URL.") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise UnsafeUrlError("`webhook` must be an http or https URL.")
    if parts.username is not None or parts.password is not None:
        raise UnsafeUrlError("`webhook` must hold no user or password.")
    if "%" in host:
        raise UnsafeUrlError("`webhook` has a host with escapes or a zone.")
    name = host.rstrip(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        if name.replace(".", "").isdigit():  # what some take for an address without looking it up
            raise UnsafeUrlError("`webhook` has an address that is none.") from None
        if private:
            return
        if name in _LOCAL or name.endswith(tuple(f".{end}" for end in _LOCAL)):
            raise UnsafeUrlError("`webhook` must go to a public address.") from None
        return
    if not (private or public(address)):
        raise UnsafeUrlError("`webhook` must go to a public address.")


def public(address: Address) -> bool:
    """Whether an address is one of the internet's, also where it stands for another."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if not all(public(i) for i in inner if i is not None):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not (address.is_multicast or address.is_reserved)


def signed(id: str, at_s: int, body: bytes, keys: Iterable[bytes]) -> dict[str, str]:
    """The headers of a webhook: its id, the time, and a signature with each key."""
    content = f"{id}.{at_s}.".encode() + body
    made = (base64.b64encode(hmac.digest(k, content, hashlib.sha256)).decode() for k in keys)
    return {
        "webhook-id": id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in made),
    }


def again_s(job: str, tries: int) -> float | None:
    """Seconds until a webhook is sent again that was not taken `tries` times; None: never. The part
    by which it is longer is the job's own, so that those of one moment do not come back in one."""
    if tries > len(RETRIES_S):
        return None
    spread = int(job[:4], 16) / 0x10000 / 5
    return RETRIES_S[tries - 1] * (1 + spread)
