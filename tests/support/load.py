"""Clients of Fairlane that know every right answer: what to ask, how, and what must come back.

The simulated engine's answer is a function of its settings and the request, so each answer is
checked whole: that of a raw client byte for byte, that of the official client field by field.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import Any

import httpx
import msgspec
import openai

from sim.openai import Call, Kind, choice_token, parse
from sim.replies import DONE, StreamReply, embeddings_body, whole_body
from sim.settings import EngineSettings
from tests.support.fleet import KEY, Fleet

PATHS: dict[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}
ANSWER_S = 120.0
"""No answer of a test takes longer."""
_CREATED = re.compile(rb'"created":\d+')
_COMMENT = re.compile(rb"^:[^\n]*\n", re.M)
_ERROR = b'data: {"error"'
_WORDS = ("light", "heavy", "first", "last", "red", "green", "short", "long", "plain")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    kind: Kind
    body: dict[str, Any]
    user: str
    cls: str = "standard"

    @property
    def stream(self) -> bool:
        """Whether an event stream is asked for."""
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the usage event."""
        return bool(self.body.get("stream_options", {}).get("include_usage"))

    @property
    def headers(self) -> dict[str, str]:
        """Key and class."""
        return {"authorization": f"Bearer {KEY}{self.user}", "x-fairlane-class": self.cls}

    def engine_body(self) -> bytes:
        """The body that an engine should get: usage is always asked for in a stream."""
        body = {**self.body}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)

    def call(self, engine: EngineSettings) -> Call:
        """The request as an engine understands it."""
        return parse(self.kind, self.engine_body(), engine)


class Got(msgspec.Struct):
    """What a raw client got."""

    status: int = 0
    """0: no head came."""
    headers: dict[str, str] = {}
    body: bytes = b""
    began_at: float | None = None
    """When the first bytes of the body came, on the loop's clock."""
    ended_at: float = 0.0
    broken: str = ""
    """Why the connection broke before the end."""

    @property
    def job(self) -> str:
        """The job's id."""
        return self.headers.get("x-fairlane-job", "")

    @property
    def events(self) -> bytes:
        """The stream without its comments."""
        return _COMMENT.sub(b"", self.body)

    @property
    def errors(self) -> int:
        """Error events in the stream."""
        return self.events.count(_ERROR)


def mixed(n: int, engine: EngineSettings, users: Sequence[str], seed: int) -> list[Ask]:
    """`n` requests of all kinds, users and classes, none like another."""
    random = Random(seed)
    return [_mixed(random, i, engine, users) for i in range(n)]


def _mixed(random: Random, i: int, engine: EngineSettings, users: Sequence[str]) -> Ask:
    kinds: tuple[Kind, ...] = ("chat", "completions", "embeddings")
    kind = random.choices(kinds, [6, 3, 1])[0]
    text = " ".join(random.choices(_WORDS, k=random.randint(1, 60))) + f" {i}"
    body: dict[str, Any] = {"model": random.choice(engine.models)}
    if kind == "embeddings":
        body["input"] = [text, f"second {i}"] if random.random() < 0.3 else text
        body["encoding_format"] = "float"
    else:
        body["max_tokens"] = random.randint(1, 40)
        if random.random() < 0.15:
            body["n"] = 2
        if random.random() < 0.6:
            body["stream"] = True
            if random.random() < 0.4:
                body["stream_options"] = {"include_usage": True}
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
    cls = random.choices(["interactive", "standard", "batch"], [3, 5, 2])[0]
    return Ask(kind=kind, body=body, user=random.choice(users), cls=cls)


