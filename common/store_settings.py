"""Settings of the object store, and of the files that users keep in it."""

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from common.setting_types import Bytes

SCHEMES = ("file", "s3", "gs", "az", "memory")
"""`memory` is for tests: each process has its own, and forgets it."""


class StoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where files are, and how much of them there may be."""

    url: str | None = None
    """file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; the
    directory or bucket is there. All replicas must reach the same. Absent: `fairlane/store` in the
    user's state directory (XDG_STATE_HOME, else ~/.local/state), which is made."""
    options: dict[str, str] = {}
    """Of the store's client, such as `aws_endpoint` or `aws_region`; they win over the cloud's
    usual environment variables, where credentials are best left."""
    files_max_bytes: Bytes = 512 << 20
    """Largest file."""
    user_files_max_bytes: Bytes = 10 << 30
    """Most bytes of all files of one user."""
    user_files_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    """Most files of one user: all of them are looked at for each upload and list."""

    def __post_init__(self) -> None:
        if self.url is None:
            return
        try:
            parts = urlsplit(self.url)
        except ValueError as e:
            raise ValueError(f"the store's url is none: {e}") from None
        if parts.scheme not in SCHEMES:
            known = ", ".join(f"{s}://" for s in SCHEMES[:-1])
            raise ValueError(f"the store's url begins with one of {known}, not {parts.scheme!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("the store's url is a place alone; the rest belongs in `options`")
        if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
            raise ValueError("the store's directory is absolute: file:///directory")
        if parts.scheme in ("s3", "gs", "az") and not parts.netloc:
            raise ValueError(f"the store's url names no bucket: {parts.scheme}://bucket/prefix")
