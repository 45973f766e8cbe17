"""`fairlane jobs`: the durable jobs of a key, as tables and as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from click.exceptions import Exit
from rich.cells import cell_len, set_cell_size

from fairlane.api import AGAIN_S_MAX, LATER, Api, ApiError

FOLLOW_TRIES = 100
"""A followed stream that breaks is taken up again so often in a row."""

COLUMNS = ("id", "model", "class", "state", "created", "tokens")
GAP = 2
"""Spaces between columns."""
NARROWER = (
    ("created", 11), ("tokens", 0), ("class", 0), ("model", 16), ("created", 0), ("model", 8),
    ("model", 0),
)  # fmt: skip
"""What becomes narrower first where a terminal has no room, and how narrow; 0: it is left out."""


def path(job: str) -> str:
    """Where a job is, whatever its id is written like."""
    return f"/v1/jobs/{quote(job, safe='')}"


def listed(api: Api, limit: int, width: int | None) -> str:
    """The newest jobs, one a line, below a head; for `width`: see `lines`. Raises ApiError."""
    rows = []
    for job in api.get("/v1/jobs", limit=limit)["data"]:
        usage = job.get("usage") or {}
        tokens = usage.get("total_tokens") or usage.get("output_tokens") or "-"
        rows.append({
            "id": job["id"], "model": job.get("model") or "-", "class": job.get("class") or "-",
            "state": job.get("state") or "-", "created": _time(job.get("created_at")),
            "tokens": str(tokens),
        })  # fmt: skip
    return "\n".join(lines(rows, width))


def lines(rows: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    """A head and a line for each row. `width`: the columns of the terminal, None where it is none:
    then all is said in full. In a narrow one what is least important is shortened or left out;
    ids and states never are, even where the lines are wider then (43 columns)."""
    shown = [dict(zip(COLUMNS, COLUMNS, strict=True)), *map(dict, rows)]
    wide = {name: max(cell_len(row[name]) for row in shown) for name in COLUMNS}
    over = 0 if width is None else sum(wide.values()) + GAP * (len(wide) - 1) - width
    for name, least in NARROWER:
        if over <= 0:
            break
        kept = max(least, wide[name] - over) if name == "model" and least else least
        if kept >= wide[name]:
            continue
        over -= wide[name] - kept + (0 if kept else GAP)
        wide[name] = kept
        if not kept:
            del wide[name]
    return [
        (" " * GAP).join(_fitted(name, row[name], size) for name, size in wide.items()).rstrip()
        for row in shown
    ]


def _fitted(name: str, text: str, size: int) -> str:
    if cell_len(text) > size and name == "created":
        text = text[5:16]  # month, day, hour, minute
    elif cell_len(text) > size:
        text = set_cell_size(text, size - 2).rstrip() + ".."
    return set_cell_size(text, size)


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
        *whole, held = (held + text).split("\n")
        yield from whole


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
    said = [f"{n}: {line}" for n, v in event.items() for line in v.split("\n")]
    return ("\n".join(said) + "\n\n").encode()


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
        return "-"
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
