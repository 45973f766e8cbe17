"""Answers in vLLM 0.32's bytes: stream events, whole bodies, the list of models.

Keys and their order are those of a real server without `--enable-per-request-metrics`.
"""

from __future__ import annotations

import base64
import struct

import msgspec

from sim.openai import Call, Kind
from sim.settings import EngineSettings
from sim.text import FinishReason, text_base

SYSTEM_FINGERPRINT = "vllm-0.32.0-5c4268c0"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
VERSION = b'{"version":"0.32.0"}'
EMBEDDING_SIZE = 16
_ID_PREFIX: dict[Kind, str] = {
    "chat": "chatcmpl-", "completions": "cmpl-", "embeddings": "embd-", "responses": "resp_",
}  # fmt: skip
_FINGERPRINT = f',"system_fingerprint":"{SYSTEM_FINGERPRINT}"'.encode()
_encode = msgspec.json.encode


class StreamReply:
    """Writes the events of one streamed chat or text completion."""

    def __init__(self, call: Call, request_id: str, created: int) -> None:
        """`request_id` is without the kind's prefix; `created` is Unix seconds."""
        self._call = call
        chat = call.kind == "chat"
        name = "chat.completion.chunk" if chat else "text_completion"
        self._head = (
            b'data: {"id":' + _encode(_ID_PREFIX[call.kind] + request_id)
            + b',"object":"' + name.encode() + b'","created":' + str(created).encode()
            + b',"model":' + _encode(call.model) + b',"choices":['
        )  # fmt: skip
        text = ',"delta":{"content":' if chat else ',"text":'
        self._texts = [
            self._head + f'{{"index":{choice.index}{text}'.encode() for choice in call.choices
        ]
        self._after = b'},"logprobs":null' if chat else b',"logprobs":null'
        middle = b',"token_ids":null}]' if chat else b"," + _COMPLETION_TAIL + b"}]"
        stop = b"" if chat else b',"stop_reason":null'
        self._plain = self._after + b',"finish_reason":null' + stop + middle
        self._middle = middle

    def begin(self) -> list[bytes]:
        """What comes before the first token: the role of each choice of a chat."""
        if self._call.kind != "chat":
            return []
        role = ',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        after = b',"prompt_token_ids":null,"prompt_text":null}\n\n'
        return [
            self._head + f'{{"index":{i}{role}'.encode() + self._usage(i, 0) + after
            for i in range(len(self._call.choices))
        ]

    def token(self, index: int, text: str, produced: int, finish: FinishReason | None) -> bytes:
        """One token of choice `index`; `produced` counts that choice's tokens with this one."""
        start = self._texts[index] + _encode(text)
        if finish is None:
            if not self._call.continuous_usage:
                return start + self._plain + b"}\n\n"
            return start + self._plain + self._usage(index, produced) + b"}\n\n"
        ending = f',"finish_reason":"{finish}","stop_reason":null'.encode()
        event = start + self._after + ending + self._middle + self._usage(index, produced)
        return event + (b"" if self._call.include_usage else _FINGERPRINT) + b"}\n\n"

    def end(self, produced: int) -> list[bytes]:
        """The end of the stream; `produced` counts the tokens of all choices."""
        if not self._call.include_usage:
            return [DONE]
        usage: dict[str, object] = {**usage_counts(self._call.prompt_tokens, produced)}
        if (details := _details(self._call)) is not None:
            usage["prompt_tokens_details"] = details
        return [self._head + b'],"usage":' + _encode(usage) + _FINGERPRINT + b"}\n\n", DONE]

    def _usage(self, index: int, produced: int) -> bytes:
        if not self._call.continuous_usage:
            return b""
        # Each choice counts its own prompt alone.
        usage = usage_counts(self._call.choices[index].sequence.prompt_tokens, produced)
        if self._call.kind == "chat":
            usage["completion_tokens_details"] = None
        return b',"usage":' + _encode(usage)


_COMPLETION_TAIL = b'"prompt_token_ids":null,"token_ids":null'


def usage_counts(prompt: int, produced: int) -> dict[str, int | None]:
    """The numbers of a `usage` object."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + produced,
            "completion_tokens": produced}  # fmt: skip


def _details(call: Call) -> dict[str, int] | None:
    return None if call.cached_tokens is None else {"cached_tokens": call.cached_tokens}


def whole_body(
    call: Call,
    request_id: str,
    created: int,
    texts: list[str],
    tokens: list[int],
    reasons: list[FinishReason],
) -> bytes:
    """The body of an answer that is not streamed; texts, tokens and reasons by choice."""
    chat = call.kind == "chat"
    made = zip(call.choices, texts, reasons, strict=True)
    choices = [
        _chat_choice(c.index, text, why) if chat else _text_choice(c.index, text, why)
        for c, text, why in made
    ]
    usage: dict[str, object] = {**usage_counts(call.prompt_tokens, sum(tokens))}
    usage |= {"prompt_tokens_details": _details(call), "completion_tokens_details": None}
    body: dict[str, object] = {
        "id": _ID_PREFIX[call.kind] + request_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": call.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": usage,
    }
    if chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    body |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    return _encode(body)


def _chat_choice(index: int, text: str, reason: FinishReason) -> dict[str, object]:
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason,
            "stop_reason": None, "token_ids": None, "routed_experts": None}  # fmt: skip


def _text_choice(index: int, text: str, reason: FinishReason) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason,
            "stop_reason": None, "token_ids": None, "prompt_logprobs": None,
            "prompt_token_ids": None, "routed_experts": None}  # fmt: skip


def embeddings_body(call: Call, request_id: str, created: int, seed: int) -> bytes:
    """The answer of `/v1/embeddings`: 16 numbers between -1 and 1 for each input."""
    data = []
    for choice in call.choices:
        base = text_base(seed, choice.fingerprint)
        vector = [((base >> (i * 4)) % 1_000) / 500.0 - 1.0 for i in range(EMBEDDING_SIZE)]
        packed = base64.b64encode(struct.pack(f"<{EMBEDDING_SIZE}f", *vector)).decode()
        value = packed if call.base64 else vector
        data.append({"index": choice.index, "object": "embedding", "embedding": value})
    usage = {**usage_counts(call.prompt_tokens, 0), "prompt_tokens_details": _details(call)}
    return _encode({
        "id": _ID_PREFIX["embeddings"] + request_id,
        "object": "list",
        "created": created,
        "model": call.model,
        "data": data,
        "usage": usage,
    })  # fmt: skip


def error_event(status: int, message: str, kind: str) -> bytes:
    """An error inside a stream: unlike the other events it has spaces, as `json.dumps` writes."""
    error = f'{{"message": {_encode(message).decode()}, "type": "{kind}", "param": null'
    return f'data: {{"error": {error}, "code": {status}}}}}\n\n'.encode()


def models_body(settings: EngineSettings, created: int) -> bytes:
    """The answer of `/v1/models`."""
    data = [_model_card(settings, model, created) for model in settings.models]
    return _encode({"object": "list", "data": data})


def _model_card(settings: EngineSettings, model: str, created: int) -> dict[str, object]:
    if settings.engine == "tgi":  # which does not know its start
        return {"id": model, "object": "model", "created": 0, "owned_by": model}
    card: dict[str, object] = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": settings.engine,
        "root": model,
        "parent": None,
        "max_model_len": settings.max_model_len,
    }
    if settings.engine == "vllm":
        card["permission"] = [_permission(created)]
    return card


def _permission(created: int) -> dict[str, object]:
    return {
        "id": "modelperm-0000000000000000",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
