"""What `fairlane jobs follow` makes of a job's events."""

import json
from collections.abc import Iterator

import click
import httpx
import pytest

from fairlane import jobs_show
from fairlane.api import Api


def followed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> Iterator[bytes]:
    """The text that a gateway's stream becomes, in pieces of one byte."""
    pieces = [sent[i : i + 1] for i in range(len(sent))]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=iter(pieces)))
    api = Api("http://gateway", None)
    monkeypatch.setattr(api, "_http", httpx.Client(base_url="http://gateway", transport=transport))
    return jobs_show.followed(api, "j", raw=False, wait=lambda s: None)


def chunk(text: str) -> bytes:
    data = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    return f"id: 1-1.1\ndata: {data}\n\n".encode()


END = b'id: 1-2.end\nevent: end\ndata: {"state":"completed"}\n\n'


def test_text_with_any_line_separator_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one\u2028two\u2029three\x85four\x0cfive 🚦"
    assert b"".join(followed(monkeypatch, chunk(text) + END)).decode() == text + "\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [({"message": "no"}, "no"), ("no", "no"), (["no"], "['no']"), ({"code": 1}, "")],
)
def test_an_error_of_any_shape(monkeypatch: pytest.MonkeyPatch, error: object, text: str) -> None:
    data = json.dumps({"state": "failed", "error": error}).encode()
    parts = followed(monkeypatch, b"id: 1-2.end\nevent: error\ndata: " + data + b"\n\n")
    assert next(parts).decode() == f"\n[failed: {text}]\n"
    with pytest.raises(click.exceptions.Exit) as caught:
        next(parts)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("choices", [None, 1, [None], ["x"], [{"delta": 1}], [{"message": []}]])
def test_events_of_any_shape(monkeypatch: pytest.MonkeyPatch, choices: object) -> None:
    data = json.dumps({"choices": choices}).encode()
    assert b"".join(followed(monkeypatch, b"id: 1-1.1\ndata: " + data + b"\n\n" + END)) == b"\n"
