"""Settings of batches: how much of each is in the queue, and when its end draws near."""

from typing import Annotated

import msgspec

from common.setting_types import Bytes, Port

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class BatchSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of `/v1/batches` and the workers that run them."""

    metrics_host: str = "127.0.0.1"
    metrics_port: Port | None = None
    """Serves /metrics, /healthz and /readyz of a worker process; absent: not served."""
    window_max_h: Annotated[int, msgspec.Meta(ge=1, le=720)] = 168
    """Longest `completion_window`, in hours."""
    ahead_lines: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 2_000
    """Most lines of one batch that wait or run at once."""
    ahead_bytes: Bytes = 16 << 20
    """Most bytes of their requests together; one larger line goes alone."""
    queue_share: Share = 0.5
    """Of the queue's room for a model, in jobs and bytes, lines of batches take no more: requests
    that somebody waits for find a place beside them."""
    escalate_at: Share = 0.8
    """After this part of the window, lines go on in the key's default class (no higher than
    standard) with a weight that rises to the key's own until its end; 1: never."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=5)] = 2
    """A line whose engine failed, or could not be reached, is tried so often again."""
    keep_days: Annotated[int, msgspec.Meta(ge=1, le=365)] = 30
    """A batch is shown for so long after its end."""
    user_active_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    """Most batches of one user that are not over."""
    active_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000
    """Most batches of all users that are not over."""
    turns_max: Annotated[int, msgspec.Meta(ge=1, le=64)] = 16
    """Most batches that one worker has in hand at once; others wait for their turn."""
