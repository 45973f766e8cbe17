"""The bytes between processes, kept: a change here is a change of VERSION, or a field at an end."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import wire
from common.errors import WireError
from common.outcomes import Outcome
from common.settings import BackendSettings
from common.wire import (
    VERSION,
    Ack,
    Alive,
    Announcement,
    Batch,
    Cancel,
    Control,
    Controls,
    Data,
    End,
    Frame,
    Head,
    JobMeta,
    Ping,
    Placed,
    Resend,
    ServedBackend,
    ServedModel,
    Usage,
)

USAGE = Usage(5, 2, 7)
FRAMES: list[tuple[Frame, str]] = [
    (
        Head("j", 3, 0, 200, [("content-type", "text/event-stream")], True),
        "97a168a16a0300ccc89192ac636f6e74656e742d74797065b1746578742f6576656e742d73747265616dc3",
    ),
    (Data("j", 3, 1, b"data: {}\n\n", False), "96a164a16a0301c40a646174613a207b7d0a0ac2"),
    (End("j", 3, 2, Outcome.FINISHED, "", USAGE), "97a165a16a0302a866696e6973686564a093050207"),
    (
        End("j", 3, -1, Outcome.ORPHANED, "gone", None),
        "97a165a16a03ffa86f727068616e6564a4676f6e65c0",
    ),
    (Alive([("j", 3, 1)]), "92a1619193a16a0301"),
    (Ping(7), "92a17007"),
]
CONTROLS: list[tuple[Control, str]] = [
    (Cancel("j", 0), "92019193a163a16a00"),
    (Ack("g1", [("j", 3, 1)], [("j", 3, 10)]), "92019194a16ba267319193a16a03019193a16a030a"),
    (Resend("g1", "j", 3, 2), "92019195a172a26731a16a0302"),
]
META = JobMeta(
    path="/v1/chat/completions", dialect="chat", stream=True, wants_usage=False, choices=1,
    input=5, max_output=100, prefix=b"\1\2\3\4\5\6\7\10",
)  # fmt: skip
META_BYTES = (
    "9b01b42f76312f636861742f636f6d706c6574696f6e73a463686174c3c2010564c408010203040506070800a0"
)
ANNOUNCEMENT = Announcement(
    VERSION, 1_790_000_000_000,
    [ServedModel("m", ["a"], True, 1_790_000_000, 1.5, 2, {"batch": "KV"})],
    [ServedBackend("http://10.0.0.1:8000", "http://gpu:8000", "config", "active", ["m"], True, 3)],
)  # fmt: skip
OLD_ANNOUNCEMENT_BYTES = "9301cf000001a0c4506c009195a16d91a161c3ce6ab13b80cb3ff8000000000000"
"""As an older process wrote it."""
ANNOUNCEMENT_BYTES = (
    "9401cf000001a0c4506c009197a16d91a161c3ce6ab13b80cb3ff80000000000000281a56261746368a24b56"
    "9197b4687474703a2f2f31302e302e302e313a38303030af687474703a2f2f6770753a38303030a6636f6e66"
    "6967a661637469766591a16dc303"
)
GPU = BackendSettings(url="http://gpu:8000", models=("m",), engine="vllm")
PLACED = Placed(VERSION, 1_790_000_000_000, GPU)
PLACED_BYTES = (
    "9301cf000001a0c4506c0086a375726caf687474703a2f2f6770753a38303030a6656e67696e65a4766c6c6d"
    "ac6d61785f6e756d5f73657173c0a76170695f6b6579c0a66d6f64656c7391a16da77265736f6c7665c2"
)
DECODERS = [
    wire.decode_batch,
    wire.decode_controls,
    wire.decode_meta,
    wire.decode_announcement,
    wire.decode_placed,
]


@pytest.mark.parametrize(("frame", "golden"), FRAMES)
def test_the_bytes_of_each_frame(frame: Frame, golden: str) -> None:
    assert wire.encode_frame(frame).hex() == golden
    batch = wire.encode_batch("d1", [bytes.fromhex(golden)])
    assert wire.decode_batch(batch) == Batch(VERSION, "d1", [frame])


def test_the_bytes_of_a_batch() -> None:
    frames = [wire.encode_frame(f) for f, _ in FRAMES]
    batch = wire.encode_batch("d1", frames)
    assert batch.hex() == "9301a2643196" + "".join(golden for _, golden in FRAMES)
    assert wire.decode_batch(batch).frames == [f for f, _ in FRAMES]
    assert wire.decode_batch(wire.encode_batch("d1", [])) == Batch(VERSION, "d1", [])


@pytest.mark.parametrize(("control", "golden"), CONTROLS)
def test_the_bytes_of_each_control(control: Control, golden: str) -> None:
    assert wire.encode_controls([control]).hex() == golden
    assert wire.decode_controls(bytes.fromhex(golden)) == Controls(VERSION, [control])


def test_the_bytes_of_what_redis_keeps() -> None:
    assert wire.encode_meta(META).hex() == META_BYTES
    assert wire.decode_meta(bytes.fromhex(META_BYTES)) == META
    assert wire.encode_announcement(ANNOUNCEMENT).hex() == ANNOUNCEMENT_BYTES
    assert wire.decode_announcement(bytes.fromhex(ANNOUNCEMENT_BYTES)) == ANNOUNCEMENT
    assert wire.encode_placed(PLACED).hex() == PLACED_BYTES
    assert wire.decode_placed(bytes.fromhex(PLACED_BYTES)) == PLACED
    assert wire.decode_announcement(bytes.fromhex(OLD_ANNOUNCEMENT_BYTES)).backends == []
    assert msgspec.msgpack.encode(USAGE).hex() == "93050207"


def test_every_kind_of_frame_and_control_is_kept_above() -> None:
    assert {type(f) for f, _ in FRAMES} == set(Frame.__args__)
    assert {type(c) for c, _ in CONTROLS} == set(Control.__args__)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (wire.decode_batch, (VERSION + 1, "d1", [])),
        (wire.decode_controls, (VERSION + 1, [])),
        (wire.decode_meta, (VERSION + 1, "/v1", "chat", True, True, 1, 0, 0)),
        (wire.decode_announcement, (VERSION + 1, 0, [])),
        (wire.decode_batch, (0, "d1", [])),
        (wire.decode_batch, (VERSION + 1, {"another": "shape"})),
    ],
)
def test_another_version_is_refused(decode: object, message: object) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(message))  # type: ignore[operator]


@pytest.mark.parametrize("decode", DECODERS)
def test_a_field_more_at_the_end_is_not_another_version(decode: object) -> None:
    golden = {
        wire.decode_batch: wire.encode_batch("d1", []),
        wire.decode_controls: wire.encode_controls([]),
        wire.decode_meta: wire.encode_meta(META),
        wire.decode_announcement: wire.encode_announcement(ANNOUNCEMENT),
        wire.decode_placed: wire.encode_placed(PLACED),
    }[decode]  # type: ignore[index]
    longer = [*msgspec.msgpack.decode(golden), "new"]
    assert decode(msgspec.msgpack.encode(longer)) == decode(golden)  # type: ignore[operator]


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=64))
def test_garbage_is_refused(decode: object, data: bytes) -> None:
    """A message cut short, or any bytes: a message of this version or WireError, nothing else."""
    try:
        message = decode(data)  # type: ignore[operator]
    except WireError:
        return
    assert message.version == VERSION


@pytest.mark.parametrize("decode", DECODERS)
def test_a_message_cut_short_is_refused(decode: object) -> None:
    whole = {
        wire.decode_batch: wire.encode_batch("d1", [bytes.fromhex(g) for _, g in FRAMES]),
        wire.decode_controls: wire.encode_controls([c for c, _ in CONTROLS]),
        wire.decode_meta: wire.encode_meta(META),
        wire.decode_announcement: wire.encode_announcement(ANNOUNCEMENT),
        wire.decode_placed: wire.encode_placed(PLACED),
    }[decode]  # type: ignore[index]
    for size in range(len(whole)):
        with pytest.raises(WireError):
            decode(whole[:size])  # type: ignore[operator]
    for bad in (b"\xc1", b"\xdd\xff\xff\xff\xff", b"{}", whole + b"\x00", b"\xff" * 9):
        with pytest.raises(WireError):
            decode(bad)  # type: ignore[operator]


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        wire.decode_batch(b"\x94\x01\xa2d1\x90" + b"\x91" * 100_000)


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_data_goes_through_unchanged(parts: list[bytes]) -> None:
    frames: list[Frame] = [Data("j", 1, n, part, n % 2 == 0) for n, part in enumerate(parts)]
    batch = wire.encode_batch("d1", [wire.encode_frame(f) for f in frames])
    assert wire.decode_batch(batch).frames == frames
