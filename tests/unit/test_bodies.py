import json
from pathlib import Path

import pytest

from common.wire import Usage
from dispatcher.bodies import MESSAGE_CHARS_MAX, make_error, read_error, read_usage

FIXTURES = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"


def body_of(name: str) -> bytes:
    """A captured body; of a `.http` file, what follows the response's headers."""
    data = (FIXTURES / name).read_bytes()
    if name.endswith(".http"):
        data = data.partition(b"--- response ---\n")[2].partition(b"\r\n\r\n")[2]
    assert data
    return data


def envelope(
    message: str, kind: str, param: str | None, code: str | int | None
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("chat_nonstream.body", Usage(14, 0, 8)),
        ("completions_batch_prompts.body", Usage(2, 0, 6)),
        ("plain_chat_nonstream.body", Usage(14, 0, 3)),
        ("models.body", None),
        ("err_bad_model.http", None),
    ],
)
def test_usage_of_real_bodies(name: str, usage: Usage | None) -> None:
    assert read_usage(body_of(name)) == usage


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ('{"prompt_tokens":5,"total_tokens":5}', Usage(5, 0, 0)),
        ('{"completion_tokens":2}', Usage(0, 0, 2)),
        ('{"prompt_tokens":5,"completion_tokens":null}', Usage(5, 0, 0)),
        (
            '{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}',
            Usage(5, 4, 2),
        ),
        ('{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":9}}', Usage(5, 5, 0)),
        ('{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":-1}}', Usage(5, 0, 0)),
        ('{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":null}}', Usage(5, 0, 0)),
        ('{"prompt_tokens":5,"prompt_tokens_details":null}', Usage(5, 0, 0)),
        ('{"prompt_tokens":0,"completion_tokens":0}', Usage(0, 0, 0)),
        ("null", None),
        ("{}", None),
        ("[]", None),
        ('"many"', None),
        ('{"prompt_tokens":null}', None),
        ('{"prompt_tokens":"5"}', None),
        ('{"prompt_tokens":-5}', None),
        ('{"prompt_tokens":5,"completion_tokens":90071992547409930}', None),
    ],
)
def test_usage_is_read_where_it_counts_something(usage: str, expected: Usage | None) -> None:
    assert read_usage(f'{{"data":[1.5],"usage":{usage}}}'.encode()) == expected


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b'{"usage":', b"\xff", b'{"x":' + b"[" * 100_000]
)
def test_what_is_no_json_object_has_no_usage(body: bytes) -> None:
    assert read_usage(body) is None


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("err_bad_model.http", 404),
        ("err_prompt_too_long.http", 400),
        ("err_top_p.http", 400),
        ("err_empty_body.http", 400),
        ("overload_503_nonstream.http", 503),
        ("drain_new_post.http", 500),
    ],
)
def test_the_envelope_of_a_real_engine_stays_as_it_is(name: str, status: int) -> None:
    body = body_of(name)
    said = json.loads(body)["error"]
    error = read_error(body)

    assert error.body == body
    assert (error.message, error.type, error.param, error.code, error.status) == (
        said["message"],
        said["type"],
        said["param"],
        status,
        status,
    )


def test_the_envelope_of_a_messages_path_stays_as_it_is() -> None:
    body = body_of("overload_503_messages.body")
    error = read_error(body, 503)

    assert error.body == body
    assert (error.type, error.code, error.status) == ("Service Unavailable", None, 503)


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        (
            body_of("embeddings_error.http"),
            404,
            envelope("Not Found", "invalid_request_error", None, None),
        ),
        (
            body_of("apikey_wrong.body"),
            401,
            envelope("Unauthorized", "invalid_request_error", None, None),
        ),
        (
            b'{"error":"too long","error_type":"validation"}',
            422,
            envelope("too long", "validation", None, None),
        ),
        (
            b'{"object":"error","message":"no","type":"BadRequestError","param":"n","code":400}',
            400,
            envelope("no", "BadRequestError", "n", 400),
        ),
        (
            b'{"error":{"message":"no","code":"busy"}}',
            503,
            envelope("no", "server_error", None, "busy"),
        ),
        (
            b'{"detail":[{"loc":["body"],"msg":"a"},7,{"msg":"b"},{"msg":3}]}',
            422,
            envelope("a; b", "invalid_request_error", None, None),
        ),
        (
            b"<h1>Bad Gateway</h1>\n",
            502,
            envelope("<h1>Bad Gateway</h1>", "server_error", None, None),
        ),
        (b'"gone"', 500, envelope("gone", "server_error", None, None)),
        (b'{"a":1}', 500, envelope('{"a":1}', "server_error", None, None)),
        (b'{"error":null}', 500, envelope('{"error":null}', "server_error", None, None)),
        (
            b'{"error":{"message":7,"type":7,"param":7,"code":true}}',
            500,
            envelope(
                '{"error":{"message":7,"type":7,"param":7,"code":true}}', "server_error", None, None
            ),
        ),
        (
            b"",
            500,
            envelope(
                "The engine answered with an error and no message.", "server_error", None, None
            ),
        ),
    ],
)
def test_any_other_error_is_put_into_an_envelope(
    body: bytes, status: int, expected: dict[str, object]
) -> None:
    error = read_error(body, status)

    assert json.loads(error.body) == expected
    assert expected == envelope(error.message, error.type, error.param, error.code)
    assert error.status == status


def test_an_envelope_with_an_empty_message_gets_one() -> None:
    body = b'{"error":{"message":"","type":"t","param":null,"code":null}}'

    assert json.loads(read_error(body).body)["error"]["message"] == body.decode()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        *(("400", 400), ("599", 599), ('"429"', 429), ("399", None), ("600", None)),
        *(("true", None), ('"4x9"', None), ("null", None), ("-400", None), ("4.5e2", None)),
        ("1" * 400, None),
    ],
)
def test_a_code_is_a_status_where_it_is_one(code: str, status: int | None) -> None:
    assert read_error(f'{{"error":{{"message":"m","code":{code}}}}}'.encode()).status == status
    assert read_error(f'{{"error":{{"message":"m","code":{code}}}}}'.encode(), 418).status == (
        status or 418
    )


def test_text_that_becomes_a_message_is_cut_and_always_utf_8() -> None:
    error = read_error(b"\xff" * (MESSAGE_CHARS_MAX + 1))

    assert len(error.message) == MESSAGE_CHARS_MAX
    assert json.loads(error.body)["error"]["message"] == error.message


def test_an_error_of_our_own_has_its_envelope() -> None:
    error = make_error("no", type="t", param="p", code="c", status=503)

    assert json.loads(error.body) == envelope("no", "t", "p", "c")
    assert error.status == 503
