"""A batch: what was asked for, how it stands, and how OpenAI's API shows it. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
OVER: frozenset[str] = frozenset(("failed", "completed", "expired", "cancelled"))
TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip
"""Fields with seconds since the epoch, by the Redis clock."""
_NUMBERS = ("total", "completed", "failed", "cursor", "input", "cached", "output")
_WORDS = ("status", "goal", "model", "output_file_id", "error_file_id")


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, and by whom. It never changes: the owner's key may, meanwhile."""

    id: str
    owner: str
    """A user as `keys.path` names them."""
    user: str
    """As people write it."""
    sub: str = ""
    weight: float
    cls: str
    """The key's default class."""
    models: list[str]
    """Names that the key may use; empty: all."""
    key_jobs: int
    """As in `ModelPolicy.limits`."""
    endpoint: str
    input_file_id: str
    window: str
    """As it was given."""
    window_ms: int
    created_ms: int
    """By the Redis clock."""
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None

    @property
    def hex(self) -> str:
        """The random part of its id."""
        return self.id.removeprefix("batch_")

    @property
    def sink(self) -> str:
        """The list of ended jobs that its lines name."""
        return "b-" + self.hex

    @property
    def expires_ms(self) -> int:
        """The end of its window."""
        return self.created_ms + self.window_ms


class State(msgspec.Struct, frozen=True, kw_only=True):
    """How it stands."""

    status: str = "validating"
    goal: str = ""
    """While it is finalizing: the status that follows."""
    model: str = ""
    """The model's own name, once that is known."""
    total: int = 0
    """Lines."""
    completed: int = 0
    """Of these, lines in the output file."""
    failed: int = 0
    """Of these, lines in the error file."""
    cursor: int = 0
    """Lines before this one may be in the queue, those from it on are not."""
    input: int = 0
    """Tokens, as `cached` and `output`."""
    cached: int = 0
    output: int = 0
    output_file_id: str = ""
    """Chosen before the file is written; shown once it is."""
    error_file_id: str = ""
    errors: list[dict[str, Any]] = []
    times: dict[str, int] = {}

    @property
    def over(self) -> bool:
        """Whether nothing more will become of it."""
        return self.status in OVER

    @property
    def left(self) -> int:
        """Lines without a result."""
        return self.total - self.completed - self.failed


def read_state(fields: Mapping[str, bytes]) -> State:
    """Of the batch's hash. Raises ValueError, msgspec.MsgspecError."""
    return State(
        **{n: int(fields.get(n) or 0) for n in _NUMBERS},  # type: ignore[arg-type]
        **{n: fields.get(n, b"").decode() for n in _WORDS},  # type: ignore[arg-type]
        errors=msgspec.json.decode(fields.get("errors") or b"[]"),
        times={n: int(fields[n]) for n in TIMES if n in fields},
    )


def shown(about: About, state: State) -> dict[str, Any]:
    """A batch as OpenAI's API shows it."""
    files = state.over
    return {
        "id": about.id,
        "object": "batch",
        "endpoint": about.endpoint,
        "model": state.model or None,
        "errors": {"object": "list", "data": state.errors} if state.errors else None,
        "input_file_id": about.input_file_id,
        "completion_window": about.window,
        "status": state.status,
        "output_file_id": (files and state.output_file_id) or None,
        "error_file_id": (files and state.error_file_id) or None,
        "created_at": about.created_ms // 1000,
        "in_progress_at": state.times.get("in_progress_at"),
        "expires_at": about.expires_ms // 1000,
        **{n: state.times.get(n) for n in TIMES[1:]},
        "request_counts": {
            "total": state.total, "completed": state.completed, "failed": state.failed,
        },
        "usage": {
            "input_tokens": state.input,
            "input_tokens_details": {"cached_tokens": state.cached},
            "output_tokens": state.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": state.input + state.output,
        },
        "metadata": about.metadata,
    }  # fmt: skip
