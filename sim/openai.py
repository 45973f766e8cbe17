"""Reading OpenAI requests as vLLM 0.32 does: what each asks of the engine, and its refusals.

Prompt tokens are counted by a rule, not by a tokenizer: the UTF-8 bytes of all text divided by 4,
rounded up, at least 1; a prompt of token ids counts its ids.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from sim.events import EngineRequest
from sim.fields import ApiError, Fields, decode_object, invalid
from sim.inputs import response_text
from sim.settings import EngineSettings
from sim.text import FinishReason, count_tokens, drawn_length, plan_length, text_base, token_text

Kind = Literal["chat", "completions", "embeddings", "responses"]
BYTES_PER_TOKEN = 4
COMPLETIONS_MAX_TOKENS = 16
CHOICES_MAX = 128
_INT64_MAX = (1 << 63) - 1
_INCOMPATIBLE = (
    "continue_final_message and add_generation_prompt are not compatible. Use "
    "continue_final_message when you want the model to continue the final message, and "
    "add_generation_prompt when you want to add a header that will prompt it to start a new "
    "assistant message instead."
)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a call: the sequence to compute and where its text comes from.

    Its text is tokens `first_token` … of the answer of `fingerprint`: more than 0 where the
    request continues an answer that was cut. `silent`: that answer was complete already, so the
    model only says so, with one token that has no text.
    """

    index: int
    fingerprint: str
    first_token: int
    silent: bool
    sequence: EngineRequest


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request, ready to be computed."""

    kind: Kind
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    base64: bool
    prompt_tokens: int
    cached_tokens: int | None
    """Of these, as the usage of the whole answer says; None: it does not."""
    choices: tuple[Choice, ...]
    max_output_tokens: int | None = None


def parse(kind: Kind, body: bytes, settings: EngineSettings, priority: str | None = None) -> Call:
    """Read a request body. `priority` is the value of the `X-Vllm-Priority` header.

    Raises ApiError with the answer that vLLM gives to a body it refuses.
    """
    fields = Fields(decode_object(body))
    model = _model(fields, settings)
    stream = fields.flag("stream") if kind != "embeddings" else False
    options = fields.mapping("stream_options")
    if options and not stream:
        text = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise ApiError(400, text, param="stream_options")
    usage = bool(options.get("include_usage")) or settings.force_include_usage
    continuous = bool(options.get("continuous_usage_stats")) or settings.force_include_usage
    prompts = _prompts(kind, fields, model)
    urgency = _priority(fields, priority)
    choices = _choices(kind, fields, prompts, urgency, settings)
    tokens, cached = sum(prompt.tokens for prompt in prompts), settings.cached_tokens
    return Call(
        kind=kind,
        model=model,
        stream=stream,
        include_usage=usage,
        continuous_usage=usage and continuous,
        base64=fields.get("encoding_format") == "base64",
        prompt_tokens=tokens,
        cached_tokens=None if cached is None else min(cached, tokens),
        choices=choices,
        max_output_tokens=fields.integer("max_output_tokens"),
    )


def expected_answers(
    kind: Kind, body: bytes, settings: EngineSettings
) -> tuple[tuple[str, ...], ...]:
    """The token texts of each choice that this engine answers to a request body.

    Joined, they are the choice's text; ApiError as for `parse`.
    """
    call = parse(kind, body, settings)
    return tuple(
        tuple(choice_token(settings.seed, choice, i) for i in range(choice.sequence.output_tokens))
        for choice in call.choices
    )


def choice_token(seed: int, choice: Choice, index: int) -> str:
    """Token `index` of a choice, counted from where its own answer begins."""
    if choice.silent:
        return ""
    return token_text(text_base(seed, choice.fingerprint), choice.first_token + index)


class _Prompt(msgspec.Struct, frozen=True):
    """One prompt: its size, what it is made of, and tokens of a cut answer at its end."""

    tokens: int
    content: object
    answered: int = 0


def _model(fields: Fields, settings: EngineSettings) -> str:
    """The model to answer as; a missing or empty name is the first one, as in vLLM. TGI has one
    model, and takes any name for it."""
    model = settings.models[0] if settings.engine == "tgi" else fields.get("model")
    if model is None or model == "":
        return settings.models[0]
    if not isinstance(model, str):
        raise invalid("string_type", "model", "Input should be a valid string", model)
    if model not in settings.models:
        text = f"The model `{model}` does not exist. Valid aliases: {', '.join(settings.models)}."
        raise ApiError(404, text, "NotFoundError", "model")
    return model


def _priority(fields: Fields, header: str | None) -> int:
    """The request's priority: the header over the body."""
    value = fields.integer("priority") or 0
    if abs(value) > _INT64_MAX:
        text = f"Input should be less than or equal to {_INT64_MAX}"
        more = f", 'ctx': {{'le': {_INT64_MAX}}}"
        raise invalid("less_than_equal", "priority", text, value, more)
    if header is None:
        return value
    try:
        return int(header)
    except ValueError:
        raise ApiError(400, f"Invalid X-Vllm-Priority header: {header!r}") from None


