"""Responses made in the background, as OpenAI's API shows them. Pure.

A response is a durable job. What the engine wrote is shown as it is, but for the id, which is ours,
the word that it is made in the background, and the numbers of events.
"""

import hashlib
import re

import msgspec

from common.durable import About, Result, Status
from common.intake.answers import Answer, response_code
from common.intake.body import Top, present
from gateway import jobs
from gateway.events import Cutter, Event

PREFIX = "resp_"
ECHO_BYTES_MAX = 16 << 10
"""So much of a request is shown before the engine shows it; larger fields are left out."""
ECHOED = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls",
    "previous_response_id", "prompt", "reasoning", "service_tier", "store", "temperature", "text",
    "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user",
)  # fmt: skip

_DEFAULTS: dict[str, object] = {
    **dict.fromkeys(ECHOED), "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "metadata": {}, "store": True, "truncation": "disabled",
}  # fmt: skip
_ENDS = (b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
_CREATED = b'"response.created"'
_NONE = {"code": "bad_answer", "message": "The engine's answer is no response."}
_STATES = {
    "queued": "queued", "running": "in_progress", "completed": "completed",
    "cancelled": "cancelled",
}  # fmt: skip
_TRUE, _NULL = msgspec.Raw(b"true"), msgspec.Raw(b"null")
_ID = re.compile(rf"{PREFIX}([0-9a-f]{{32}})\Z")

_object = msgspec.json.Decoder(Top)
_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)


def job_of(id: str) -> str:
    """The job of a response's id; empty where it is none."""
    found = _ID.match(id)
    return found[1] if found else ""


def missing(id: str) -> Answer:
    """404 for a response that never was, and for another's."""
    return Answer(
        status=404, message=f"Response with id '{id[:100]}' not found.", param="response_id"
    )


def background(top: Top) -> bool:
    """Whether a body asks for it; what is no boolean the engine refuses."""
    return bytes(memoryview(top.get("background", b""))[:5]) == b"true"


def digest(top: Top) -> str:
    """Of all that a body asks for."""
    return hashlib.sha256(msgspec.json.encode(top)).hexdigest()


def echo(top: Top) -> bytes:
    """What is shown of a request while the engine has not answered: JSON."""
    found: Top = {}
    left = ECHO_BYTES_MAX
    for name in ECHOED:
        raw = present(top, name)
        if raw is not None and len(raw) <= left:
            found[name] = raw
            left -= len(raw)
    return msgspec.json.encode(found)


def shown(status: Status, result: Result | None) -> dict[str, object]:
    """A response as it stands. `result`: of a job that has ended."""
    about = status.about
    if status.state == "completed" and result is not None:
        whole = _whole(result)
        if whole is not None:
            return _ours(about, whole)
    state, error = _STATES.get(status.state, "failed"), None
    if state == "failed" or (status.state == "completed" and result is not None):
        state, error = "failed", _error(jobs.error(status, result) or _NONE)
    return _bare(about, state, error)


def _bare(about: About, state: str, error: object = None) -> dict[str, object]:
    """One of which the engine has told nothing."""
    try:
        echoed = _object.decode(about.extra) if about.extra else {}
    except _ERRORS:
        echoed = {}
    return {
        "id": PREFIX + about.id, "object": "response", "created_at": about.created_ms // 1000,
        "status": state, "background": True, "error": error, "incomplete_details": None,
        "model": about.model, "output": [], "usage": None, **_DEFAULTS, **echoed,
    }  # fmt: skip


def _ours(about: About, response: Top) -> dict[str, object]:
    return {**response, "id": PREFIX + about.id, "background": True}


def _whole(result: Result) -> Top | None:
    """The response in an answer: its body, or what its last event holds; None where there is
    none."""
    if not result.stream:
        return _decoded(result.body)
    last = result.body.rstrip(b"\n").rpartition(b"\n\n")[2]
    data = last.partition(b"data: ")[2]
    event = _decoded(data) or {}
    return _decoded(event.get("response", _NULL))


def _decoded(data: bytes | msgspec.Raw) -> Top | None:
    try:
        return _object.decode(data)
    except _ERRORS:
        return None


def _error(found: object) -> dict[str, str]:
    fields = found if isinstance(found, dict) else {}
    code = response_code(fields.get("code") or fields.get("type"))
    return {"code": code, "message": str(fields.get("message") or "It failed.")}


class Retold:
    """The events of a background response: numbered by us from 0 on, the same for every reader.

    The first two say that it is queued, before any engine has it, so the engine's own word that it
    was created is left out. Where an answer begins anew `response.in_progress` comes again, and
    counting goes on.
    """

    def __init__(self, about: About, after: int = -1) -> None:
        """`after`: the number of the last event that the reader has."""
        self.cutter = Cutter()
        self._about = about
        self._after = after
        self._number = 0
        self._ended = False

    def begun(self) -> bytes:
        """That it was made, and waits."""
        response = _bare(self._about, "queued")
        kinds = ("response.created", "response.queued")
        return b"".join(self._told(k, {"response": response, "type": k}) for k in kinds)

    def event(self, event: Event) -> bytes:
        """An engine's event, renumbered; nothing for those that its reader has, or needs not."""
        data = event.data.rstrip(b"\n").rpartition(b"data: ")[2]
        found = None if event.restarts else _decoded(data)
        if found is None:
            return b""
        raw = bytes(found.get("type", _NULL))
        if raw == _CREATED:
            return b""
        self._ended = raw in _ENDS
        told: dict[str, object] = {**found}
        if (response := _decoded(found.get("response", _NULL))) is not None:
            told["response"] = _ours(self._about, response)
        return self._told(raw.decode(errors="replace").strip('"'), told)

    def over(self, status: Status) -> bytes:
        """`response.failed`, where the engine's events have not told the end."""
        if self._ended:
            return b""
        end = self.cutter.end
        if end is not None:
            status = msgspec.structs.replace(
                status, outcome=end.outcome, message=end.message or status.message
            )
        own = jobs.engine_error(self.cutter.body)
        state = "cancelled" if status.state == "cancelled" else "failed"
        error = _error(own or jobs.error_of(status.outcome, status.message))
        response = _bare(self._about, state, None if state == "cancelled" else error)
        kind = "response.failed"
        return self._told(kind, {"response": response, "type": kind})

    def interrupted(self) -> bytes:
        """An error with the number of the event before, so that asking for what comes after it
        leaves nothing out."""
        what: dict[str, object] = {
            "type": "error", "code": "stream_interrupted", "param": None,
            "message": "The stream was interrupted: retrieve it with `starting_after`.",
        }  # fmt: skip
        return _event("error", {**what, "sequence_number": max(self._number - 1, self._after, 0)})

    def _told(self, kind: str, data: dict[str, object]) -> bytes:
        number, self._number = self._number, self._number + 1
        if number <= self._after:
            return b""
        return _event(kind, {**data, "sequence_number": number})


def _event(kind: str, data: dict[str, object]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
