"""The simulated engine's answers beside captured ones of vLLM 0.32: same keys, same order.

Each captured request is sent to the simulator as it was; errors must come back byte for byte.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from sim.settings import EngineSettings
from sim.transport import EngineTransport

FIXTURES = Path(__file__).parent.parent / "fixtures" / "vllm-0.32"
TINY = EngineSettings(model="tiny", max_model_len=2_048)

Shape = object


class Captured(msgspec.Struct):
    """One captured request with its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    answer_headers: dict[str, str]
    answer: bytes


def _split(raw: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines if ": " in line)
    return first, {name.lower(): value for name, value in pairs}, body


def captured(name: str) -> Captured:
    raw = (FIXTURES / f"{name}.http").read_bytes()
    request, _, response = raw.partition(b"--- response ---")
    line, headers, body = _split(request)
    status, answer_headers, answer = _split(response.lstrip(b"\r\n"))
    method, path, _ = line.split(" ")
    length = int(headers.get("content-length", "0"))
    return Captured(
        method=method,
        path=path,
        headers=headers,
        body=body[:length],
        status=int(status.split(" ")[1]),
        answer_headers=answer_headers,
        answer=answer,
    )


async def replay(capture: Captured, settings: EngineSettings = TINY) -> httpx.Response:
    transport = EngineTransport(settings)
    request = httpx.Request(
        capture.method, "http://e" + capture.path, content=capture.body, headers=capture.headers
    )
    response = await transport.handle_async_request(request)
    response.request = request
    await response.aread()
    await transport.aclose()
    return response


async def post(path: str, body: object, settings: EngineSettings = TINY) -> bytes:
    headers = {"content-type": "application/json"}
    content = msgspec.json.encode(body)
    capture = Captured("POST", path, headers, content, 200, {}, b"")
    return (await replay(capture, settings)).content


def body_of(name: str) -> bytes:
    return (FIXTURES / f"{name}.body").read_bytes()


