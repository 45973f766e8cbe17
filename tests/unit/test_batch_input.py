"""The input files of batches: lines, errors, and bytes that come in any pieces."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.batch_input import (
    ERRORS_MAX,
    ID_CHARS_MAX,
    LINES_MAX,
    BatchError,
    Lines,
    Raw,
    Request,
    Validator,
)

CHAT = "/v1/chat/completions"
BOM = b"\xef\xbb\xbf"


def line(id: Any = "a", drop: str = "", **fields: Any) -> bytes:
    value = {"custom_id": id, "method": "POST", "url": CHAT, "body": {"model": "m1"}} | fields
    value.pop(drop, None)
    return json.dumps(value).encode()


def read(data: bytes, size: int = 1 << 30, **kw: Any) -> tuple[list[Request], Validator]:
    """A whole file, fed in pieces of this size."""
    validator = Validator(CHAT, **kw)
    found: list[Request] = []
    for start in range(0, len(data), size):
        found += validator.feed(data[start : start + size])
    found += validator.end()
    return found, validator


def only_error(data: bytes, **kw: Any) -> BatchError:
    _, validator = read(data, **kw)
    assert validator.failed == len(validator.errors) == 1
    return validator.errors[0]


def test_a_request_is_told_with_its_place() -> None:
    body = {"model": "m1", "messages": [{"role": "user", "content": "模型"}], "x": 1.50}
    first, second = line("a", body=body), line("b", body={"model": "m1", "stream": True})
    data = first + b"\n\n" + second
    (a, b), validator = read(data)
    assert (a.number, a.custom_id, a.model, a.stream) == (1, "a", "m1", False)
    assert json.loads(a.body) == body
    assert (b.number, b.stream) == (3, True)
    assert [data[r.offset : r.offset + r.size] for r in (a, b)] == [first, second]
    assert (validator.total, validator.failed, validator.errors) == (2, 0, [])


def test_bat_03_bom_crlf_blank_lines_no_final_newline() -> None:
    data = BOM + line("1") + b"\r\n\r\n  \t \r\n\n" + line("2") + b"\r\n" + BOM + line("3") + b"  "
    for size in (1, 2, 3, 7, 1 << 20):
        found, validator = read(data, size)
        assert [r.custom_id for r in found] == ["1", "2", "3"]
        assert [r.number for r in found] == [1, 5, 6], "physical lines"
        assert validator.total == 3 and validator.errors == []
        for r in found:
            assert data[r.offset : r.offset + r.size] == line(r.custom_id)
    broken = only_error(data.replace(b'"2"', b'"2'))
    assert (broken.code, broken.line) == ("invalid_json_line", 5)


@pytest.mark.parametrize("data", [b"", b"\n", BOM, BOM + b"\r\n \t\r\n"])
def test_an_empty_file(data: bytes) -> None:
    error = only_error(data)
    assert (error.code, error.line, error.param) == ("empty_file", None, None)


BAD: list[tuple[bytes, str, str | None]] = [
    (b"{", "invalid_json_line", None),
    (b"[]", "invalid_json_line", None),
    (b"null", "invalid_json_line", None),
    (b'"x"', "invalid_json_line", None),
    (line() + line("b"), "invalid_json_line", None),
    (line()[:-1] + b',"x":NaN}', "invalid_json_line", None),
    (line()[:-1] + b',"x":"\xff"}', "invalid_json_line", None),
    (line()[:-1] + b',"x":"\x00"}', "invalid_json_line", None),
    (b'{"custom_id":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "invalid_json_line", None),
    (line("\ud800"), "invalid_json_line", None),
    (line(drop="custom_id"), "missing_required_parameter", "custom_id"),
    (line(None), "missing_required_parameter", "custom_id"),
    (line(""), "missing_required_parameter", "custom_id"),
    (line(7), "invalid_type", "custom_id"),
    (line(["a"]), "invalid_type", "custom_id"),
    (line("x" * (ID_CHARS_MAX + 1)), "string_above_max_length", "custom_id"),
    (line(drop="method"), "missing_required_parameter", "method"),
    (line(method=1), "invalid_type", "method"),
    (line(method="GET"), "invalid_method", "method"),
    (line(method="post"), "invalid_method", "method"),
    (line(drop="url"), "missing_required_parameter", "url"),
    (line(url=None), "missing_required_parameter", "url"),
    (line(url={}), "invalid_type", "url"),
    (line(url="/v1/embeddings"), "url_mismatch", "url"),
    (line(url=CHAT + "/"), "url_mismatch", "url"),
    (line(drop="body"), "missing_required_parameter", "body"),
    (line(body=None), "missing_required_parameter", "body"),
    (line(body=[]), "invalid_type", "body"),
    (line(body="x"), "invalid_type", "body"),
    (line(body={}), "missing_required_parameter", "body.model"),
    (line(body={"model": ""}), "missing_required_parameter", "body.model"),
    (line(body={"model": 1}), "invalid_type", "body.model"),
    (line(body={"model": "nope"}), "model_not_found", "body.model"),
]


@pytest.mark.parametrize(("bad", "code", "param"), BAD)
def test_a_line_that_is_wrong(bad: bytes, code: str, param: str | None) -> None:
    data = line("1") + b"\n\n" + bad + b"\n" + line("2")
    known = {"one_model": False, "usable": lambda model: model == "m1"}
    found, validator = read(data, **known)
    assert [r.custom_id for r in found] == ["1", "2"], "the others are read all the same"
    (error,) = validator.errors
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert error.message and "\n" not in error.message and len(error.message) < 400
    assert validator.total == 3


def test_bat_01_a_custom_id_twice() -> None:
    data = b"\n".join(line(i) for i in ("a", "b", "c", "b"))
    error = only_error(data)
    assert (error.code, error.line, error.param) == ("duplicate_custom_id", 4, "custom_id")


def test_bat_11_mixed_models() -> None:
    data = line("1") + b"\n" + line("2", body={"model": "m2"}) + b"\n" + line("3")
    error = only_error(data)
    assert (error.code, error.line, error.param) == ("model_mismatch", 2, "body.model")
    found, validator = read(data, one_model=False)
    assert [r.model for r in found] == ["m1", "m2", "m1"] and not validator.failed


def test_a_line_that_is_too_long() -> None:
    long = line("long", body={"model": "m1", "x": "x" * 5_000})
    data = line("1") + b"\n" + long + b"\n" + line("2")
    for size in (1, 100, 1 << 20):
        found, validator = read(data, size, line_bytes_max=2_000)
        assert [r.number for r in found] == [1, 3]
        (error,) = validator.errors
        assert error.code == "invalid_json_line" and "2000 bytes" in error.message
        assert error.line == 2 and data[found[1].offset :] == line("2")
    exact, validator = read(data, line_bytes_max=len(long))
    assert len(exact) == 3 and not validator.failed


def test_too_many_requests() -> None:
    data = b"\n".join(line(str(i)) for i in range(5))
    found, validator = read(data, lines_max=5)
    assert len(found) == 5 and not validator.failed
    found, validator = read(data + b"\n" + line("5") + b"\n{\n{\n", 10, lines_max=5)
    (error,) = validator.errors
    assert (error.code, error.line) == ("too_many_tasks", None)
    assert validator.full and list(validator.feed(line("6") + b"\n")) == []


def test_the_limit_of_openai() -> None:
    validator = Validator(CHAT)
    blob = b"".join(line(str(i)) + b"\n" for i in range(LINES_MAX))
    assert sum(1 for _ in validator.feed(blob)) == LINES_MAX and not validator.failed
    assert list(validator.feed(line("more") + b"\n")) == []
    assert validator.errors[0].code == "too_many_tasks"


def test_errors_are_bounded_and_counted() -> None:
    found, validator = read(b"{\n" * 5_000 + line())
    assert len(validator.errors) == ERRORS_MAX and validator.failed == 5_000
    assert [e.line for e in validator.errors] == list(range(1, ERRORS_MAX + 1))
    assert len(found) == 1 and validator.total == 5_001


def test_memory_is_bounded() -> None:
    """Neither an endless line nor many requests are kept."""
    validator = Validator(CHAT, line_bytes_max=100_000)
    piece = b"x" * 50_000
    tracemalloc.start()
    try:
        for _ in range(400):
            list(validator.feed(piece))
        for i in range(2_000):
            body = {"model": "m1", "x": "x" * 10_000}
            list(validator.feed(b"\n" + line(f"{i}" * 50, body=body)))
        list(validator.end())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20
    assert validator.total == 2_001 and validator.failed == 1


def test_a_reader_begins_again_at_any_line() -> None:
    data = BOM + line("1") + b"\r\n\n" + line("2") + b"\n" + line("3")
    whole = [*(lines := Lines()).feed(data), *lines.end()]
    for raw in whole:
        again = Lines(number=raw.number, offset=raw.offset)
        assert [*again.feed(data[raw.offset :]), *again.end()] == whole[whole.index(raw) :]


LINE = st.one_of(
    st.sampled_from([b"", b" \t", BOM, b"{", b"null", line("a"), line("b"), line("c") + b"\r"]),
    st.binary(max_size=30),
)


def outcome(validator: Validator, found: list[Request]) -> Any:
    return found, validator.errors, validator.failed, validator.total, validator.full


@settings(deadline=None)
@given(st.lists(LINE, max_size=8), st.booleans(), st.data())
def test_any_pieces_give_the_same(lines: list[bytes], ends: bool, data: st.DataObject) -> None:
    text = b"\n".join(lines) + b"\n" * ends
    kw: dict[str, Any] = {"line_bytes_max": 90, "lines_max": 5}
    found, validator = read(text, **kw)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    again, pieces = Validator(CHAT, **kw), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += again.feed(text[start:end])
    pieces += again.end()
    assert outcome(again, pieces) == outcome(validator, found)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b), max_size=8))
def test_lines_are_those_of_the_file(parts: list[bytes]) -> None:
    data = b"\n".join(parts)
    lines = Lines()
    found = [*lines.feed(data), *lines.end()]
    wanted = []
    for number, part in enumerate(data.split(b"\n"), 1):
        text = part.removeprefix(BOM).strip(b" \t\r\v\f")
        if text:
            wanted.append((number, text))
    assert [(r.number, r.text) for r in found] == wanted
    assert all(r.text and data[r.offset : r.offset + len(r.text)] == r.text for r in found)


@settings(deadline=None)
@given(st.binary(max_size=400))
@example(
    b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"\\ud800"}}'
)
@example(b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":1e999}')
def test_no_bytes_raise(data: bytes) -> None:
    read(data, 7)


@settings(deadline=None)
@given(st.data())
def test_no_corruption_raises(data: st.DataObject) -> None:
    text = bytearray(b"\n".join(line(str(i)) for i in range(4)))
    for _ in range(data.draw(st.integers(1, 6))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    found, validator = read(bytes(text))
    assert len(found) + validator.failed - (validator.total == 0) == validator.total
    for error in validator.errors:
        msgspec.json.encode(error)


def test_raw_tells_a_line_too_long_from_one_that_is_not_there() -> None:
    lines = Lines(3)
    assert [*lines.feed(b"abcd\nabc\n"), *lines.end()] == [Raw(1, 0, None), Raw(2, 5, b"abc")]
