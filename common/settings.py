"""All settings: their types, limits and defaults. `common/config.py` reads them."""

import hashlib
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


class RedisSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the broker is."""

    url: str | None = None
    """redis://, rediss:// or unix://; absent: the embedded broker (`fairlane up` only)."""
    command_timeout_s: Seconds = 2.0
    """A command without an answer for so long costs the connection."""


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
    comments: bool = True
    """Whether waiting streams get comment lines (they commit the status 200)."""

    def __post_init__(self) -> None:
        if (self.secret is None) == (self.sha256 is None):
            raise ValueError("a key needs exactly one of `secret` and `sha256`")
        if self.secret is not None and not 8 <= len(self.secret) <= 4096:
            raise ValueError("a key's `secret` has 8 to 4096 characters")
        if self.sha256 is not None and (
            len(self.sha256) != 64 or set(self.sha256.lower()) - set("0123456789abcdef")
        ):
            raise ValueError("a key's `sha256` is 64 hexadecimal digits")

    def digest(self) -> str:
        """Lower-case hex SHA-256 of the secret: the only form the gateway compares."""
        if self.sha256 is not None:
            return self.sha256.lower()
        return hashlib.sha256((self.secret or "").encode()).hexdigest()


class BackendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine server."""

    url: str
    """http:// or https:// with host and port, without a path."""
    engine: Literal["vllm"] = "vllm"
    """Which names its metrics page has."""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """The engine's slots, where known."""
    api_key: str | None = None
    """Sent to the engine as a bearer token."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a backend's url begins with http:// or https://, not {self.url!r}")
        rest = self.url.split("://", 1)[1].rstrip("/")
        if not _is_address(self.url) or any(c in rest for c in "/?# \t\r\n@"):
            raise ValueError(f"a backend's url is scheme, host and port alone, not {self.url!r}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class ClassSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One priority class of one model."""

    queue_limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    """Admit while fewer wait in the engine; default 3, for batch 1."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model: its backends and its fair order."""

    aliases: list[Name] = []
    """Other names it answers to."""
    backends: list[BackendSettings] = []
    fairness: Literal["tokens", "requests"] = "tokens"
    """What a job costs its user."""
    class_policy: Literal["strict"] = "strict"
    """Each class is an order of its own; a lower one runs when the higher have nothing waiting."""
    class_: dict[PriorityClass, ClassSettings] = msgspec.field(default_factory=dict, name="class")

    def queue_limit(self, cls: str) -> int:
        """How many jobs may wait in one backend while a job of `cls` is admitted."""
        settings = self.class_.get(cls)  # type: ignore[call-overload]
        if settings is not None and settings.queue_limit is not None:
            return int(settings.queue_limit)
        return 1 if cls == "batch" else 3


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: Port = 8000
    insecure: bool = False
    """Allow binding to other than loopback without keys."""
    body_max_bytes: Bytes = 64 << 20
    cors_origins: list[str] = []
    """Origins that browsers may call from; `*` for any."""
    client_buffer_bytes: Bytes = 1 << 20
    """How far a slow client may lag before its own stream is held up."""
    bodies_max_bytes: Bytes = 256 << 20
    """Bodies of unstarted jobs kept for a Redis that loses them; then 503."""
    connections_max: Count = 4096
    user_jobs_max: Count = 256
    """Most jobs of one user waiting in one class."""
    user_batch_jobs_max: Count = 10_000
    user_bytes_max: Bytes = 256 << 20
    model_jobs_max: Count = 20_000
    model_bytes_max: Bytes = 1 << 30
    wait_interactive_s: Seconds = 110.0
    wait_standard_s: Seconds = 600.0
    wait_batch_s: Seconds = 86_400.0
    comment_first_interactive_s: Seconds = 4.0
    """A stream that waits gets its first comment after this long."""
    comment_first_s: Seconds = 10.0
    comment_every_s: Seconds = 15.0
    drain_s: Seconds = 30.0
    """After SIGTERM, open streams may finish for so long."""

    def wait_s(self, cls: str) -> float:
        """How long a job of this class may wait."""
        return float(getattr(self, f"wait_{cls}_s"))

    def jobs_max(self, cls: str) -> int:
        """Most jobs of one user waiting in this class."""
        return self.user_batch_jobs_max if cls == "batch" else self.user_jobs_max


class DispatcherSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engine side."""

    metrics_host: str = "127.0.0.1"
    metrics_port: Port | None = None
    """Serves /metrics, /healthz and /readyz of a dispatcher process; absent: not served."""
    leader_lease_ms: Ms = 2_000
    leader_renew_ms: Ms = 500
    job_lease_ms: Ms = 6_000
    job_renew_ms: Ms = 1_000
    dead_after_ms: Ms = 6_000
    """Nobody is declared dead sooner; also the grace after a takeover."""
    poll_busy_ms: Ms = 100
    """Engine metrics are read this often while jobs wait."""
    poll_idle_ms: Ms = 1_000
    first_byte_s: Seconds = 300.0
    """A backend may take so long to its first byte."""
    silence_s: Seconds = 120.0
    """A stream may be silent so long between chunks."""
    kv_max: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.92
    """No admission above this share of KV memory."""
    tries_max: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    running_max: Count = 4_096
    """Most jobs one dispatcher runs at once."""
    drain_s: Seconds = 30.0
    """After SIGTERM, running jobs may finish for so long; the rest are handed back."""

    def __post_init__(self) -> None:
        if self.leader_renew_ms * 3 > self.leader_lease_ms:
            raise ValueError("leader_renew_ms must leave time for two missed renewals")
        if self.job_renew_ms * 3 > self.job_lease_ms:
            raise ValueError("job_renew_ms must leave time for two missed renewals")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole configuration, as read by `load`."""

    redis: RedisSettings = RedisSettings()
    gateway: GatewaySettings = GatewaySettings()
    dispatcher: DispatcherSettings = DispatcherSettings()
    keys: list[KeySettings] = []
    models: dict[Name, ModelSettings] = {}
    backends: list[BackendSettings] = []
    """Backends whose models are read from their `/v1/models`."""

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for model, settings in self.models.items():
            for name in (model, *settings.aliases):
                if name in seen:
                    raise ValueError(f"models {seen[name]!r} and {model!r} share the name {name!r}")
                seen[name] = model
        digests = [k.digest() for k in self.keys]
        if len(set(digests)) != len(digests):
            raise ValueError("two [[keys]] have the same secret")
        weights: dict[str, float] = {}
        for key in self.keys:
            if weights.setdefault(key.user, key.weight) != key.weight:
                raise ValueError(f"keys of user {key.user!r} have different weights")
