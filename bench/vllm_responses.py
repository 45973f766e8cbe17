"""The phase of `bench.vllm` for `/v1/responses`: plain, streamed, in the background."""

from collections.abc import Awaitable, Callable
from typing import Any

import openai

from bench.vllm_asks import openai_client
from bench.vllm_engine import MODEL, Report
from tests.support.wait import wait_until

TOKENS, LONG = 24, 1_500
END_S = 60.0
LOST_AFTER = 6
"""Events of a stream before its connection is lost."""
ENDED = ("completed", "incomplete", "failed", "cancelled")


async def responses(gateway: str, report: Report) -> None:
    """Through the official client. vLLM's model of the trial ends where it may say no more."""
    asks: list[tuple[str, Callable[[openai.AsyncOpenAI], Awaitable[tuple[bool, str]]]]] = [
        ("a response, whole and streamed", _plain),
        ("a response in the background", _background),
        ("its stream, lost and followed from there", _followed),
        ("a response in the background is cancelled", _cancelled),
        ("one that the engine refuses, in the background", _refused),
    ]
    async with openai_client(gateway) as client:
        for what, ask in asks:
            good, figure = await ask(client)
            report.add(good, what, figure)


def _text(event: Any) -> str:
    return str(event.delta) if event.type == "response.output_text.delta" else ""


async def _over(client: openai.AsyncOpenAI, id: str) -> Any:
    async def found() -> Any:
        response = await client.responses.retrieve(id)
        return response if response.status in ENDED else None

    return await wait_until(found, timeout=END_S, what=f"the end of {id}")


async def _plain(client: openai.AsyncOpenAI) -> tuple[bool, str]:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": TOKENS,
                             "temperature": 0.0}  # fmt: skip
    whole = await client.responses.create(**asked)
    events = [e async for e in await client.responses.create(**asked, stream=True)]
    text = "".join(map(_text, events))
    tokens = whole.usage.output_tokens if whole.usage else 0
    good = whole.output_text == text and tokens == TOKENS
    return good, f"{tokens} tokens, {len(events)} events, {whole.status}"


async def _background(client: openai.AsyncOpenAI) -> tuple[bool, str]:
    made = await client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=TOKENS, background=True
    )
    found = await _over(client, made.id)
    tokens = found.usage.output_tokens if found.usage else 0
    good = made.status in ("queued", "in_progress") and tokens == TOKENS
    return good, f"{made.status}, then {found.status}, {tokens} tokens"


async def _followed(client: openai.AsyncOpenAI) -> tuple[bool, str]:
    stream = await client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=TOKENS, background=True, stream=True
    )
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if len(events) == LOST_AFTER:
            break
    await stream.close()
    id, last = events[0].response.id, events[-1].sequence_number
    rest = await client.responses.retrieve(id, stream=True, starting_after=last)
    events += [e async for e in rest]
    numbers = [e.sequence_number for e in events]
    found = await _over(client, id)
    good = numbers == list(range(len(events))) and found.output_text == "".join(map(_text, events))
    return good, f"{len(events)} events, {found.status}"


async def _cancelled(client: openai.AsyncOpenAI) -> tuple[bool, str]:
    made = await client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=LONG, background=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    await client.responses.cancel(made.id)
    found = await _over(client, made.id)
    return found.status == "cancelled", f"{made.status}, then {found.status}"


async def _refused(client: openai.AsyncOpenAI) -> tuple[bool, str]:
    made = await client.responses.create(model=MODEL, input="x", temperature=-3, background=True)
    found = await _over(client, made.id)
    code = found.error.code if found.error else ""
    return code == "invalid_prompt", f"{found.status}: {code}"