def shape(value: object) -> Shape:
    """Keys in order, kinds of leaves, and lists by their elements."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return ["list", *(shape(item) for item in value)]
    return type(value).__name__


def without(value: object, *names: str) -> object:
    """A body without keys that only switches outside of the simulator add."""
    if isinstance(value, dict):
        return {key: without(item, *names) for key, item in value.items() if key not in names}
    if isinstance(value, list):
        return [without(item, *names) for item in value]
    return value


def events(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return body[:-2].split(b"\n\n")


def event_shapes(body: bytes, *drop: str) -> list[Shape]:
    shapes: list[Shape] = []
    for event in events(body):
        data = event.removeprefix(b"data: ")
        known = data.startswith(b"{")
        shapes.append(shape(without(msgspec.json.decode(data), *drop)) if known else data)
    return shapes


STORY = [{"role": "user", "content": "Tell me a story about a queue."}]
CHAT = {"model": "tiny", "messages": STORY, "max_tokens": 3, "ignore_eos": True}
TEXT = {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
USAGE = {"include_usage": True}
BOTH = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("name", "path", "request_", "options"),
    [
        ("plain_chat_stream", "/v1/chat/completions", CHAT, None),
        ("plain_chat_stream_include_usage", "/v1/chat/completions", CHAT, USAGE),
        ("plain_chat_stream_continuous_usage", "/v1/chat/completions", CHAT, BOTH),
        (
            "plain_chat_stream_continuous_only",
            "/v1/chat/completions",
            CHAT,
            {"continuous_usage_stats": True},
        ),
        ("plain_completions_stream", "/v1/completions", TEXT, None),
        ("plain_completions_stream_include_usage", "/v1/completions", TEXT, USAGE),
    ],
)
async def test_stream_events(
    name: str, path: str, request_: dict[str, object], options: dict[str, bool] | None
) -> None:
    body = {**request_, "stream": True} | ({"stream_options": options} if options else {})
    ours = await post(path, body)
    assert event_shapes(ours) == event_shapes(body_of(name), "metrics")


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("chat_stream_include_usage", "/v1/chat/completions", {**CHAT, "stream_options": USAGE}),
        ("completions_stream", "/v1/completions", {**TEXT, "max_tokens": 4}),
    ],
)
async def test_forced_usage_is_in_every_event(
    name: str, path: str, body: dict[str, object]
) -> None:
    settings = EngineSettings(model="tiny", force_include_usage=True)
    ours = await post(path, {**body, "stream": True}, settings)
    assert event_shapes(ours) == event_shapes(body_of(name), "prompt_tokens_details")


@pytest.mark.looptime
async def test_two_choices_are_interleaved() -> None:
    settings = EngineSettings(model="tiny", force_include_usage=True)
    body = {**CHAT, "n": 2, "stream": True}
    ours = events(await post("/v1/chat/completions", body, settings))
    theirs = events(body_of("chat_stream_n2"))
    key = _choice_and_shape
    assert sorted(map(key, ours)) == sorted(map(key, theirs))
    # Both roles come first, the last token of each choice has the reason, then usage and DONE.
    assert [key(event) for event in ours[:2]] == [key(event) for event in theirs[:2]]
    assert [key(event) for event in ours[-2:]] == [key(event) for event in theirs[-2:]]
    last = msgspec.json.decode(ours[-2].removeprefix(b"data: "))
    assert last["usage"]["completion_tokens"] == 6


def _choice_and_shape(event: bytes) -> str:
    if event == b"data: [DONE]":
        return "done"
    data = without(msgspec.json.decode(event.removeprefix(b"data: ")), "prompt_tokens_details")
    assert isinstance(data, dict)
    indexes = [choice["index"] for choice in data["choices"]]
    return f"{indexes} {shape(data)}"


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("plain_chat_nonstream", "/v1/chat/completions", CHAT),
        ("completions_nonstream", "/v1/completions", {**TEXT, "max_tokens": 4}),
        ("completions_batch_prompts", "/v1/completions", {**TEXT, "prompt": ["Hello", "World"]}),
    ],
)
async def test_whole_bodies(name: str, path: str, body: dict[str, object]) -> None:
    drop = ("metrics", "prompt_tokens_details")
    ours = without(msgspec.json.decode(await post(path, body)), *drop)
    assert shape(ours) == shape(without(msgspec.json.decode(body_of(name)), *drop))


ERRORS = [
    "err_bad_model", "err_empty_body", "err_image", "err_invalid_json", "err_json_not_object",
    "err_max_tokens_neg", "err_max_tokens_zero", "err_messages_empty", "err_messages_missing",
    "err_n_0", "err_no_content_type", "err_wrong_content_type",
    "err_stream_options_without_stream", "err_temperature_neg", "err_temperature_str",
    "err_top_p", "priority_float", "priority_null", "priority_list", "priority_huge64",
    "priority_string", "cont_final_true_agp_default", "404_route", "405_get_chat", "head_models",
]  # fmt: skip


@pytest.mark.looptime
@pytest.mark.parametrize("name", ERRORS)
async def test_errors_byte_for_byte(name: str) -> None:
    capture = captured(name)
    response = await replay(capture)
    assert response.status_code == capture.status
    if capture.method != "HEAD":
        assert response.content == capture.answer
    for header in ("content-type", "content-length", "allow"):
        assert response.headers.get(header) == capture.answer_headers.get(header)


@pytest.mark.looptime
@pytest.mark.parametrize(
    "name",
    ["err_empty_model", "err_no_model_field", "priority_string_int", "priority_bool",
     "xrid_nonstream"],
)  # fmt: skip
async def test_what_vllm_accepts_is_accepted(name: str) -> None:
    capture = captured(name)
    response = await replay(capture)
    assert response.status_code == capture.status == 200
    ours, theirs = msgspec.json.decode(response.content), msgspec.json.decode(capture.answer)
    assert shape(without(ours, "usage", "choices")) == shape(without(theirs, "usage", "choices"))
    if name == "xrid_nonstream":
        assert ours["id"] == theirs["id"] == "chatcmpl-my-req-123"


@pytest.mark.looptime
async def test_a_too_long_prompt_is_refused_in_the_same_words() -> None:
    capture = captured("err_prompt_too_long")
    settings = EngineSettings(model="tiny", max_model_len=2_048)
    response = await replay(capture, settings)
    theirs = msgspec.json.decode(capture.answer)["error"]
    ours = msgspec.json.decode(response.content)["error"]
    tokens = ours["message"].split("value=")[1].rstrip(")")
    assert response.status_code == capture.status
    assert {**ours, "message": ours["message"].replace(tokens, "2049")} == theirs


@pytest.mark.looptime
@pytest.mark.parametrize("name", ["overload_503_nonstream", "overload_503_stream"])
async def test_overload(name: str) -> None:
    response = await replay(captured(name), EngineSettings(model="tiny", max_num_queued_reqs=0))
    assert (response.status_code, response.content) == (503, captured(name).answer)
    assert "retry-after" not in response.headers


@pytest.mark.looptime
async def test_pages() -> None:
    for name in ("health", "embeddings_error"):
        capture = captured(name)
        response = await replay(capture, EngineSettings(model="tiny", embeddings=False))
        assert (response.status_code, response.content) == (capture.status, capture.answer)
    get = Captured("GET", "/version", {}, b"", 200, {}, b"")
    assert (await replay(get)).content == body_of("version")
    get.path = "/v1/models"
    models = msgspec.json.decode((await replay(get)).content)
    assert shape(models) == shape(msgspec.json.decode(body_of("models")))


@pytest.mark.looptime
async def test_request_id_header_only_with_the_switch() -> None:
    capture = captured("reqid_echo")
    plain = await replay(capture)
    echoed = await replay(capture, EngineSettings(model="tiny", request_id_headers=True))
    assert "x-request-id" not in plain.headers
    assert echoed.headers["x-request-id"] == capture.answer_headers["x-request-id"] == "abc-1"


@pytest.mark.looptime
async def test_embeddings() -> None:
    body = {"model": "tiny", "input": ["a", "b"]}
    answer = msgspec.json.decode(await post("/v1/embeddings", body))
    first, second = (item["embedding"] for item in answer["data"])
    assert len(first) == len(second) == 16 and first != second
    assert answer["usage"]["completion_tokens"] == 0
    packed = msgspec.json.decode(
        await post("/v1/embeddings", {**body, "encoding_format": "base64"})
    )
    assert all(isinstance(item["embedding"], str) for item in packed["data"])
