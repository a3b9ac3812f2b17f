"""The facts of one ended request, built once: usage row, metrics, trace and access log read them here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.engine.types import AdapterState, FinishReason, Timing, Usage

NOTHING = Usage(0, 0)


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """One ended sequence. `timing` is None where the engine died, or refused the sequence, and `error` is the engine's
    code for it. `seconds`: from its submission to its last token, or to now without one. `shared_tokens` of its prompt
    were the base model's in the prefix cache; None where the adapter works from the first token on, or there is
    none."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    max_tokens: int
    seconds: float
    shared_tokens: int | None
    timing: Timing | None
    error: str | None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One ended request. `status`: see `loraplex.control.usage.records.Ended`. `queue_s` is the longest time in the
    queue among its sequences; `first_token_at` is when the first token of all came, by `time.monotonic`. `sequences`
    are of its prompts one after the other, `n` of each; there are none where the engine took none."""

    status: str
    usage: Usage = NOTHING
    queue_s: float = 0.0
    first_token_at: float | None = None
    adapter_state: AdapterState | None = None
    n: int = 1
    sequences: Sequence[SequenceEnd] = ()

    @property
    def gap_s(self) -> float | None:
        """Mean time between two tokens of its sequences, in seconds; None where none has two."""
        spent, gaps = 0.0, 0
        for end in self.sequences:
            timing = end.timing
            if timing is None or timing.first_token_s is None or timing.last_token_s is None:
                continue
            spent += timing.last_token_s - timing.first_token_s
            gaps += max(0, end.completion_tokens - 1)
        return spent / gaps if gaps else None
