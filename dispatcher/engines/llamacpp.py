"""llama.cpp's server, started with `--metrics`.

Names: tools/server/README.md, "GET /metrics", of ggml-org/llama.cpp, commit 00dc8057ab28.
`kv_cache_usage_ratio` is of versions up to May 2025: of newer ones KV memory is unknown. Tokens and
their time are counted as requests end; `n_decode_total` counts each step. The page tells no number
of slots (`--parallel`).

A server that loads its model refuses with 503 {"error":{"code":503,"message":"Loading model",
"type":"unavailable_error"}}.

Tried: on pages written after that source (tests/fixtures/llamacpp), never on the real thing.
Without `--metrics` it answers 501, and in router mode it wants a `?model=`, which is not sent.
"""

from dispatcher.engines.adapter import Adapter, Refusal
from dispatcher.engines.facts import EngineFacts, TokenTimes
from dispatcher.engines.pages import Names

WAITING, RUNNING = "llamacpp:requests_deferred", "llamacpp:requests_processing"
KV, STEPS = "llamacpp:kv_cache_usage_ratio", "llamacpp:n_decode_total"
TOKENS, SECONDS = "llamacpp:tokens_predicted_total", "llamacpp:tokens_predicted_seconds_total"
NAMES = Names([WAITING, RUNNING, KV, STEPS, TOKENS, SECONDS])


def read(text: bytes, model: str | None) -> EngineFacts:
    """The facts of a page."""
    page = NAMES.read(text, model)
    seconds, tokens = page.total(SECONDS), page.count(TOKENS)
    tpot = None if seconds is None or tokens is None else TokenTimes(seconds, tokens)
    return EngineFacts(
        waiting=page.count(WAITING),
        running=page.count(RUNNING),
        kv=page.share(KV),
        tpot=tpot,
        generated=page.count(STEPS),
    )


LLAMACPP = Adapter(
    kind="llamacpp",
    paths=("/metrics",),
    shown=NAMES.shown,
    read=read,
    refusals=(Refusal(503, (b"Loading model",)),),
)
