"""Kernels of layers with a state: compiled before the first step, and recorded once for a number of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from loraplex.kernels.numba_backend import numba_ops
from loraplex.kernels.numba_layers import NumbaRecordedLayers
from loraplex.kernels.numba_warm_up import warm_up
from loraplex.kernels.recorded_layers import LayerInputs
from loraplex.kernels.recurrent.types import RecurrentHeads, RecurrentRows, RecurrentUnit, lay_out_units
from support.kernels.recurrent import run_rows, sequence, spoilt_memory, targets_of

HEADS = RecurrentHeads(2, 4, 32, 64)
STEPS = [[(12, 1), (5, 0)], [(12, 20), (2, 33), (3, 6)], [(17, 37)], [(6, 54), (11, 13)]]
"""Rows and the first position of each sequence, 17 rows in all."""


@pytest.mark.slow  # it compiles them
def test_a_list_of_calls_serves_steps_of_other_sequences() -> None:
    ops, own = numba_ops().recurrent, sequence(HEADS, 17, 1.0)
    heads = HEADS.value_heads

    def layers(rows: RecurrentRows, x: torch.Tensor, memory: object) -> torch.Tensor:
        beta, decay = ops.delta_gates(x[:, :heads], x[:, heads : 2 * heads], own.beta[0], own.beta[1])
        out = run_rows(ops, own, rows, memory, x, decay, beta)
        out = ops.gated_norm(out, x[:, : out.shape[1]], own.weight[0, :64], 1e-6)
        return ops.output_gate(out.view(17, heads, -1), x[:, : out.shape[1]].view(17, heads, -1))

    recorded, lists = NumbaRecordedLayers(), []
    plain, repeated = (spoilt_memory(HEADS, torch.float32) for _ in range(2))
    for part in ("states", "tails", "updates", "keys", "decays", "inputs"):
        for memory in (plain, repeated):
            getattr(memory, part).fill_(0.5)

    def run_layers(given: LayerInputs) -> torch.Tensor:
        lists.append(given.recurrent)
        return layers(given.recurrent, given.residual, repeated)

    for number, step in enumerate(STEPS):
        units, row = [], 0
        for place, (count, start) in enumerate(step):
            units.append(
                RecurrentUnit(range(row, row + count), start, place, place, targets_of(start, count, place))
            )
            row += count
        rows, x = lay_out_units(units), own.x + number
        want = layers(rows, x, plain)
        found = recorded.run(LayerInputs(x, (), (), None, recurrent=rows), STEPS, run_layers)
        assert found is not None
        assert torch.equal(found[0], want)
        assert torch.equal(plain.states[:3], repeated.states[:3])
    assert len(lists) == 1, "recorded once"


@pytest.mark.slow
def test_all_are_compiled_before_the_first_step_of_a_model_that_has_them() -> None:
    ops, called = numba_ops(), []

    def noted(name: str) -> Any:
        return lambda *given: called.append(name) or getattr(ops.recurrent, name)(*given)

    names = [field.name for field in dataclasses.fields(ops.recurrent)]
    watched = dataclasses.replace(ops, recurrent=type(ops.recurrent)(*map(noted, names)))
    warm_up(torch.bfloat16, watched)
    assert not called
    warm_up(torch.bfloat16, watched, recurrent=True)
    assert sorted(called) == sorted(names)
