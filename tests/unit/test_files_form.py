"""The form that uploads a file: the same in any pieces, and no bytes but a refusal."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from common.intake.answers import Refusal
from gateway.files_form import Asked, Form
from tests.support.files import BOUNDARY, FORM, field_part, file_part, form

KIND = FORM[1].encode()
EXPIRES = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}


def parsed(pieces: list[bytes], most: int = 1 << 20) -> tuple[bytes, Asked]:
    parser = Form(KIND, most)
    content = b"".join(data for piece in pieces for data in parser.feed(piece))
    return content, parser.finish()


@settings(deadline=None)
@given(
    st.binary(max_size=200).map(lambda b: b.replace(b"--" + BOUNDARY.encode(), b"")),
    st.lists(st.integers(0, 700), max_size=8),
)
def test_any_pieces_give_the_same(content: bytes, at: list[int]) -> None:
    content += b"\r\n--a-boundary\r\n\r"
    body = form(content, "模型.jsonl", purpose="user_data", **EXPIRES)
    cuts = sorted(min(n, len(body)) for n in at)
    pieces = [body[i:j] for i, j in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert parsed(pieces) == (content, Asked("模型.jsonl", "user_data", 7_200))


@settings(deadline=None)
@given(st.data())
def test_corruption_is_at_most_refused(data: st.DataObject) -> None:
    body = bytearray(form(b"content", **EXPIRES))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(1, len(body)))
    try:
        parsed([bytes(body[i : i + size]) for i in range(0, len(body), size)])
    except Refusal as e:
        assert e.answer.status == 400 and len(e.answer.message) < 500


def test_a_header_of_a_part_without_end() -> None:
    parser = Form(KIND, 1 << 20)
    head = field_part("x", "y") + f"--{BOUNDARY}\r\nContent-Disposition: ".encode()
    tracemalloc.start()
    try:
        parser.feed(head)
        for _ in range(1_000):
            parser.feed(b"x" * 10_000)
    except Refusal as e:
        assert e.answer.status == 400
    else:
        raise AssertionError("taken")
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 1 << 20


def test_a_header_that_is_no_disposition_names_nothing() -> None:
    part = file_part(b"abc").replace(b"Content-Disposition", b"X-Other: y\r\nContent-Disposition")
    body = field_part("purpose", "batch") + part + f"--{BOUNDARY}--".encode()
    assert parsed([body])[0] == b"abc"
