"""What goes into the engine model and what comes out of it."""

from __future__ import annotations

import msgspec

from sim.text import FinishReason


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute.

    `output_tokens` is its exact answer length and `reason` why it ends there; 0 is an embedding:
    its whole prompt in one step, no token. A lower `priority` is more urgent (priority mode only).
    """

    prompt_tokens: int
    output_tokens: int
    reason: FinishReason = "length"
    priority: int = 0


class TokenEvent(msgspec.Struct, frozen=True):
    """A sequence produced its token number `index` (from 0) at time `at`."""

    request_id: int
    at: float
    index: int


class Finished(msgspec.Struct, frozen=True):
    """A sequence is complete with `tokens` tokens; follows its last TokenEvent at once."""

    request_id: int
    at: float
    tokens: int
    reason: FinishReason


Event = TokenEvent | Finished


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after a change: what an observer sees."""

    at: float
    running: int
    waiting: int
    free_slots: int
    kv_usage: float
    preemptions: int
