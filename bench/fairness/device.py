"""A device that is nothing but the time that its steps take.

The coefficients are a fit to what the authors of VTC measured on an A10G (24 GB) with Llama-2-7B: their profile of nine
pairs of prompt and output length, at 13 to 52 sequences a batch, is met within 2%.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes


class Clock:
    """Seconds of the simulated world."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Device:
    """What a step takes, in seconds: `base` to read the weights once, more for each decoding row, each position that
    such a row attends to, and each position of a prompt (or of what is computed again after a preemption). A step of
    prompts alone takes no less than `base`. `num_blocks` KV blocks of 16 positions are the batch's memory. `attended`:
    more for each position that one of a prompt attends to; the published profile has no long prompts and shows none."""

    base: float = 29.3e-3
    decode_row: float = 50e-6
    context: float = 1.0e-6
    prefill: float = 214e-6
    attended: float = 0.0
    num_blocks: int = 625

    def seconds(self, prompt: int, rows: int, context: int, attended: float = 0.0) -> float:
        """A step of `prompt` positions of prompts that attend to `attended` positions together, and `rows` decoding
        rows that attend to `context`."""
        prompts = self.prefill * prompt + self.attended * attended
        if not rows:
            return max(self.base, prompts)
        return self.base + prompts + self.decode_row * rows + self.context * context

    def measured(self, most: int) -> MeasuredTimes:
        """The times that a server measures of it at its start, for steps of up to `most` rows."""
        rows = {1: self.base} | {rows: self.base + self.prefill * rows for rows in (16, 64, most)}
        costs = StepCosts.from_seconds({1: self.base, 64: self.base + 64 * self.decode_row})
        return MeasuredTimes(rows, self.attended, 0.0, 0.0, costs)


LONG_PROMPTS = Device(attended=36e-9)
"""One on which a position behind 6,000 others takes twice as long as one behind none."""
