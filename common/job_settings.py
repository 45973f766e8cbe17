"""Settings of durable jobs and of the webhooks that tell of their ends."""

import base64
import binascii
from typing import Annotated

import msgspec

from common.setting_types import Seconds

TTL_S_MIN, TTL_S_MAX = 60, 30 * 86_400
"""How long an answer may be kept after its job's end."""
KEPT_MAX = 10_000
"""So many jobs of a user can be listed."""
_PREFIX = "whsec_"
_KEY_BYTES = range(24, 65)


class JobSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of `[gateway]`."""

    job_wait_s: Seconds = 86_400.0
    """A durable job may wait in the queue for so long, whatever its class: nobody holds a
    connection for it."""
    job_ttl_s: Annotated[int, msgspec.Meta(ge=TTL_S_MIN, le=TTL_S_MAX)] = 86_400
    """A durable job's answer is kept so long after its end where the job does not say."""
    user_kept_max: Annotated[int, msgspec.Meta(ge=1, le=KEPT_MAX)] = 2_000
    """Most durable jobs of one user, waiting, running, or with an answer that is kept."""
    webhook_secret: str | None = None
    """`whsec_` and 24 to 64 bytes in base64, which sign the webhooks of keys without a secret of
    their own. Where there is none, jobs with a webhook are refused."""
    webhook_private: bool = False
    """Whether webhooks may go to addresses that are not public: private, loopback, link-local."""
    webhook_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=30)] = 10.0
    """One try of a webhook may take so long."""
    webhooks_max: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    """Most webhooks that one gateway sends at once; of one user a quarter of them."""

    def __post_init__(self) -> None:
        if self.webhook_secret is not None:
            webhook_key(self.webhook_secret)


def webhook_key(secret: str) -> bytes:
    """The bytes that a secret of standard-webhooks stands for. Raises ValueError, without the
    secret in it."""
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(_PREFIX) or len(key) not in _KEY_BYTES:
        raise ValueError(f"a webhook_secret is {_PREFIX} and 24 to 64 bytes in base64")
    return key
