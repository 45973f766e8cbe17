"""What is read of a request body, and what is changed in it."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.intake import body
from common.intake.answers import Refusal

CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}


def encoded(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def refused(data: bytes) -> tuple[int, str | None, str | None]:
    """(status, param, code) of the refusal."""
    with pytest.raises(Refusal) as caught:
        body.read(data)
    answer = caught.value.answer
    return answer.status, answer.param, answer.code


# --- any JSON

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=3), inner,
                      max_size=3),
    max_leaves=8,
)  # fmt: skip
names = st.sampled_from(["a", "b", "c", "é", "", '"', "\\", "a b", "{", "}"])
members = st.lists(st.tuples(names, values), max_size=6)
spaces = st.sampled_from(["", " ", "\n\t", "\r\n  "])


def spelled(pairs: list[tuple[str, Any]], space: str, ascii_only: bool) -> bytes:
    """An object of these members, equal names included."""
    between = f"{space},{space}".join(
        f"{json.dumps(k, ensure_ascii=ascii_only)}{space}:{space}"
        f"{json.dumps(v, ensure_ascii=ascii_only)}"
        for k, v in pairs
    )
    return f"{space}{{{space}{between}{space}}}{space}".encode()


@given(members, spaces, st.booleans())
def test_equal_names_are_found_exactly(
    pairs: list[tuple[str, Any]], space: str, ascii_only: bool
) -> None:
    data = spelled(pairs, space, ascii_only)
    seen: list[list[tuple[str, Any]]] = []

    def oracle(found: list[tuple[str, Any]]) -> dict[str, Any]:
        seen.append(found)
        return dict(found)

    json.loads(data, object_pairs_hook=oracle)
    top = [name for name, _ in seen[-1]]  # the outermost object is read last
    if len(set(top)) == len(top):
        assert {k: json.loads(bytes(v)) for k, v in body.read_top(data).items()} == dict(pairs)
    else:
        with pytest.raises(Refusal) as caught:
            body.read_top(data)
        assert caught.value.answer.code == "duplicate_name"


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"a":12}',
        b'{"a":12,"a":1}',
        b'{"a":1,"\\u0061":1}',
        b'{"a":{"x":1},"b":2,"a":{"x":1}}',
        b'{"a":"x,y","a":"x"}',
        b'{"":0,"":0}',
    ],
)
def test_equal_names_that_look_alike(data: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        body.read_top(data)
    assert caught.value.answer.code == "duplicate_name"


@given(st.dictionaries(names, values, max_size=5), st.booleans(), st.booleans(), st.integers(-9, 9))
def test_edits_leave_everything_else_alone(
    others: dict[str, Any], wants_usage: bool, aliased: bool, priority: int
) -> None:
    sent = {"model": "m1", **others, "priority": priority, "x": 1.0, "big": 10**30}
    data = json.dumps(sent).encode()
    fields = body.read(data)
    after = body.edited(fields, data, model="real" if aliased else "m1", wants_usage=wants_usage)
    expected = {**sent, "model": "real" if aliased else "m1"}
    del expected["priority"]
    if wants_usage:
        expected["stream_options"] = {"include_usage": True}
    assert json.loads(after) == expected
    assert b'"x":1.0' in after and b'"big":1' + b"0" * 30 in after


def test_nothing_to_change_means_the_same_bytes() -> None:
    data = b' {"model" : "m1", "n":\t1.50, "stream_options": {"include_usage": true}} '
    data = data.replace(b'"n":\t1.50', b'"temperature":\t1.50')
    fields = body.read(data)
    assert body.edited(fields, data, model="m1", wants_usage=True) is data


def test_usage_is_added_to_the_options_that_are_there() -> None:
    data = encoded(
        stream=True, stream_options={"continuous_usage_stats": True, "include_usage": False}
    )
    fields = body.read(data)
    assert not fields.include_usage
    after = json.loads(body.edited(fields, data, model="m1", wants_usage=True))
    assert after["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_null_options_are_no_options() -> None:
    data = encoded(stream=True, stream_options=None)
    after = json.loads(body.edited(body.read(data), data, model="m1", wants_usage=True))
    assert after["stream_options"] == {"include_usage": True}


# --- what is refused

MALFORMED = [
    b"", b"{", b"null", b"[]", b'"x"', b"1e999", b'{"model":}', b"{}{}", b'{"model":"m1"}x',
    b'{"model":"m1","a":NaN}', b'{"model":"m1","a":[-Infinity]}', b'{"model":"m1","a":01}',
    b'{"model":"m1",}', b"{'model':'m1'}", b'\xef\xbb\xbf{"model":"m1"}',
    b'{"model":"m1","a":"\\x"}', b'{"model":"m1","a":"\n"}', b'{"model":"m1","a":"\\ud800"}',
]  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED, ids=repr)
def test_malformed_json(data: bytes) -> None:
    assert refused(data) == (400, None, "invalid_json")


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]
)
def test_invalid_utf8_wherever_it_stands(text: bytes) -> None:
    for where in (b'{"model":"m1","a":"%s"}', b'{"model":"m1","%s":1}', b'{"model":"%s"}'):
        assert refused(where % text)[0] == 400
    long = b'{"model":"m1","a":"%s"}' % (b"\xc3\xa4" * 100_000 + text)
    assert refused(long)[2] == "invalid_utf8"


def test_characters_cut_by_the_piecewise_check_are_valid() -> None:
    for shift in range(4):
        text = "x" * shift + "𝐭" * 100_000
        assert body.read(encoded(user=text)).user == text
        assert body.read(json.dumps({**CHAT, "a": text}, ensure_ascii=False).encode()).model == "m1"


WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "100", True, [1], 10**30],
    "max_completion_tokens": [0, "1", False],
    "stream": [1, "true", {}],
    "stream_options": [1, "x", []],
    "user": [123, {"device_id": "x"}, ["a"], True],
    "n": [0, 129, 1.0, "1", True],
    "priority": ["high", 1.5, 10**30, True, []],
    "service_tier": [1, ["flex"]],
    "model": [None, "", 1, ["m1"], {}],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in WRONG.items() for v in vs])
def test_wrong_types_name_their_field(field: str, value: Any) -> None:
    assert refused(encoded(**{field: value}))[:2] == (400, field)


def test_a_wrong_option_names_the_options() -> None:
    assert refused(encoded(stream_options={"include_usage": 1}))[:2] == (400, "stream_options")


def test_a_missing_model_names_it() -> None:
    assert refused(b"{}")[:2] == (400, "model")


def test_nulls_are_absent() -> None:
    nothing = dict.fromkeys(
        ("stream", "max_tokens", "max_completion_tokens", "stop", "n", "user", "tools",
         "stream_options", "temperature", "priority", "service_tier")
    )  # fmt: skip
    fields = body.read(encoded(**nothing))
    plain = body.read(encoded())
    for name in ("model", "stream", "include_usage", "user", "max_output", "n", "service_tier"):
        assert getattr(fields, name) == getattr(plain, name)


def test_what_is_read() -> None:
    fields = body.read(
        encoded(stream=True, user="ü", n=3, max_tokens=5, max_completion_tokens=7,
                service_tier="flex", stream_options={"include_usage": True})
    )  # fmt: skip
    assert (fields.stream, fields.user, fields.n, fields.max_output) == (True, "ü", 3, 7)
    assert (fields.service_tier, fields.include_usage) == ("flex", True)
    assert body.read(encoded(user="")).user is None


# --- depth and size


def nested(levels: int, opening: str, closing: str) -> bytes:
    """A body whose deepest value is `levels` deep, the body itself counted."""
    return f'{{"model":"m1","x":{opening * (levels - 1)}1{closing * (levels - 1)}}}'.encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('{"a":[', "]}")])
def test_nesting_is_limited_exactly(opening: str, closing: str) -> None:
    each = opening.count("[") + opening.count("{")
    most = (body.NESTING_MAX - 1) // each + 1
    assert body.read(nested(most, opening, closing)).model == "m1"
    for levels in (most + 1, most + 2, 1_000, 20_000, 60_000):
        assert refused(nested(levels, opening, closing))[2] == "nesting_too_deep"


def test_brackets_that_never_close() -> None:
    assert refused(b'{"model":"m1","x":' + b"[" * 100_000)[0] == 400
    assert refused(b'{"model":"m1","x":' + b'{"a":' * 100_000)[0] == 400


def test_brackets_inside_strings_are_text() -> None:
    text = '[{"' * 500 + "\\" * 3 + '"}]' * 7
    assert body.read(encoded(user=text)).user == text
    deep = json.dumps({**CHAT, "user": text, "x": json.loads("[" * 100 + "]" * 100)})
    assert body.read(deep.encode()).user == text


def test_wide_bodies_are_fine() -> None:
    fields = body.read(encoded(x=[[i] for i in range(5_000)], y=[{"a": "\\" * 9}] * 500))
    assert fields.model == "m1"


@pytest.mark.parametrize(
    "wide",
    [
        b",".join(b'"%d":1' % i for i in range(200_001)),
        b'"x":[' + b",".join([b"{}"] * 200_001) + b"]",
        b'"x":[' + b",".join([b'""'] * 200_001) + b"]",
    ],
    ids=["members", "objects", "strings"],
)
def test_what_would_fill_the_memory_is_refused(wide: bytes) -> None:
    assert refused(b'{"model":"m1",' + wide + b"}")[2] == "too_many_values"


def test_a_large_picture_costs_no_copy() -> None:
    data = encoded(x="A" * (12 << 20))
    tracemalloc.start()
    try:
        body.read(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
