"""What the bodies of `/v1/jobs` may hold."""

import json
from typing import Any

import pytest

from common.intake.answers import Refusal
from gateway.durables import idempotency_key
from gateway.jobs import read

BODY = {"model": "m", "messages": []}
CHAT = "/v1/chat/completions"


def asked(**more: Any) -> Any:
    return read(json.dumps({"path": CHAT, "body": BODY, **more}).encode(), 600, private=False)


def refused(body: bytes) -> Any:
    with pytest.raises(Refusal) as told:
        read(body, 600, private=False)
    answer = told.value.answer
    assert answer.status == 400
    return answer


def test_what_is_asked_for() -> None:
    found = asked(
        **{"class": "batch"}, user="u", metadata={"a": "b"}, ttl=60, webhook="https://example.org/",
        idempotency_key="k",
    )  # fmt: skip
    assert found.row.path == CHAT and json.loads(found.body) == BODY
    assert (found.cls, found.user, found.metadata) == (b"batch", "u", {"a": "b"})
    assert (found.ttl_s, found.webhook, found.key) == (60, "https://example.org/", "k")
    bare = asked(user=None, metadata=None, ttl=None, webhook=None)
    assert (bare.cls, bare.user, bare.metadata, bare.ttl_s, bare.webhook) == (
        None,
        None,
        {},
        600,
        "",
    )


def test_the_body_goes_on_as_it_came() -> None:
    inner = b'{ "model":"m" , "n": 1.0000000000000000000001, "x":"\\u00e4" }'
    assert (
        read(b'{"path":"/v1/completions","body":' + inner + b"}", 60, private=False).body == inner
    )


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"path": "/v1/models"}, "path"), ({"path": 1}, "path"), ({"path": None}, "path"),
        ({"body": None}, "body"), ({"body": "{}"}, "body"), ({"body": [1]}, "body"),
        ({"class": "urgent"}, "class"), ({"class": 1}, "class"), ({"user": ""}, "user"),
        ({"ttl": 59}, "ttl"), ({"ttl": 30 * 86_400 + 1}, "ttl"), ({"ttl": 1e9}, "ttl"),
        ({"metadata": {"a": 1}}, "metadata"), ({"metadata": []}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"), ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"webhook": "http://10.0.0.1/"}, "webhook"), ({"webhook": ""}, "webhook"),
        ({"web_hook": "x"}, "web_hook"), ({"idempotency_key": 1}, "idempotency_key"),
    ],
)  # fmt: skip
def test_what_is_refused(more: dict[str, Any], param: str) -> None:
    assert refused(json.dumps({"path": CHAT, "body": BODY, **more}).encode()).param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"path":"a","path":"b"}', b'{"path":"\xff"}'])
def test_what_is_no_json_object(body: bytes) -> None:
    refused(body)


def test_digests_tell_requests_apart() -> None:
    digests = {asked(**more).digest() for more in (
        {}, {"user": "u"}, {"class": "batch"}, {"ttl": 60}, {"metadata": {"a": "b"}},
        {"body": {"model": "n"}}, {"path": "/v1/completions"},
    )}  # fmt: skip
    assert len(digests) == 7
    assert asked(idempotency_key="k").digest() == asked().digest()


def test_idempotency_keys() -> None:
    assert idempotency_key(None) == "" and idempotency_key(b" k ", "k") == "k"
    for header, field in ((b"a", "b"), (b"", None), (None, ""), (b"x" * 256, None)):
        with pytest.raises(Refusal):
            idempotency_key(header, field)
