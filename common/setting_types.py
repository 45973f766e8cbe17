"""Types of settings that more than one section has, with their bounds."""

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

PriorityClass = Literal["interactive", "standard", "batch"]
Ms = Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=1 << 40)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?\Z")
_NUMBERS = re.compile(r"[0-9.]+\Z")


def is_address(url: str) -> bool:
    """Whether this is scheme, host and port alone (a slash may follow), of which any part of the
    process can make a request: what resolvers and HTTP clients choke on is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if not host or port == 0 or url.rstrip("/") != f"{parts.scheme}://{parts.netloc}":
            return False
        if "@" in parts.netloc:
            return False
        if parts.netloc.startswith("[") or _NUMBERS.match(host):
            ipaddress.ip_address(host)
            return True
    except ValueError:
        return False
    return _NAME.match(host) is not None


def is_header(value: str) -> bool:
    """Whether this may be a header's value, or a part of one, wherever it is sent."""
    return value.isascii() and value.isprintable()
