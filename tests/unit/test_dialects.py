import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from dispatcher.answer import StreamRules
from dispatcher.dialects import error_event, json_to_stream, says_more_than_text

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event before the one `[DONE]`."""
    assert stream.endswith(b"\n\n") and b"\r" not in stream
    *chunks, done = stream.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    assert all(c.startswith(b"data: ") and b"\n" not in c for c in chunks)
    return [json.loads(c[6:]) for c in chunks]


def chat(message: dict[str, object], **choice: object) -> bytes:
    whole = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": [whole], "usage": usage}, indent=2).encode()


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (b'{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}', False),
        (b'{"choices":[{"delta":{"content":"a"},"finish_reason" : "stop"}]}', True),
        (b'{"choices":[{"delta":{"content":"\\"finish_reason\\": \\"x\\""}}]}', False),
        (b'{"choices":[],"usage": null}', False),
        (b'{"choices":[],"usage":\n{"prompt_tokens":1}}', True),
        (b'{"choices":[],"usage" : {}}', True),
        (b'{"error":{"message":"m"}}', True),
        (b'{"object":"error"}', True),
        (b'{"choices":[{"delta":{"content":"{\\"error\\": \\"usage\\"}"}}]}', False),
    ],
)
def test_which_events_must_be_read_shows_in_their_bytes(data: bytes, more: bool) -> None:
    assert says_more_than_text(data) is more


@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_an_error_event_and_the_end(dialect: str) -> None:
    stream = error_event(dialect, 'a "b"\n', "server_error", 500, "n")

    assert chunks_of(stream) == [
        {"error": {"message": 'a "b"\n', "type": "server_error", "param": "n", "code": 500}}
    ]


def test_a_chat_completion_becomes_a_stream() -> None:
    body = chat({"role": "assistant", "content": "héllo\n", "refusal": None}, stop_reason=7)
    begun, ended = chunks_of(json_to_stream("chat", body, wants_usage=False))

    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    delta = {"role": "assistant", "content": "héllo\n"}
    assert begun == {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": 7}
    assert ended == {**head, "choices": [end]}


def test_the_usage_event_comes_last_where_it_is_wanted() -> None:
    body = chat({"role": "assistant", "content": "a"})
    last = chunks_of(json_to_stream("chat", body, wants_usage=True))[-1]

    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    bare = body.replace(b"prompt_tokens", b"x").replace(b"completion_tokens", b"y")
    assert all("usage" not in c for c in chunks_of(json_to_stream("chat", bare, wants_usage=True)))


def test_tool_calls_are_numbered_and_their_arguments_untouched() -> None:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "ls", "arguments": ' {"a": 1e2}'}}
        for n in range(2)
    ]
    body = chat({"role": "assistant", "content": None, "tool_calls": calls})
    begun, _ = chunks_of(json_to_stream("chat", body, wants_usage=False))

    assert begun["choices"][0]["delta"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"index": 0, **calls[0]}, {"index": 1, **calls[1]}],
    }


def test_no_tool_calls_are_none() -> None:
    body = chat({"role": "assistant", "content": "a", "tool_calls": []})

    assert (
        "tool_calls" not in chunks_of(json_to_stream("chat", body, False))[0]["choices"][0]["delta"]
    )


def test_logprobs_go_with_the_text() -> None:
    body = (FIXTURES / "chat_logprobs.body").read_bytes()
    begun, ended = chunks_of(json_to_stream("chat", body, wants_usage=False))

    assert begun["choices"][0]["logprobs"] == json.loads(body)["choices"][0]["logprobs"]
    assert "logprobs" not in ended["choices"][0]


def test_each_choice_of_a_text_completion_becomes_a_chunk() -> None:
    body = (FIXTURES / "completions_batch_prompts.body").read_bytes()
    *texts, usage = chunks_of(json_to_stream("completions", body, wants_usage=True))

    assert [t["choices"] for t in texts] == [[c] for c in json.loads(body)["choices"]]
    assert usage["usage"] == json.loads(body)["usage"]


@pytest.mark.parametrize(
    ("dialect", "name"), [("chat", "chat_nonstream"), ("completions", "completions_batch_prompts")]
)
def test_a_made_stream_is_one_that_clients_and_our_own_rules_accept(
    dialect: str, name: str
) -> None:
    stream = json_to_stream(dialect, (FIXTURES / f"{name}.body").read_bytes(), wants_usage=True)

    model = ChatCompletionChunk if dialect == "chat" else Completion
    for chunk in chunks_of(stream):
        model.model_validate(chunk)
    step = StreamRules(dialect, wants_usage=True).feed(stream)
    assert (step.data, step.done, step.error) == (stream, True, None)


def test_a_choice_without_an_index_gets_its_place() -> None:
    body = b'{"choices":[{"text":"a","finish_reason":"stop"},{"text":"b","finish_reason":"stop"}]}'
    chunks = chunks_of(json_to_stream("completions", body, wants_usage=False))

    assert [c["choices"][0]["index"] for c in chunks] == [0, 1]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"not json",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":null}',
        b'{"choices":{"0":1}}',
        b'{"choices":[7]}',
        b'{"choices":[{"index":0}]}',
        b'{"choices":[{"message":null,"text":null}]}',
        b'{"choices":[{"message":{"tool_calls":7},"text":7}]}',
        b'{"error":{"message":"no"}}',
        b'{"object":"error","message":"no"}',
        b'{"choices":[{"message":{},"text":""}],"error":"no"}',
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_what_is_no_completion_is_refused(dialect: str, body: bytes) -> None:
    with pytest.raises(ValueError):
        json_to_stream(dialect, body, wants_usage=True)
