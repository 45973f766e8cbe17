"""All settings: their types, limits and defaults. `common/config.py` reads them."""

from typing import Annotated, Literal

import msgspec

from common.batch_settings import BatchSettings
from common.job_settings import JobSettings
from common.key_settings import KeySettings, check_keys
from common.keys import Policy
from common.setting_types import (
    Bytes,
    Count,
    Ms,
    Name,
    Port,
    PriorityClass,
    Seconds,
    is_address,
    is_header,
)
from common.store_settings import StoreSettings


class RedisSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the broker is."""

    url: str | None = None
    """redis://, rediss:// or unix://; absent: the embedded broker (`fairlane up` only)."""
    command_timeout_s: Seconds = 2.0
    """A command without an answer for so long costs the connection."""


class BackendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine server."""

    url: str
    """http:// or https:// with host and port, without a path."""
    engine: Literal["auto", "vllm", "sglang", "tgi", "llamacpp", "trtllm", "none"] = "auto"
    """What it is, and so what its metrics page says and how it refuses; `auto`: recognised by its
    page; `none`: without metrics, so that it is sent only what Fairlane's own counts allow."""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    """The engine's slots, where known."""
    api_key: str | None = None
    """Sent to the engine as a bearer token."""
    models: Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)] = ()
    """The models it serves, whether it lists them or not; empty: those of its `/v1/models`."""
    resolve: bool = False
    """Whether its host is a name with several addresses: each is a backend of its own."""

    @property
    def address(self) -> str:
        """What tells one backend from another: scheme, host and port."""
        return self.url.rstrip("/")

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a backend's url begins with http:// or https://, not {self.url!r}")
        if len(self.url) > 1_024:
            raise ValueError("a backend's url has at most 1024 characters")
        if not is_address(self.url):
            raise ValueError(f"a backend's url is scheme, host and port alone, not {self.url!r}")
        if not is_header(self.api_key or ""):
            raise ValueError("a backend's api_key is of printable ASCII characters alone")


class ClassSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One priority class of one model. What is absent is as the gateway has it, or no limit."""

    queue_limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    """Admit while fewer wait in the engine; default 3, for batch 1."""
    wait_s: Seconds | None = None
    """A job may wait in the queue for so long; absent: `gateway.wait_<class>_s`."""
    inflight_max: Count | None = None
    """Most jobs of the class in flight, over all backends of the model."""
    user_inflight_max: Count | None = None
    """Most jobs that one user may have in flight, of any class, for another of this class to be
    admitted. Of the people that divide a key's share each has this limit."""
    jobs_max: Count | None = None
    """Most jobs of one user waiting in this class; absent: as the gateway has it."""
    tpot_ms: Annotated[float, msgspec.Meta(ge=1, le=60_000)] | None = None
    """Target of time per output token: jobs in flight at each engine are limited so that the mean
    gap between tokens, over 2 s, stays below it nine tenths of the time; while it is above, none of
    the class is sent there, unless nothing is in flight. Absent: no target (docs/admission.md)."""


LEAST = 0.001
"""The greater of two weights or prices is no smaller, so that every job has a cost."""


class TokenWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a token costs with `fairness = "tokens"`, relative to each other.

    The defaults are the Virtual Token Counter's 1 and 2 (Sheng et al., OSDI 2024, arXiv
    2401.00588), with input from the engine's cache at a tenth.
    """

    input: Annotated[float, msgspec.Meta(ge=0, le=1_000)] = 1.0
    cached: Annotated[float, msgspec.Meta(ge=0, le=1_000)] = 0.1
    """Input tokens that the engine found in its cache."""
    output: Annotated[float, msgspec.Meta(ge=0, le=1_000)] = 2.0

    def __post_init__(self) -> None:
        if self.cached > self.input:
            raise ValueError("a cached token's weight may not be above that of an input token")
        if max(self.input, self.output) < LEAST:
            raise ValueError(f"one of the weights of input and output is at least {LEAST}")


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model's prices with `fairness = "price"`, in any currency, per million tokens."""

    input: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
    cached_input: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    """Of input tokens that the engine found in its cache; absent: as `input`."""
    output: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]

    def __post_init__(self) -> None:
        if self.cached_input is not None and self.cached_input > self.input:
            raise ValueError("the price `cached_input` may not be above `input`")
        if max(self.input, self.output) < LEAST:
            raise ValueError(f"one of the prices `input` and `output` is at least {LEAST}")


