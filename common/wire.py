"""Every struct that crosses a process, its encoding and its version.

Frames go from a dispatcher to a gateway replica (channel `fl:reply:<replica>`), controls the other
way (`fl:control:<dispatcher>`). All are msgpack arrays: a field may be added at the end only, and
any other change raises VERSION. `tests/unit/test_wire.py` keeps the bytes.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from common.errors import WireError
from common.outcomes import Outcome
from common.settings import BackendSettings

VERSION = 1
"""Raised with every change that an older process could misread."""

REASON_MAX = 160
"""Letters that say why nothing is sent."""
FRAME_BYTES_MAX = 256 * 1024
"""The most payload one `Data` frame carries."""

PREFIX_HASH_BYTES = 8
PREFIX_HASHES_MAX = 24
"""Most hashes of one prompt's beginning; what is after them is not looked at."""


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens as the engine counted them; `cached` is the part of `input` it had at hand."""

    input: int
    cached: int
    output: int


class JobMeta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a dispatcher must know of a request beside its body; opaque to Redis."""

    version: int = VERSION
    path: str
    """The engine's path, such as `/v1/chat/completions`."""
    dialect: str
    """How its events are to be read: a row of the dispatcher's dialect table."""
    stream: bool
    wants_usage: bool
    """Whether the client asked for the usage event (the gateway always asks the engine)."""
    choices: int
    """How many choices (`n`, times prompts) must end before the answer is whole."""
    input: int
    """Estimated input tokens."""
    max_output: int
    """Most output tokens of all choices together, 0 when the path has none."""
    prefix: bytes = b""
    """Hashes of ever longer beginnings of its prompt, of PREFIX_HASH_BYTES each; may be none."""
    keep_ms: int = 0
    """As in NewJob, for a record that must be made again."""
    sink: str = ""


