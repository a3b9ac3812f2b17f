"""A device that is nothing but the time that its steps take.

The coefficients are a fit to what the authors of VTC measured on an A10G (24 GB) with Llama-2-7B: their profile of nine
pairs of prompt and output length, at 13 to 52 sequences a batch, is met within 2%.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loraplex.engine.types import StepPlan, StepResult

TOKEN = 7
"""What every row draws. Whose tokens are right is the business of other tests."""


class Clock:
    """Seconds of the simulated world."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Device:
    """What a step takes, in seconds: `base` to read the weights once, more for each decoding row, each position that
    such a row attends to, and each position of a prompt (or of what is computed anew after a preemption). A step of
    prompts alone takes no less than `base`. `num_blocks` KV blocks of 16 positions are the batch's memory."""

    base: float = 29.3e-3
    decode_row: float = 50e-6
    context: float = 1.0e-6
    prefill: float = 214e-6
    num_blocks: int = 625

    def seconds(self, plan: StepPlan) -> float:
        prompt = sum(row.num_tokens for row in plan.scheduled if row.num_tokens > 1)
        decoding = [row for row in plan.scheduled if row.num_tokens == 1]
        if not decoding:
            return max(self.base, self.prefill * prompt)
        context = sum(row.start for row in decoding)
        return self.base + self.prefill * prompt + self.decode_row * len(decoding) + self.context * context


class TimedRunner:
    """Computes nothing, and lets the time of it pass. `on_step` is told of every plan when its time has passed."""

    def __init__(self, device: Device, clock: Clock, on_step: Callable[[StepPlan], None]) -> None:
        self._device = device
        self._clock = clock
        self._on_step = on_step

    def submit(self, plan: StepPlan) -> object:
        return plan

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, StepPlan)
        self._clock.now += self._device.seconds(handle)
        self._on_step(handle)
        return StepResult(handle.step_id, tuple((TOKEN,) if row.samples else () for row in handle.scheduled))