Fairness = Literal["requests", "tokens", "time", "price", "kv"]
_NO_CLASS = ClassSettings()


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model: its backends and its fair order."""

    aliases: list[Name] = []
    """Other names it answers to."""
    backends: list[BackendSettings] = []
    fairness: Fairness = "tokens"
    """What a job costs its user: `common/cost.py` has the formulas."""
    tokens: TokenWeights = TokenWeights()
    price: Price | None = None
    """Required with `fairness = "price"`."""
    class_policy: Policy = "weighted"
    """`weighted`: interactive and standard are one order, batch is one behind it. `strict`: each
    class is an order of its own. A lower order runs when the higher have nothing waiting."""
    interactive_weight: Annotated[float, msgspec.Meta(ge=1, le=1_000)] = 4.0
    """With `weighted`: a user's interactive jobs are charged at this fraction of their cost."""
    floor_share: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.02
    """Share of what an order is charged that each lower one which waits may run all the same."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """Slots of all its backends together, where known; absent: their `max_num_seqs`, or learned."""
    reserved_slots: Annotated[int, msgspec.Meta(ge=0, le=100_000)] | None = None
    """Slots kept for users with nothing in flight; absent: one in 32, 1 of 16 to 31, 0 of fewer."""
    batch_headroom: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1 / 16
    """Share of each engine's slots, rounded up, that batch leaves free for others, where slots are
    known."""
    batch_yields: bool = True
    """Whether batch jobs of which no byte has come are taken out of an engine again where jobs of
    other classes find all slots taken; each at most three times."""
    engine_priority: bool = False
    """Whether its engines order their own queue by priority (vLLM's `--scheduling-policy
    priority`): then each request is sent with one."""
    prefix_affinity: bool = True
    """Whether a job goes to the backend that has computed the most of how its prompt begins, while
    that one has not much more in flight than the others. Of no effect with one backend."""
    prefix_lookahead: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    """A user's job may go before so many earlier ones of the user and class where a backend has
    computed how its prompt begins, and each lets so many go before it in all. 0: first in, first
    out. Of no effect without `prefix_affinity`."""
    class_: dict[PriorityClass, ClassSettings] = msgspec.field(default_factory=dict, name="class")

    def __post_init__(self) -> None:
        if self.fairness == "price" and self.price is None:
            raise ValueError('fairness = "price" needs `price`')
        if self.slots is not None and (self.reserved_slots or 0) >= self.slots:
            raise ValueError("`reserved_slots` is below `slots`")
        if any(backend.models for backend in self.backends):
            raise ValueError("a backend's `models` is for [[backends]]: here the model is named")

    def of_class(self, cls: str) -> ClassSettings:
        """The settings of a class; nothing set where it is not named."""
        return self.class_.get(cls, _NO_CLASS)  # type: ignore[call-overload,no-any-return]

    def queue_limit(self, cls: str) -> int:
        """How many jobs may wait in one backend while a job of `cls` is admitted."""
        limit = self.of_class(cls).queue_limit
        return limit if limit is not None else 1 if cls == "batch" else 3

    def tpot_s(self, cls: str) -> float | None:
        """`tpot_ms` of a class in seconds; None: no limit."""
        ms = self.of_class(cls).tpot_ms
        return None if ms is None else ms / 1000


class GatewaySettings(JobSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: Port = 8000
    insecure: bool = False
    """Allow binding to other than loopback without keys."""
    body_max_bytes: Bytes = 64 << 20
    cors_origins: list[str] = msgspec.field(default_factory=list)
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
    key_bytes_max: Bytes = 512 << 20
    """Most bytes waiting of all people that divide one key's share."""
    model_jobs_max: Count = 20_000
    model_bytes_max: Bytes = 1 << 30
    wait_for_backend: bool = True
    """Whether requests for a model none of whose backends answers wait for one, as long as their
    class may wait; else they are refused with 503 at once."""
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
    resolve_s: Seconds = 10.0
    """Names of backends with `resolve` are looked up this often."""
    remove_s: Seconds = 300.0
    """A backend that was removed may go on with what it runs; jobs of which nothing has come after
    this long go back to the queue."""
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
    store: StoreSettings = StoreSettings()
    batch: BatchSettings = BatchSettings()
    keys: list[KeySettings] = []
    models: dict[Name, ModelSettings] = {}
    backends: list[BackendSettings] = []
    """Backends whose models are read from their `/v1/models`, unless they are named."""
    backends_file: str | None = None
    """A TOML or JSON file of more `backends`, read again whenever it changes."""

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for model, settings in self.models.items():
            for name in (model, *settings.aliases):
                if name in seen:
                    raise ValueError(f"models {seen[name]!r} and {model!r} share the name {name!r}")
                seen[name] = model
        check_keys(self.keys)