class Head(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The start of an answer: status and the headers worth passing on."""

    job: str
    attempt: int
    seq: int
    status: int
    headers: list[tuple[str, str]]
    stream: bool
    """Whether an event stream follows (else one body)."""


class Data(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """At most FRAME_BYTES_MAX of the body; `more` where an event goes on in the next frame."""

    job: str
    attempt: int
    seq: int
    data: bytes
    more: bool


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The end of a job. An orphan's end has seq -1 and ends whichever run is older."""

    job: str
    attempt: int
    seq: int
    outcome: Outcome
    message: str
    """For the client, where the outcome is an error; never an internal detail."""
    usage: Usage | None


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Once a second from each dispatcher to each replica it runs jobs for."""

    jobs: list[tuple[str, int, int]]
    """(job, attempt, last seq published), jobs whose end the replica has not received included."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A replica's message to itself, which proves that its subscription is alive."""

    number: int


Frame = Head | Data | End | Alive | Ping


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """What one PUBLISH on a reply channel carries."""

    version: int
    sender: str
    frames: list[Frame]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop a job at once; the flag in its record says the same to those who miss this."""

    job: str
    attempt: int
    """0 stops whichever run there is."""


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """What a replica has received, and what its clients have taken."""

    replica: str
    received: list[tuple[str, int, int]]
    """(job, attempt, highest seq received without a gap)."""
    taken: list[tuple[str, int, int]]
    """(job, attempt, bytes of data the client has taken since the job's start)."""


class Resend(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Send the frames of a job again, from `seq` on."""

    replica: str
    job: str
    attempt: int
    seq: int


Control = Cancel | Ack | Resend


class Controls(msgspec.Struct, frozen=True, array_like=True):
    """What one PUBLISH on a control channel carries."""

    version: int
    controls: list[Control]


class ServedModel(msgspec.Struct, frozen=True, array_like=True):
    """One model as a dispatcher serves it."""

    name: str
    aliases: list[str]
    ready: bool
    """Whether at least one backend answers."""
    created: int
    """Seconds since the epoch, for `/v1/models`."""
    drain: float
    """Jobs ended a second, over the last minute or since the first of them; 0 when unknown."""
    backends: int = 1
    """How many it has."""
    closed: dict[str, str] = {}
    """Class -> why its leader sends none of it though some wait, in at most REASON_MAX letters."""


class ServedBackend(msgspec.Struct, frozen=True, array_like=True):
    """One backend as a dispatcher uses it."""

    url: str
    name: str
    """The url as its source has it: of an address that was looked up, that of its name."""
    source: str
    """Where it comes from: `config`, `file` or `admin`."""
    state: str
    """`active`, `draining`, or `leaving`: removed, with jobs that still run."""
    models: list[str]
    reachable: bool
    """Whether it takes connections, as far as is known."""
    running: int
    """Jobs that this dispatcher runs there."""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """A dispatcher's field in `fl:models`, renewed every second."""

    version: int
    at_ms: int
    """When, by the Redis clock."""
    models: list[ServedModel]
    backends: list[ServedBackend] = []


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A field of `fl:backends`: a backend that was added by HTTP, or (None) that one is drained."""

    version: int
    at_ms: int
    """When, by the Redis clock."""
    backend: BackendSettings | None = None


T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_batch = msgspec.msgpack.Decoder(Batch)
_controls = msgspec.msgpack.Decoder(Controls)
_meta = msgspec.msgpack.Decoder(JobMeta)
_announcement = msgspec.msgpack.Decoder(Announcement)
_placed = msgspec.msgpack.Decoder(Placed)


def encode_frame(frame: Frame) -> bytes:
    """One frame's bytes, to be kept for a resend and put into batches as they are."""
    return _encoder.encode(frame)


def cut(job: str, attempt: int, seq: int, data: bytes) -> list[Data]:
    """Data as frames, numbered from `seq` on."""
    if len(data) <= FRAME_BYTES_MAX:
        return [Data(job, attempt, seq, data, False)] if data else []
    starts = range(0, len(data), FRAME_BYTES_MAX)
    return [
        Data(job, attempt, seq + n, data[i : i + FRAME_BYTES_MAX], i != starts[-1])
        for n, i in enumerate(starts)
    ]


def encode_batch(sender: str, frames: Sequence[bytes]) -> bytes:
    """A batch of frames that `encode_frame` made."""
    raw = [msgspec.Raw(f) for f in frames]
    return _encoder.encode((VERSION, sender, raw))


def encode_controls(controls: Sequence[Control]) -> bytes:
    """One message for a control channel."""
    return _encoder.encode(Controls(VERSION, list(controls)))


def encode_meta(meta: JobMeta) -> bytes:
    """The `meta` field of a job's record."""
    return _encoder.encode(meta)


def encode_announcement(announcement: Announcement) -> bytes:
    """A dispatcher's field in `fl:models`."""
    return _encoder.encode(announcement)


def encode_placed(placed: Placed) -> bytes:
    """A field of `fl:backends`."""
    return _encoder.encode(placed)


def decode_batch(data: bytes) -> Batch:
    """Raises WireError where the bytes are no batch of this version."""
    return _checked(_batch, data)


def decode_controls(data: bytes) -> Controls:
    """Raises WireError where the bytes are no controls of this version."""
    return _checked(_controls, data)


def decode_meta(data: bytes) -> JobMeta:
    """Raises WireError where the bytes are no job meta of this version."""
    return _checked(_meta, data)


def decode_announcement(data: bytes) -> Announcement:
    """Raises WireError where the bytes are no announcement of this version."""
    return _checked(_announcement, data)


def decode_placed(data: bytes) -> Placed:
    """Raises WireError where the bytes are no backend of this version."""
    return _checked(_placed, data)


def _checked(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise WireError(f"not a message of version {VERSION}: {e}") from None
    if getattr(message, "version", None) != VERSION:
        raise WireError(f"a message of another version than {VERSION}")
    return message
