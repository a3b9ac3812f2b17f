"""A device that is nothing but the time that its steps take.

The coefficients are a fit to what the authors of VTC measured on an A10G (24 GB) with Llama-2-7B: their profile of nine
pairs of prompt and output length, at 13 to 52 sequences a batch, is met within 2%.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    prompts alone takes no less than `base`. `num_blocks` KV blocks of 16 positions are the batch's memory."""

    base: float = 29.3e-3
    decode_row: float = 50e-6
    context: float = 1.0e-6
    prefill: float = 214e-6
    num_blocks: int = 625

    def seconds(self, prompt: int, rows: int, context: int) -> float:
        """A step of `prompt` positions of prompts, and `rows` decoding rows that attend to `context` positions
        together."""
        if not rows:
            return max(self.base, self.prefill * prompt)
        return self.base + self.prefill * prompt + self.decode_row * rows + self.context * context
