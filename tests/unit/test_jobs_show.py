"""What `fairlane jobs` shows: the list, and what `follow` makes of a job's events."""

import json
from collections.abc import Iterator

import click
import httpx
import pytest
from rich.cells import cell_len

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


def row(model: str, **more: str) -> dict[str, str]:
    made = {"class": "interactive", "created": "2026-11-30 12:34:05", "tokens": "128000"}
    return {"id": f"{7:032x}", "model": model, "state": "cancelled", **made, **more}


def test_all_is_listed_where_there_is_no_terminal() -> None:
    long = row("meta-llama/" + "x" * 200)
    head, line, short = jobs_show.lines([long, row("m", **{"class": "batch"})], None)
    assert head.split() == list(jobs_show.COLUMNS)
    assert line.split() == [part for name in jobs_show.COLUMNS for part in long[name].split()]
    assert head.index("state") == line.index("cancelled") == short.index("cancelled")


@pytest.mark.parametrize(
    "model", ["m", "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "模型" * 9]
)
@pytest.mark.parametrize("width", range(43, 160))
def test_nothing_is_wider_than_the_terminal(model: str, width: int) -> None:
    """And each word is whole, or, of a model's name alone, shown to be cut."""
    whole = row(model)
    head, line = jobs_show.lines([whole], width)
    assert cell_len(head) <= width and cell_len(line) <= width
    assert whole["id"] in line and whole["state"] in line
    short = {whole["created"][5:16], *whole.values()}
    words = {word for text in short for word in text.split()}
    assert all(word in words or word.endswith("..") for word in line.split())
    assert set(head.split()) <= set(jobs_show.COLUMNS)


def test_what_80_columns_have_room_for() -> None:
    found = jobs_show.lines([row("llama-3.1-8b"), row("llama-3.1-8b", state="completed")], 80)
    assert found == [
        "id                                model         state      created",
        "00000000000000000000000000000007  llama-3.1-8b  cancelled  11-30 12:34",
        "00000000000000000000000000000007  llama-3.1-8b  completed  11-30 12:34",
    ]