def _prompts(kind: Kind, fields: Fields, model: str) -> list[_Prompt]:
    if kind == "chat":
        return [_chat_prompt(fields, model)]
    if kind == "responses":
        return [_Prompt(_tokens_of(response_text(fields)), fields.get("input"))]
    name = "prompt" if kind == "completions" else "input"
    value = fields.get(name)
    if value is None:
        raise invalid("missing", name, "Field required", fields.body)
    if isinstance(value, str):
        return [_Prompt(_tokens_of(value), value)]
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{name} must be a string, or a list of strings or token ids")
    if all(isinstance(item, int) for item in value):
        return [_Prompt(len(value), value)]
    return [_Prompt(len(item) if isinstance(item, list) else _tokens_of(item), item)
            for item in value]  # fmt: skip


def _chat_prompt(fields: Fields, model: str) -> _Prompt:
    messages = fields.get("messages")
    if messages is None:
        raise invalid("missing", "messages", "Field required", fields.body)
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise invalid("list_type", "messages", "Input should be a valid list", messages)
    if not messages:
        text = "Cannot apply chat template to an empty conversation. Provide at least one message."
        raise ApiError(400, text)
    texts = [_message_text(message, model) for message in messages]
    size = _tokens_of("".join(texts))
    if not fields.flag("continue_final_message"):
        return _Prompt(size, messages)
    if fields.get("add_generation_prompt") is not False:
        raise ApiError(400, _INCOMPATIBLE)
    if messages[-1].get("role") != "assistant":
        return _Prompt(size, messages)
    return _Prompt(size, messages[:-1], count_tokens(texts[-1]))


def _message_text(message: dict[str, object], model: str) -> str:
    """All text of a message; an image is refused, as by a model that sees none."""
    content = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
            raise ApiError(400, f"{model} is not a multimodal model")
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _tokens_of(text: object) -> int:
    size = len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
    return max(1, -(-size // BYTES_PER_TOKEN))


def _choices(
    kind: Kind, fields: Fields, prompts: list[_Prompt], urgency: int, settings: EngineSettings
) -> tuple[Choice, ...]:
    """One choice for each prompt and each of its `n` answers, in vLLM's order."""
    copies = fields.integer("n") if kind != "embeddings" else 1
    copies = 1 if copies is None else copies
    if copies < 1:
        raise ApiError(400, f"n must be at least 1, got {copies}.")
    if copies * len(prompts) > CHOICES_MAX:
        raise ApiError(400, f"at most {CHOICES_MAX} answers in one request, got {copies}.")
    _check_sampling(fields)
    made: list[Choice] = []
    for prompt in prompts:
        content = msgspec.json.encode(
            [kind, prompt.content, fields.integer("seed")], order="sorted"
        )
        digest = hashlib.sha256(content).hexdigest()[:32]
        for copy in range(copies):
            made.append(_choice(kind, fields, prompt, f"{digest}:{copy}", len(made), urgency,
                                settings))  # fmt: skip
    return tuple(made)


def _choice(
    kind: Kind, fields: Fields, prompt: _Prompt, fingerprint: str, index: int, urgency: int,
    settings: EngineSettings,
) -> Choice:  # fmt: skip
    room = settings.max_model_len - prompt.tokens
    if room < (0 if kind == "embeddings" else 1):
        raise _too_long(prompt.tokens, settings.max_model_len)
    silent, tokens = False, 0
    reason: FinishReason = "stop"
    if kind != "embeddings":
        limit = min(_max_tokens(kind, fields, room), room)
        left = drawn_length(settings.seed, fingerprint, settings.mean_output_tokens)
        left -= prompt.answered
        endless = fields.flag("ignore_eos")
        least = fields.integer("min_tokens") or 0
        silent = left <= 0 and not endless and least == 0
        tokens, reason = plan_length(left, limit, least, endless)
    sequence = EngineRequest(
        prompt_tokens=prompt.tokens, output_tokens=tokens, reason=reason, priority=urgency
    )
    return Choice(
        index=index,
        fingerprint=fingerprint,
        first_token=prompt.answered,
        silent=silent,
        sequence=sequence,
    )


def _max_tokens(kind: Kind, fields: Fields, room: int) -> int:
    """The answer's limit: chat has room to the end of the context, completions have 16."""
    response = kind == "responses"
    limit = fields.integer("max_output_tokens" if response else "max_completion_tokens")
    if limit is None and not response:
        limit = fields.integer("max_tokens")
    if limit is None:
        return COMPLETIONS_MAX_TOKENS if kind == "completions" else room
    if limit < 1:
        text = f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})"
        raise ApiError(400, text, param="max_tokens")
    return limit


def _check_sampling(fields: Fields) -> None:
    temperature, top_p = fields.number("temperature"), fields.number("top_p")
    if temperature is not None and temperature < 0:
        text = f"temperature must be non-negative, got {temperature}."
        text += f" (parameter=temperature, value={temperature})"
        raise ApiError(400, text, param="temperature")
    if top_p is not None and not 0 < top_p <= 1:
        text = f"top_p must be in (0, 1], got {top_p}. (parameter=top_p, value={top_p})"
        raise ApiError(400, text, param="top_p")


def _too_long(tokens: int, limit: int) -> ApiError:
    text = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"at least {tokens} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={tokens})"
    )
    return ApiError(400, text, param="input_tokens")
