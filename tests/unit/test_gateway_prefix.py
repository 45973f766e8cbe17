"""Hashes of how prompts begin."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.intake import body
from common.intake.prefix import BLOCK, boundaries, hashes
from common.intake.routes import ROWS
from common.wire import PREFIX_HASH_BYTES, PREFIX_HASHES_MAX

CHAT, COMPLETIONS, EMBEDDINGS, *_ = (row.prompt for row in ROWS)


def split(found: bytes) -> list[bytes]:
    size = PREFIX_HASH_BYTES
    assert len(found) % size == 0 and len(found) // size <= PREFIX_HASHES_MAX
    return [found[at : at + size] for at in range(0, len(found), size)]


def of(names: tuple[str, ...] = CHAT, model: str = "m1", **fields: Any) -> list[bytes]:
    top = body.read(json.dumps({"model": "m1", **fields}).encode()).top
    return split(hashes(model, top, names))


def chat(*contents: Any, **fields: Any) -> list[bytes]:
    messages = [{"role": "user", "content": c} for c in contents]
    return of(messages=messages, **fields)


def shared(a: list[bytes], b: list[bytes]) -> int:
    """How many hashes are equal, from the first on; afterwards none is."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_boundaries_are_a_block_apart_and_then_a_quarter_of_the_way() -> None:
    found = boundaries()
    assert len(found) == PREFIX_HASHES_MAX
    steps = [b - a for a, b in zip((0, *found), found, strict=False)]
    for at, step in zip((0, *found), steps, strict=False):
        assert step % BLOCK == 0 and step <= max(BLOCK, at / 4)
    assert found[-1] > 200 * BLOCK


def test_a_conversation_goes_on_from_the_same_beginning() -> None:
    first = chat("x" * 5_000)
    then = chat("x" * 5_000, "y" * 5_000, "z")
    assert len(first) == 4 and len(then) > len(first)
    assert shared(first, then) == len(first)


def test_each_hash_covers_all_before_it() -> None:
    one, other = chat("a" + "x" * 9_000), chat("b" + "x" * 9_000)
    assert shared(one, other) == 0
    assert len({*one, *other}) == len(one) + len(other)


def test_what_differs_after_a_boundary_changes_no_hash_before() -> None:
    one, other = chat("x" * 9_000 + "a"), chat("x" * 9_000 + "b")
    assert 0 < len(one) == shared(one, other)
    assert shared(chat("x" * 3_000 + "a" * 9_000), chat("x" * 3_000 + "b" * 9_000)) == 2


def test_the_model_the_salt_and_the_tools_are_part_of_the_beginning() -> None:
    text = "x" * 3_000
    known = [chat(text)]
    for more in (
        {"model": "m2"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]},
        {"chat_template": "t"}, {"chat_template_kwargs": {"a": 1}}, {"documents": [{"a": 1}]},
    ):  # fmt: skip
        found = chat(text, **more)
        assert found and all(shared(found, other) == 0 for other in known)
        known.append(found)
    assert chat(text, temperature=1, max_tokens=5, user="u", stream=True) == known[0]
    assert chat(text, cache_salt=None) == known[0]


def test_a_salt_is_not_taken_for_a_template() -> None:
    text = "x" * 3_000
    assert shared(chat(text, cache_salt="a"), chat(text, chat_template="a")) == 0


def test_prompts_of_completions() -> None:
    assert of(COMPLETIONS, prompt="x" * 5_000) == of(COMPLETIONS, prompt="x" * 5_000)
    one, other = of(COMPLETIONS, prompt="x" * 5_000), of(COMPLETIONS, prompt="x" * 9_000)
    assert shared(one, other) == len(one) == 4
    assert of(COMPLETIONS, prompt=list(range(1_000)))
    assert of(COMPLETIONS, prompt_embeds="x" * 5_000) == []
    assert of(EMBEDDINGS, input="x" * 5_000) == []


def test_a_short_prompt_has_none() -> None:
    assert chat("x" * 900) == chat() == of() == of(messages=None) == []


ODD: list[Any] = [
    None, "", "\u00e9" * 2_000, [], [{"type": "text", "text": "x" * 2_000}],
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 50_000}}],
    [[[[1]]]], {"a": {"b": None}}, 5, True, ["x" * 2_000, None],
]  # fmt: skip


@pytest.mark.parametrize("content", ODD)
def test_contents_of_odd_shapes_are_hashed_as_they_are(content: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y" * 2_000},
    ]
    one, more = of(messages=messages), of(messages=[*messages, messages[0]])
    assert one and shared(one, more) == len(one)
    assert of(messages=content) == of(messages=content)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
    st.text(min_size=1),
)
def test_no_body_is_too_odd(value: Any, model: str) -> None:
    fields = dict.fromkeys(("tools", "messages", "prompt", "cache_salt"), value)
    top = body.read(json.dumps({"model": "m", **fields}).encode()).top
    for row in ROWS:
        split(hashes(model, top, row.prompt))


@given(st.lists(st.text(alphabet="ab", max_size=1_500), max_size=6), st.integers(0, 5))
def test_equal_beginnings_have_equal_hashes_and_others_none(texts: list[str], change: int) -> None:
    whole = chat(*texts, "end")
    if change < len(texts):
        other = chat(*texts[:change], texts[change] + "c", *texts[change + 1 :], "end")
        before = len(json.dumps([{"role": "user", "content": t} for t in texts[: change + 1]]))
        assert shared(whole, other) <= sum(b <= before + 1 for b in boundaries())
        assert shared(whole, other) >= min(
            len(whole), sum(b <= before - len('"}]') for b in boundaries())
        )
    assert whole == chat(*texts, "end")


def test_a_huge_body_costs_no_more_than_its_beginning() -> None:
    top = body.read(
        json.dumps({"model": "m", "tools": "t" * 4_000_000, "messages": "x" * 30_000_000}).encode()
    ).top
    tracemalloc.start()
    found = split(hashes("m", top, CHAT))
    assert tracemalloc.get_traced_memory()[1] < 4 * boundaries()[-1]
    tracemalloc.stop()
    assert len(found) == PREFIX_HASHES_MAX
