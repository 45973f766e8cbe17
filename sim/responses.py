"""Answers of `/v1/responses` in vLLM 0.32's bytes: its events, and the whole response."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sim.openai import Call
from sim.text import FinishReason

_encode = msgspec.json.encode


class ResponseReply:
    """Writes the events of one streamed response."""

    def __init__(self, call: Call, request_id: str, created: int) -> None:
        """`request_id` is without a prefix; `created` is Unix seconds."""
        self._call = call
        self._id = request_id
        self._created = created
        self._texts: list[str] = []
        self._number = 0
        self._reason: FinishReason = "stop"

    def begin(self) -> list[bytes]:
        """What comes before the first token."""
        bare = _response(self._call, self._id, self._created, None, 0, "stop")
        item = {**_message(self._id, None), "content": [], "status": "in_progress"}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event("response.created", {"response": bare}),
            self._event("response.in_progress", {"response": bare}),
            self._event("response.output_item.added", {"item": item, "output_index": 0}),
            self._event("response.content_part.added", {**self._place(), "part": part}),
        ]

    def token(self, index: int, text: str, produced: int, finish: FinishReason | None) -> bytes:
        """One token of the answer."""
        self._texts.append(text)
        self._reason = finish or self._reason
        more = {**self._place(), "delta": text, "logprobs": []}
        return self._event("response.output_text.delta", more)

    def end(self, produced: int) -> list[bytes]:
        """The end of the stream; `produced` counts the tokens."""
        text = "".join(self._texts)
        item = _message(self._id, text)
        whole = _response(self._call, self._id, self._created, text, produced, self._reason)
        done = {**self._place(), "logprobs": [], "text": text}
        return [
            self._event("response.output_text.done", done),
            self._event("response.content_part.done", {**self._place(), "part": _part(text)}),
            self._event("response.output_item.done", {"item": item, "output_index": 0}),
            self._event("response.completed", {"response": whole}),
        ]

    def _place(self) -> dict[str, object]:
        return {"content_index": 0, "item_id": f"msg_{self._id}", "output_index": 0}

    def _event(self, kind: str, fields: Mapping[str, object]) -> bytes:
        data = {**fields, "sequence_number": self._number, "type": kind}
        self._number += 1
        data = dict(sorted(data.items()))
        return b"event: " + kind.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def response_body(
    call: Call, request_id: str, created: int, text: str, produced: int, reason: FinishReason
) -> bytes:
    """The answer that is not streamed."""
    return _encode(_response(call, request_id, created, text, produced, reason))


def _part(text: str) -> dict[str, object]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _message(request_id: str, text: str | None) -> dict[str, object]:
    return {
        "id": f"msg_{request_id}", "content": [_part(text or "")], "role": "assistant",
        "status": "completed", "type": "message", "phase": None,
    }  # fmt: skip


def _response(
    call: Call, request_id: str, created: int, text: str | None, produced: int, reason: FinishReason
) -> dict[str, object]:
    """The response as it is: `text` None while it is made."""
    cut = text is not None and reason == "length"
    status = "in_progress" if text is None else "incomplete" if cut else "completed"
    usage = None if text is None else _usage(call, produced)
    return {
        "id": f"resp_{request_id}", "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None, "metadata": None, "model": call.model, "object": "response",
        "output": [] if text is None else [_message(request_id, text)],
        "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "none", "tools": [],
        "top_p": 1.0, "background": False, "max_output_tokens": call.max_output_tokens,
        "max_tool_calls": None, "previous_response_id": None, "prompt": None, "reasoning": None,
        "service_tier": "auto", "status": status, "text": None, "top_logprobs": None,
        "truncation": "disabled", "usage": usage, "user": None, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "kv_transfer_params": None, "ec_transfer_params": None,
        "input_messages": None, "output_messages": None,
    }  # fmt: skip


def _usage(call: Call, produced: int) -> dict[str, object]:
    read = {
        "cached_tokens": call.cached_tokens or 0, "cache_write_tokens": 0,
        "input_tokens_per_turn": [], "cached_tokens_per_turn": [],
    }  # fmt: skip
    written = {
        "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
        "tool_output_tokens_per_turn": [],
    }  # fmt: skip
    return {
        "input_tokens": call.prompt_tokens, "input_tokens_details": read,
        "output_tokens": produced, "output_tokens_details": written,
        "total_tokens": call.prompt_tokens + produced,
    }  # fmt: skip
