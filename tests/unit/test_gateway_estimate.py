"""How many tokens a request is taken to be."""

import json
import tracemalloc
from typing import Any

import pytest

from common.intake import body, estimate
from common.intake.answers import Refusal
from common.intake.routes import ROWS, max_output

ROW = {row.path: row for row in ROWS}


def read(**fields: Any) -> body.Fields:
    return body.read(json.dumps({"model": "m1", **fields}).encode())


def chat(content: Any, **fields: Any) -> int:
    return estimate.chat(read(messages=[{"role": "user", "content": content}], **fields)).input


def test_text_counts_by_its_bytes() -> None:
    assert chat("x" * 400) == 100 + estimate.MESSAGE_TOKENS
    assert chat("") == chat(None) == estimate.MESSAGE_TOKENS
    assert chat([{"type": "text", "text": "x" * 398}]) == 100 + estimate.MESSAGE_TOKENS


def test_every_message_counts() -> None:
    messages = [{"role": "user", "content": "x" * 40}] * 10
    assert estimate.chat(read(messages=messages)).input == 10 * (10 + estimate.MESSAGE_TOKENS)


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (
            {"type": "image_url", "image_url": {"url": "data:," + "A" * 9_000}},
            estimate.IMAGE_TOKENS,
        ),
        ({"type": "input_audio", "input_audio": {"data": "A" * 9_000}}, estimate.AUDIO_TOKENS),
        ({"type": "video_url", "video_url": {}}, estimate.VIDEO_TOKENS),
        ({"type": "hologram", "data": "A" * 9_000}, estimate.OTHER_TOKENS),
        ({"type": 7}, estimate.OTHER_TOKENS),
        ({}, estimate.OTHER_TOKENS),
    ],
)
def test_parts_have_fixed_costs(part: dict[str, Any], tokens: int) -> None:
    assert chat([part]) == tokens + estimate.MESSAGE_TOKENS
    assert chat([part, part]) == 2 * tokens + estimate.MESSAGE_TOKENS


@pytest.mark.parametrize("content", [5, 1.5, True, {"a": 1}, ["text"], [None], [[]]])
def test_content_of_odd_shapes_is_the_engines_to_judge(content: Any) -> None:
    assert chat(content) >= estimate.MESSAGE_TOKENS


def test_tools_and_their_calls_count() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 400}}]
    assert chat("", tools=tools) > 100
    assert chat("", functions=tools) > 100
    call = {"role": "assistant", "content": None, "tool_calls": [{"arguments": "x" * 400}]}
    assert estimate.chat(read(messages=[call])).input > 100


@pytest.mark.parametrize("messages", [None, "hi", {}, 5, ["hi"], [None], [[]]])
def test_messages_must_be_objects(messages: Any) -> None:
    with pytest.raises(Refusal) as caught:
        estimate.chat(read(messages=messages))
    assert caught.value.answer.param == "messages"


def test_choices() -> None:
    assert estimate.chat(read(messages=[], n=3)).choices == 3
    assert estimate.completions(read(prompt=["a", "b"], n=3)).choices == 6


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        ("x" * 40, 10, 1),
        ("", 0, 1),
        (["x" * 40, "y" * 40], 20, 2),
        (['a"b\\', "{[,"], 2, 2),
        ([], 0, 1),
        ([1, 2, 3], 3, 1),
        ([[1, 2, 3], [4, 5]], 5, 2),
    ],
)
def test_prompts(prompt: Any, tokens: int, prompts: int) -> None:
    found = estimate.completions(read(prompt=prompt))
    assert found.choices == prompts
    assert abs(found.input - tokens) <= 1
    assert abs(estimate.embeddings(read(input=prompt)).input - tokens) <= 1


@pytest.mark.parametrize("prompt", [None, 5, {}, True])
def test_a_prompt_must_be_text_or_an_array(prompt: Any) -> None:
    for read_it, name in ((estimate.completions, "prompt"), (estimate.embeddings, "input")):
        with pytest.raises(Refusal) as caught:
            read_it(read(**{name: prompt}))
        assert caught.value.answer.param == name


def test_prompts_in_other_forms() -> None:
    assert estimate.completions(read(prompt_embeds="AAAA")).input == estimate.OTHER_TOKENS
    messages = [{"role": "user", "content": "x" * 400}]
    assert estimate.embeddings(read(messages=messages)).input > 100


def test_too_many_prompts() -> None:
    with pytest.raises(Refusal) as caught:
        estimate.completions(read(prompt=[[1]] * 100_001))
    assert caught.value.answer.param == "prompt"


def test_the_bound_on_output() -> None:
    row = ROW["/v1/chat/completions"]
    assert max_output(row, read(max_tokens=5), 3) == 15
    assert max_output(row, read(), 1) >= 100_000, "unknown is not small: it would be cheap"
    assert max_output(ROW["/v1/completions"], read(), 2) == 32
    assert max_output(ROW["/v1/embeddings"], read(max_tokens=5), 3) == 0


def test_base64_is_not_decoded() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (12 << 20)}}
    fields = read(messages=[{"role": "user", "content": [part]}])
    tracemalloc.start()
    try:
        assert estimate.chat(fields).input == estimate.IMAGE_TOKENS + estimate.MESSAGE_TOKENS
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
