"""How each engine refuses what its full queue cannot take.

vLLM 0.32 answers 503 before it sends a stream's head (`--max-num-queued-reqs`). Text Generation
Inference answers 429 (`--max-concurrent-requests`; router/src/infer/mod.rs), SGLang 503
(`--max-queued-requests`; srt/entrypoints), each with a body of its own; these two have sent a
stream's head already, and the refusal is its only event.
"""

from __future__ import annotations

import msgspec

from sim.fields import ApiError, overloaded
from sim.settings import Face

STREAM = "text/event-stream; charset=utf-8"


def refusal(engine: Face, *, stream: bool) -> ApiError:
    """The error of a call that finds the queue full."""
    if engine == "vllm":
        return overloaded()
    if engine == "tgi":
        error = ApiError(429, "Model is overloaded", "overloaded")
        error.body = msgspec.json.encode({"error": str(error), "error_type": error.kind})
        event = error.body
    else:
        error = ApiError(503, "The request queue is full.", "503")
        fields = {"object": "error", "message": str(error), "type": "503", "param": None,
                  "code": 503}  # fmt: skip
        error.body = msgspec.json.encode(fields)
        event = msgspec.json.encode({"error": {**fields, "type": "SERVICE_UNAVAILABLE"}})
    if stream:
        error.status, error.content_type = 200, STREAM
        end = b"data: [DONE]\n\n" if engine == "sglang" else b""
        error.body = b"data: " + event + b"\n\n" + end
    return error
