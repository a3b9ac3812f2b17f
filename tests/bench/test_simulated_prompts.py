"""A simulated prompt with an adapter beside those that an H200 took."""

from __future__ import annotations

import pytest

from bench.gpu.decoding.prompts import ERROR, PROMPTS, Prompt, strips, table, tiles
from bench.gpu.decoding.simulator import BANDWIDTH, GROUPS


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(prompt.rows))
def test_measured_prompts_are_reproduced_within_the_error_that_is_stated(prompt: Prompt) -> None:
    assert tiles(prompt, bound=False) == pytest.approx(prompt.layer_us, rel=ERROR)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(prompt.rows))
def test_no_form_is_faster_than_its_bytes(prompt: Prompt) -> None:
    read = sum(2 * prompt.rows * inputs for inputs, _, _ in GROUPS.values()) / BANDWIDTH
    moved = sum(4 * prompt.rows * outputs for _, outputs, _ in GROUPS.values()) / BANDWIDTH
    apart, gated = strips(prompt, gated=False), strips(prompt, gated=True)
    assert tiles(prompt, bound=True) > apart > read + moved
    assert apart > gated > read + moved - 4 * prompt.rows * GROUPS["gate_up"][1] / BANDWIDTH
    assert f"| {apart:.0f} | {gated:.0f} |" in table()
