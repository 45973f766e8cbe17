"""What `bench.vllm` asks a real vLLM, and what is wrong with an answer."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec

from bench.vllm_engine import ANSWER_S, MODEL, Got

WORDS = "the of and to in is that for it as was with be by on not he they which one you"
USERS = ("alice", "bob", "carol", "dave")
_OWN = (
    (re.compile(rb'"id":"(chatcmpl|cmpl)-[^"]*"'), b'"id":""'),
    (re.compile(rb'"created":\d+'), b'"created":0'),
)
_COMMENT = re.compile(rb"^:[^\n]*\n", re.M)
_INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')


def chat(text: str, tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """A chat of exactly so many output tokens."""
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    return "chat", body | more


def text(prompt: str, tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """A text completion of exactly so many output tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return "text", body | more


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SAME = [
    chat("Tell me a story", 20, temperature=0),
    chat("Tell me a story", 20, temperature=0, stream=True),
    chat("Another one", 20, temperature=0, **USAGE),
    chat("With logprobs", 5, temperature=0, logprobs=True, top_logprobs=2, stream=True),
    chat("Two of them", 8, seed=3, n=2, stream=True),
    text("Once upon a time", 20, temperature=0, stream=True),
    text("Once upon a time", 20, temperature=0, logprobs=1),
]
WRONG = [
    chat("the " * 3000, 5),
    chat("the " * 3000, 5, stream=True),
    text("the " * 3000, 5, **USAGE),
    ("chat", {"model": MODEL, "messages": [{"role": 7, "content": "x"}]}),
    chat("x", 5, temperature=-1),
    chat("x", 5, top_p=2, stream=True),
    chat("x", 5, temperature="warm"),
]


def mixed(n: int) -> list[tuple[str, dict[str, Any]]]:
    """`n` different requests of all shapes."""
    random = Random(n)
    found = []
    for i in range(n):
        more: dict[str, Any] = {"user": random.choice(USERS)}
        if random.random() < 0.6:
            more |= USAGE if random.random() < 0.5 else {"stream": True}
        if random.random() < 0.2:
            more["n"] = 2
        make = random.choice((chat, chat, text))
        if random.random() < 0.2:
            more["logprobs"] = True if make is chat else 1
        words = " ".join(random.choices(WORDS.split(), k=random.randint(1, 80)))
        found.append(make(f"{i} {words}", random.randint(5, 60), **more))
    return found


def output(body: dict[str, Any]) -> int:
    """Output tokens of a request's answer."""
    return int(body["max_tokens"]) * int(body.get("n", 1))


def comparable(got: Got) -> bytes:
    """A body without what differs between two answers; events of several choices in order."""
    data = got.body
    for pattern, instead in _OWN:
        data = pattern.sub(instead, data)
    if not got.kind.startswith("text/event-stream"):
        return data

    def choice(event: Any) -> int:
        index = _INDEX.search(event)
        return int(index[1]) if index else 99

    return b"\n\n".join(sorted(data.split(b"\n\n"), key=choice))


def without_usage(stream: bytes) -> bytes:
    """A stream without its usage event."""
    return b"\n\n".join(e for e in stream.split(b"\n\n") if b'"choices":[],' not in e)


def differs(one: bytes, other: bytes) -> str:
    """Where two bodies begin to differ; empty: nowhere."""
    if one == other:
        return ""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return (
        f"at {at}: {one[max(0, at - 80) : at + 80]!r} became {other[max(0, at - 80) : at + 80]!r}"
    )


def flaw(body: dict[str, Any], got: Got) -> str:
    """What is wrong with a raw answer; empty: nothing."""
    if got.status != 200:
        return f"{got.status} {got.body[:300]!r}"
    if not body.get("stream"):
        return flaw_of(body, [msgspec.json.decode(got.body)])
    *events, done, rest = _COMMENT.sub(b"", got.body).split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        return f"ends with {got.body[-200:]!r}"
    try:
        chunks = [msgspec.json.decode(e.removeprefix(b"data: ")) for e in events]
    except msgspec.DecodeError as e:
        return f"{e}: {got.body!r}"
    return flaw_of(body, chunks)


def flaw_of(body: dict[str, Any], chunks: list[dict[str, Any]]) -> str:
    """The same of decoded chunks, or of the one body."""
    ends = [c["finish_reason"] for k in chunks for c in k["choices"] if c.get("finish_reason")]
    usages = [k["usage"]["completion_tokens"] for k in chunks if k.get("usage")]
    asked = not body.get("stream") or "stream_options" in body
    wanted = (["length"] * body.get("n", 1), [output(body)] if asked else [])
    return "" if (ends, usages) == wanted else f"{(ends, usages)}, not {wanted}"


@asynccontextmanager
async def openai_client(url: str) -> AsyncIterator[Any]:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="sk-official", max_retries=0, timeout=ANSWER_S
    ) as client:
        yield client


async def official(client: Any, kind: str, body: dict[str, Any]) -> str:
    """Ask with OpenAI's client; what is wrong with the answer."""
    api = client.chat.completions if kind == "chat" else client.completions
    known = {k: v for k, v in body.items() if k != "ignore_eos"}
    try:
        answer = await api.create(**known, extra_body={"ignore_eos": True})
        parts = [part async for part in answer] if body.get("stream") else [answer]
    except Exception as e:  # whatever it is, it is the answer's flaw
        return f"{type(e).__name__}: {e}"
    return flaw_of(body, [part.model_dump() for part in parts])
