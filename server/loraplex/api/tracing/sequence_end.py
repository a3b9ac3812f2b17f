"""The record of one ended sequence of a request."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.types import FinishReason, Timing


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """`timing` is None where the engine died, or refused the sequence, and `error` is the engine's code for it."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timing: Timing | None
    error: str | None
