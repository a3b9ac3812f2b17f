"""The size limit of steps while the device is short of memory. No torch, and no clock of its own."""

from __future__ import annotations

from loraplex.engine.types import Sequence

PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Before a step of one token is tried again: another process that took the memory may give it back."""
FIRST_CALM = 32
LAST_CALM = 4096
"""Steps that must be computed before larger ones are tried again: at first, and at most."""


class StepBudget:
    """`limit`, in tokens, is `most` until a step does not fit. Then it is half of that step's size, and doubles after
    every `FIRST_CALM` computed steps. Each time that the doubled limit is too large, twice the number of steps must be
    computed first.

    Activations, logits and what attention gathers grow with a step's tokens, so that whatever fits alone, one token at
    a time, is computed in the end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = most
        self.num_ran_out = 0
        self._calm = 0
        self._calm_needed = FIRST_CALM
        self._grown = False
        self._barren = (
            False  # the last request that had the device alone ended for it, and nothing was computed since
        )
        self._resume_at = float("-inf")

    def pause_s(self, now: float) -> float:
        """Seconds for which no step should be tried; 0 or less if one may be."""
        return self._resume_at - now

    def ran_out(self, num_tokens: int, start: int, seq: Sequence | None, now: float) -> bool:
        """A step did not fit. False if it was of one token, at position `start` of `seq` (None: it has ended since),
        and that has been tried often enough for its request to end: once if another has just ended so."""
        self.num_ran_out += 1
        self._calm = 0
        if self._grown:
            self._calm_needed = min(2 * self._calm_needed, LAST_CALM)
            self._grown = False
        self.limit = max(1, min(self.limit, num_tokens) // 2)
        if num_tokens > 1 or seq is None:
            return True
        # Tokens that are recomputed after a preemption are no progress.
        if start > seq.starved_at:
            seq.starved_at, seq.num_starved = start, 0
        seq.num_starved += 1
        if self._barren or seq.num_starved > len(PAUSES_S):
            self._barren = True
            return False
        self._resume_at = now + PAUSES_S[seq.num_starved - 1]
        return True

    def computed(self) -> None:
        """A step was computed."""
        self._barren = False
        if self.limit == self._most:
            if self._grown and self._calm < LAST_CALM:
                self._calm += 1
            else:
                self._grown, self._calm_needed = False, FIRST_CALM
            return
        self._calm += 1
        if self._calm == self._calm_needed:
            self._calm = 0
            self._grown = True
            self.limit = min(2 * self.limit, self._most)