def chats(
    n: int, model: str, tokens: int, *, stream: bool = True, user: str = "alice", tag: str = ""
) -> list[Ask]:
    """`n` chats of exactly `tokens` tokens each."""
    return [
        Ask(
            kind="chat",
            user=user,
            body={
                "model": model,
                "messages": [{"role": "user", "content": f"{tag} {user} {i}"}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": stream,
            },
        )
        for i in range(n)
    ]


class Client:
    """A raw client of one address, with as many connections as it needs."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=url, timeout=ANSWER_S, limits=limits, trust_env=False
        )

    async def send(self, ask: Ask, began: Callable[[Got], None] = lambda _: None) -> Got:
        """Ask and take everything that comes; `began` is called at the first bytes of the body."""
        got = Got()
        loop = asyncio.get_running_loop()
        try:
            async with self._http.stream(
                "POST", PATHS[ask.kind], json=ask.body, headers=ask.headers
            ) as response:
                got.status, got.headers = response.status_code, dict(response.headers)
                async for data in response.aiter_raw():
                    if got.began_at is None:
                        got.began_at = loop.time()
                    got.body += data
                    if got.body == data:
                        began(got)
        except httpx.HTTPError as e:
            got.broken = type(e).__name__
        got.ended_at = loop.time()
        return got

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()


def problem(ask: Ask, got: Got, engine: EngineSettings) -> str:
    """What is wrong with a raw answer; empty: it is right to the last byte."""
    if got.broken or got.status != 200:
        return f"{got.status} {got.broken} {got.body[-300:]!r}"
    if not ask.stream:
        return _differs(_CREATED.sub(b'"created":0', got.body), _whole(ask, got.job, engine))
    found = _CREATED.sub(b'"created":0', got.events)
    wanted = expected_stream(ask, got.job, engine)
    if ask.body.get("n", 1) > 1:  # how the engine's steps mix the choices is chance
        return _differs(_by_choice(found), _by_choice(wanted))
    return _differs(found, wanted)


def expected_stream(ask: Ask, job: str, engine: EngineSettings) -> bytes:
    """The events that the client of a stream gets, choice by choice, `created` as 0."""
    call = ask.call(engine)
    reply = StreamReply(call, job, 0)
    events = [*reply.begin()]
    total = 0
    for choice in call.choices:
        last = choice.sequence.output_tokens - 1
        total += last + 1
        for i in range(last + 1):
            finish = choice.sequence.reason if i == last else None
            text = choice_token(engine.seed, choice, i)
            events.append(reply.token(choice.index, text, i + 1, finish))
    usage, done = reply.end(total)
    events += [usage, done] if ask.wants_usage else [done]
    return b"".join(events)


def broken_off(ask: Ask, got: Got, engine: EngineSettings) -> str:
    """What is wrong with a stream that should end early: what came is a part of the right answer,
    then one error event and the end."""
    found = _CREATED.sub(b'"created":0', got.events)
    came, _, rest = found.partition(_ERROR)
    error, _, end = rest.partition(b"\n\n")
    if got.status != 200 or got.broken or got.errors != 1 or end != DONE or b"\n" in error:
        return f"{got.status} {got.broken} {got.errors} errors, ends {got.body[-300:]!r}"
    if not expected_stream(ask, got.job, engine).startswith(came):
        return f"not a part of the answer: {came[-300:]!r}"
    return ""


def _by_choice(stream: bytes) -> bytes:
    """The events of each choice after each other, in their order."""
    events: list[bytes] = [e + b"\n\n" for e in stream.split(b"\n\n") if e]
    events.sort(key=_choice)
    return b"".join(events)


def _choice(event: bytes) -> int:
    """Which choice an event is of; after all of them those of none."""
    found = re.search(rb'"choices":\[\{"index":(\d+)', event)
    return int(found[1]) if found else 1_000


def _whole(ask: Ask, job: str, engine: EngineSettings) -> bytes:
    call = ask.call(engine)
    if ask.kind == "embeddings":
        return embeddings_body(call, job, 0, engine.seed)
    lengths = [c.sequence.output_tokens for c in call.choices]
    return whole_body(
        call, job, 0, texts(ask, engine), lengths, [c.sequence.reason for c in call.choices]
    )


def texts(ask: Ask, engine: EngineSettings) -> list[str]:
    """The right text of each choice."""
    return [
        "".join(choice_token(engine.seed, c, i) for i in range(c.sequence.output_tokens))
        for c in ask.call(engine).choices
    ]


def _differs(found: bytes, wanted: bytes) -> str:
    if found == wanted:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
              min(len(found), len(wanted)))  # fmt: skip
    return f"differs at {at}: {found[at - 60 : at + 120]!r}, not {wanted[at - 60 : at + 120]!r}"


class Official:
    """OpenAI's own client, which checks and parses as its users' programs do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._clients: dict[str, openai.AsyncOpenAI] = {}

    def _client(self, user: str) -> openai.AsyncOpenAI:
        if user not in self._clients:
            self._clients[user] = openai.AsyncOpenAI(
                base_url=f"{self._url}/v1", api_key=KEY + user, max_retries=0, timeout=ANSWER_S
            )
        return self._clients[user]

    async def problem(self, ask: Ask, engine: EngineSettings) -> str:
        """Ask; what is wrong with the answer, empty if nothing is."""
        client = self._client(ask.user)
        api: Any = {
            "chat": client.chat.completions,
            "completions": client.completions,
            "embeddings": client.embeddings,
        }[ask.kind]
        extra = {"x-fairlane-class": ask.cls}
        try:
            answer = await api.create(**ask.body, extra_headers=extra)
            if ask.kind == "embeddings":
                return _embedding_problem(ask, answer, engine)
            seen = await _streamed(answer) if ask.stream else _read_whole(answer)
        except openai.OpenAIError as e:
            return f"{type(e).__name__}: {e}"
        return _seen_problem(ask, seen, engine)

    async def close(self) -> None:
        """Close its connections."""
        for client in self._clients.values():
            await client.close()


class _Seen(msgspec.Struct):
    texts: dict[int, str]
    reasons: dict[int, str]
    usage: tuple[int, int] | None
    ids: set[str]


async def _streamed(stream: Any) -> _Seen:
    seen = _Seen({}, {}, None, set())
    async for chunk in stream:
        seen.ids.add(chunk.id)
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            seen.texts[choice.index] = seen.texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                seen.reasons[choice.index] = choice.finish_reason
        if chunk.usage:
            seen.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return seen


def _read_whole(answer: Any) -> _Seen:
    message = hasattr(answer.choices[0], "message")
    return _Seen(
        {c.index: c.message.content if message else c.text for c in answer.choices},
        {c.index: c.finish_reason for c in answer.choices},
        (answer.usage.prompt_tokens, answer.usage.completion_tokens),
        {answer.id},
    )


def _seen_problem(ask: Ask, seen: _Seen, engine: EngineSettings) -> str:
    call = ask.call(engine)
    tokens = sum(c.sequence.output_tokens for c in call.choices)
    usage = (call.prompt_tokens, tokens) if ask.wants_usage or not ask.stream else None
    checks = {
        "texts": (seen.texts, dict(enumerate(texts(ask, engine)))),
        "reasons": (seen.reasons, {c.index: c.sequence.reason for c in call.choices}),
        "usage": (seen.usage, usage),
        "ids": (len(seen.ids), 1),
    }
    return "; ".join(f"{k}: {a!r}, not {b!r}" for k, (a, b) in checks.items() if a != b)


def _embedding_problem(ask: Ask, answer: Any, engine: EngineSettings) -> str:
    wanted = msgspec.json.decode(_whole(ask, "x", engine))["data"]
    found = [item.embedding for item in answer.data]
    vectors = [item["embedding"] for item in wanted]
    return "" if found == vectors else f"embeddings: {found!r}, not {vectors!r}"


@contextlib.asynccontextmanager
async def clients(fleet: Fleet) -> AsyncIterator[list[Client]]:
    """A raw client of each gateway."""
    made = [Client(gateway.url) for gateway in fleet.gateways]
    try:
        yield made
    finally:
        for client in made:
            await client.close()


@contextlib.asynccontextmanager
async def asking(
    made: Sequence[Client], asks: Sequence[Ask]
) -> AsyncIterator[list[asyncio.Task[Got]]]:
    """All of `asks` at once, spread over the clients; none is left open."""
    open_ = [asyncio.create_task(made[i % len(made)].send(ask)) for i, ask in enumerate(asks)]
    try:
        yield open_
    finally:
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)


def sort_out(
    asks: Sequence[Ask], answers: Sequence[Got], engine: EngineSettings
) -> tuple[set[str], set[str]]:
    """(jobs answered whole, jobs broken off in the proper way). AssertionError for all else."""
    whole: set[str] = set()
    cut: set[str] = set()
    wrong: list[tuple[str, str]] = []
    for ask, got in zip(asks, answers, strict=True):
        check = broken_off if got.errors else problem
        if text := check(ask, got, engine):
            wrong.append((got.job, text))
        (cut if got.errors else whole).add(got.job)
    assert not wrong, f"{len(wrong)} of {len(answers)} answers are wrong: {wrong[:4]}"
    return whole, cut
