"""Text Generation Inference of Hugging Face, 2 and 3.

Names: docs/source/reference/metrics.md (commit 53fdbe617d4f) and router/src/server.rs of
huggingface/text-generation-inference. It tells nothing of its KV memory and no number of slots, and
counts tokens only as requests end: so its steps (`tgi_batch_inference_success`, for each method)
show that it works, and its time per token is the mean of each request
(`mean_time_per_token_duration`). A gauge is on the page from its first change on, so the page of a
server that has served nothing is empty of what is read here.

Its `--max-concurrent-requests` refuses with 429 {"error":"Model is overloaded","error_type":
"overloaded"} (router/src/infer/mod.rs); a stream's head is sent before, and the refusal is its
first event.

Tried: on a page written after that source (tests/fixtures/tgi), never on the real thing.
"""

from dispatcher.engines.adapter import Adapter, Refusal
from dispatcher.engines.facts import EngineFacts
from dispatcher.engines.pages import Names, histogram

WAITING, RUNNING = "tgi_queue_size", "tgi_batch_current_size"
STEPS, TPOT = "tgi_batch_inference_success", "tgi_request_mean_time_per_token_duration"
NAMES = Names([WAITING, RUNNING, STEPS, *histogram(TPOT)])


def read(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a page."""
    page = NAMES.read(text, model)
    return EngineFacts(
        waiting=page.count(WAITING),
        running=page.count(RUNNING),
        tpot=page.times(TPOT),
        generated=page.count(STEPS),
    )


TGI = Adapter(
    kind="tgi",
    paths=("/metrics",),
    shown=NAMES.shown,
    read=read,
    refusals=(Refusal(None, (b"Model is overloaded",)),),
)
