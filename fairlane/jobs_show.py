"""`fairlane jobs`: the durable jobs of a key, as tables and as text."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from click.exceptions import Exit
from rich.console import Console
from rich.table import Table

from fairlane.api import AGAIN_S_MAX, LATER, Api, ApiError

FOLLOW_TRIES = 100
"""A followed stream that breaks is taken up again so often in a row."""


def path(job: str) -> str:
    """Where a job is, whatever its id is written like."""
    return f"/v1/jobs/{quote(job, safe='')}"


def listed(api: Api, limit: int, console: Console) -> None:
    """A table of the newest jobs. Raises ApiError."""
    table = Table(box=None, pad_edge=False)
    for name in ("id", "model", "class", "state", "created", "tokens"):
        table.add_column(name, overflow="fold", no_wrap=name == "id")
    for job in api.get("/v1/jobs", limit=limit)["data"]:
        usage = job.get("usage") or {}
        tokens = usage.get("total_tokens") or usage.get("output_tokens") or ""
        table.add_row(
            job["id"], job.get("model", ""), job.get("class", ""), job.get("state", ""),
            _time(job.get("created_at")), str(tokens),
        )  # fmt: skip
    console.print(table)


def shown(api: Api, job: str) -> bytes:
    """One job, as the API tells it. Raises ApiError."""
    return msgspec.json.format(msgspec.json.encode(api.get(path(job))))


def cancelled(api: Api, job: str) -> str:
    """Stop a job that has not ended, and say how it stands; no answer is ever lost by this. Raises
    ApiError."""
    found = api.post(f"{path(job)}/cancel")
    state = str(found.get("state"))
    more = {"running": ", and stops soon", "cancelled": ""}.get(state, ", as it had ended")
    return f"{found.get('id', job)}: {state}{more}"


def followed(api: Api, job: str, *, raw: bool, wait: Callable[[float], object]) -> Iterator[bytes]:
    """A job's answer as it comes, taken up where it was whenever the connection breaks: its events
    as they are, or the text in them. Raises ApiError, and Exit (1) after the end of a job that
    fails."""
    last, failed, begun = "", 0, False
    while True:
        try:
            headers = {"last-event-id": last} if last else None
            with api.stream(f"{path(job)}/events", headers) as answer:
                begun = True
                for event in _events(_lines(answer.iter_text())):
                    failed = 0
                    last = event.get("id", last)
                    kind = event.get("event", "")
                    yield _raw(event) if raw else _text(kind, event.get("data", ""))
                    if kind == "error":
                        raise Exit(1)
                    if kind == "end":
                        return
        except (httpx.HTTPError, ApiError) as e:
            again = begun and (not isinstance(e, ApiError) or e.status in (0, *LATER))
            if not again or failed >= FOLLOW_TRIES:
                raise ApiError(str(e)) from None
        failed += 1
        wait(min(AGAIN_S_MAX, 0.2 * 2 ** min(failed, 6)))


def _lines(texts: Iterator[str]) -> Iterator[str]:
    """Lines as event streams have them; httpx's own end at every line separator of Unicode too,
    which an answer may have in it."""
    held = ""
    for text in texts:
        *lines, held = (held + text).split("\n")
        yield from lines


def _events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in lines:
        if not line:
            if event:
                yield event
            event = {}
            continue
        name, _, value = line.partition(":")
        if name:
            value = value.removeprefix(" ")
            event[name] = f"{event[name]}\n{value}" if name == "data" and name in event else value


def _raw(event: dict[str, str]) -> bytes:
    lines = [f"{n}: {line}" for n, v in event.items() for line in v.split("\n")]
    return ("\n".join(lines) + "\n\n").encode()


def _text(kind: str, data: str) -> bytes:
    """What a person reads of an event."""
    if kind == "restart":
        return b"\n[the answer begins again]\n"
    if kind == "end":
        return b"\n"
    try:
        found: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError):
        return b""
    if not isinstance(found, dict):
        return b""
    if found.get("error") is not None:
        error = found["error"]
        text = error.get("message", "") if isinstance(error, dict) else error
        return f"\n[failed: {text}]\n".encode(errors="replace")
    choices = found.get("choices")
    texts = [str(_said(c)) for c in (choices if isinstance(choices, list) else []) if c]
    if kind == "response.output_text.delta" or found.get("type") == "response.output_text.delta":
        texts.append(str(found.get("delta", "")))
    return "".join(texts).encode(errors="replace")


def _said(choice: Any) -> object:
    """The text of a choice; an engine may send anything."""
    if not isinstance(choice, dict):
        return ""
    part = choice.get("delta") or choice.get("message")
    text = part.get("content") if isinstance(part, dict) else None
    return text or choice.get("text") or ""


def _time(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
