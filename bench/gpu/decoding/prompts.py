"""A prompt with one adapter of rank 16 on an H200, by launches, rounds and bytes, as the simulator has decoding steps.

B sides by tiles were measured where each took more registers than its share, so that of three programs a multiprocessor
two ran, and the third when they had ended: two waves. `tiles` reproduces that within ERROR, from one constant,
ITEM_US. Tiles that are bound to their share, and strips, are predictions; no device has run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.gpu.decoding.simulator import (
    BANDWIDTH,
    GROUPS,
    LAYERS,
    MULTIPROCESSORS,
    Fit,
    Planned,
    launch_us,
)
from loraplex.kernels.lora.triton_tiling import STRIP_TILES, LoraTiling

ERROR = 0.05
"""The largest relative error of the time that an adapter takes in a measured prompt."""
ITEM_US = 18.0
"""64 rows by 128 columns of a B side by tiles: both halves sum their hidden values, multiply, and then load y."""
TILE_US = 0.35
"""A strip's tile, assumed: the latency of memory, 0.7 µs, over the two tiles that are ahead of it."""
SUMS_US = 1.5
"""A strip's hidden values, assumed: its piece and record, and the planes."""
STAGES = 3
"""Stages of strips."""


@dataclass(frozen=True)
class Prompt:
    """A prompt's rows, and what an H200 took without an adapter and with one, in ms (docs/lab/2026-11-27-h200.md)."""

    rows: int
    base_ms: float
    lora_ms: float

    @property
    def layer_us(self) -> float:
        """µs that the adapter took in a layer, as measured."""
        return (self.lora_ms - self.base_ms) * 1e3 / LAYERS

    def left(self, layer_us: float) -> float:
        """The part of the base's speed that is left where the adapter takes `layer_us` in each layer."""
        return self.base_ms / (self.base_ms + layer_us * LAYERS / 1e3)


PROMPTS = (Prompt(512, 12.08, 20.88), Prompt(2048, 46.19, 82.04))


def shrink_us(prompt: Prompt, reached: float) -> float:
    """The A sides of a layer, which read x once."""
    fit = Fit()
    return sum(fit.ramp + 2 * prompt.rows * inputs / BANDWIDTH / reached for inputs, _, _ in GROUPS.values())


def tiles(prompt: Prompt, *, bound: bool) -> float:
    """µs a layer of B sides by tiles. `bound`: to as many registers as let all programs of a launch fit."""
    fit, tiling, total = Fit(), LoraTiling(), shrink_us(prompt, Fit().reached)
    most = MULTIPROCESSORS * tiling.expand_programs
    at_once = most if bound else MULTIPROCESSORS * (tiling.expand_programs - 1)
    for _, outputs, _ in GROUPS.values():
        items = prompt.rows // tiling.large_rows * (outputs // tiling.large_block_n)
        programs = min(items, most)
        rounds = -(-items // programs) * -(-programs // at_once)
        total += max(4 * prompt.rows * outputs / BANDWIDTH / fit.reached, rounds * ITEM_US)
    return total


def strips(prompt: Prompt, *, gated: bool) -> float:
    """µs a layer of B sides by strips. `gated`: that of gate and up in the activation, whose reads and writes are the
    base's."""
    planned, tiling = Planned(), LoraTiling(strip_stages=STAGES)
    total = shrink_us(prompt, planned.reached)
    programs = MULTIPROCESSORS * tiling.expand_programs
    item = SUMS_US + STRIP_TILES * TILE_US
    for name, (_, outputs, _) in GROUPS.items():
        items = prompt.rows // tiling.expand_rows * -(-outputs // (STRIP_TILES * tiling.large_block_n))
        num_bytes = 4 * prompt.rows * outputs
        launch = launch_us(Fit().ramp, item, items, programs, num_bytes, planned.reached)
        if gated and name == "gate_up":
            # gate · up is written in any case, and gate and up are read.
            num_bytes = 3 * prompt.rows * outputs
            launch = launch_us(0.0, item, items, programs, num_bytes, planned.reached)
            launch -= num_bytes / BANDWIDTH / planned.reached
        total += launch
    return total


def table(prompts: Sequence[Prompt] = PROMPTS) -> str:
    """Measured and simulated, and what is predicted, as Markdown."""
    lines = [
        f"A prompt with an adapter of rank 16, µs a layer over the base: measured and simulated ± {ERROR:.0%}; "
        "PREDICTED, not measured: tiles bound to 168 registers, strips, and strips of gate and up in the activation",
        "",
        "| rows | measured | simulated | bound | strips | gated | ÷ base measured | bound | strips | gated |",
        "|---" * 10 + "|",
    ]
    for prompt in prompts:
        simulated = tiles(prompt, bound=False)
        forms = [tiles(prompt, bound=True), strips(prompt, gated=False), strips(prompt, gated=True)]
        us = [prompt.layer_us, simulated, *forms]
        left = [prompt.left(value) for value in (prompt.layer_us, *forms)]
        cells = [f"{value:.0f}" for value in us] + [f"{value:.2f}" for value in left]
        lines.append(f"| {prompt.rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
