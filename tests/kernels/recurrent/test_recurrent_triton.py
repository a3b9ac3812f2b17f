"""Gated delta nets and Mamba-2 in Triton, interpreted: rules against float64, the same bits in any step, recordings."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentRows,
    RecurrentUnit,
    lay_out_units,
    most_units,
    table_size,
)
from loraplex.kernels.triton_backend import triton_ops
from support.kernels.recurrent import (
    INTERPRETED,
    in_float64,
    rule_in_float64,
    run_in_steps,
    run_rows,
    run_whole,
    sequence,
    spoilt_memory,
    targets_of,
)
from support.kernels.triton_interpreter import repair_bfloat16

OPS = triton_ops(device=torch.device("cpu")).recurrent
SHAPES = [RecurrentHeads(1, 2, 32, 32), RecurrentHeads(1, 1, 48, 64, 3)]
GROUPED = RecurrentHeads(2, 4, 48, 32)
"""Heads of Mamba-2."""
PARTS = ("states", "tails", "updates", "keys", "decays", "inputs")

pytestmark = [
    INTERPRETED,
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("strength", [0.05, 30.0])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_the_rule_is_that_of_float64_at_any_decay(heads, strength):
    own = sequence(heads, 50, strength)
    want = in_float64(own)
    got = run_whole(OPS, own, spoilt_memory(heads, torch.float32))
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strength", [0.05, 30.0])
def test_mambas_rule_is_that_of_float64_at_any_decay(strength, dtype, monkeypatch):
    """In groups of heads. In bfloat16 the answers are rounded, and the convolution before them: the rule is given what
    that made."""
    repair_bfloat16(monkeypatch)
    own, rows = sequence(GROUPED, 34, strength, dtype, mamba=True), range(34)
    units = lay_out_units([RecurrentUnit(rows, 0, 1, 2, (2, 2))])
    assert own.skip is not None
    got = OPS.rule(own.x, own.decay, own.beta, units, spoilt_memory(GROUPED, dtype), GROUPED, own.skip)
    want = rule_in_float64(own, own.x.double())
    assert got.dtype is dtype
    assert (got - want).abs().max() <= (1e-6 if dtype is torch.float32 else 2**-8) * want.abs().max()


@pytest.mark.parametrize(
    ("heads", "dtype", "mamba"),
    [
        (SHAPES[0], torch.float32, False),
        (SHAPES[1], torch.bfloat16, False),
        (GROUPED, torch.float32, True),
        (GROUPED, torch.bfloat16, True),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_step(heads, dtype, mamba, monkeypatch):
    """From memory full of NaN, among others' rows, with drafts thrown away and states that are not written in place."""
    repair_bfloat16(monkeypatch)
    own = sequence(heads, 36, 1.0, dtype, mamba=mamba)
    want = run_whole(OPS, own, spoilt_memory(heads, dtype))
    assert want.isfinite().all()
    for seed in range(2):
        got = run_in_steps(OPS, own, spoilt_memory(heads, dtype), seed)
        assert torch.equal(got, want), seed


@pytest.mark.parametrize("heads", [SHAPES[0], GROUPED], ids=str)
def test_a_step_that_begins_a_window_leaves_what_its_rows_alone_leave(heads):
    """Keys and decays of the window, which programs of other columns may not have read yet; in every state the last of
    the ends that write it."""
    own, ends = sequence(heads, 45, 1.0, mamba=heads is GROUPED), {}
    for name, cuts in {"whole": (14, 45), "rows": (14, *range(15, 46))}.items():
        memory, start = spoilt_memory(heads, torch.float32), 0
        for end in cuts:
            span = slice(start, end)
            unit = RecurrentUnit(range(end - start), start, 1, 0, targets_of(start, end - start, 0))
            run_rows(OPS, own, lay_out_units([unit]), memory, own.x[span], own.decay[span], own.beta[span])
            start = end
        window = memory.keys[1, :, :13], memory.updates[1, :, :, :13], memory.decays[1, :, :13]
        ends[name] = [*window, memory.inputs[1, :13], memory.states[0], memory.tails[0]]
    for whole, by_rows in zip(ends["whole"], ends["rows"], strict=True):
        assert whole.isfinite().all()
        assert torch.equal(whole, by_rows)


@pytest.mark.parametrize("heads", [SHAPES[0], GROUPED], ids=str)
def test_a_recording_serves_steps_of_other_sequences(heads):
    """Its launches have room for any; its table lies where it lay. What no row of a step has stays untouched."""
    own = sequence(heads, 20, 1.0, mamba=heads is GROUPED)
    recorded = RecurrentRows(
        (), torch.zeros(table_size(20, 4), dtype=torch.int64), most_units(20, 4, prompts=True)
    )
    plain, replayed = (spoilt_memory(heads, torch.float32) for _ in range(2))
    for memory in (plain, replayed):
        for part in PARTS:
            getattr(memory, part).fill_(0.5)
    for step in ([(20, 0)], [(1, 20), (17, 3)], [(3, 21), (1, 30), (16, 0)], []):
        units, row = [], 0
        for place, (count, start) in enumerate(step):
            units.append(
                RecurrentUnit(range(row, row + count), start, place, place, targets_of(start, count, place))
            )
            row += count
        rows = lay_out_units(units)
        recorded.table[: len(rows.table)] = rows.table
        want = run_rows(OPS, own, rows, plain, own.x, own.decay, own.beta)
        got = run_rows(OPS, own, recorded, replayed, own.x, own.decay, own.beta)
        assert torch.equal(got[:row], want[:row])
        assert want[:row].isfinite().all()
    for part in PARTS:
        assert torch.equal(getattr(plain, part), getattr(replayed, part)), part


def test_a_decoding_step_has_a_launch_for_each_sequence_alone():
    assert most_units(8, 8, prompts=False) == (8, 8, False)
    assert most_units(64, 4, prompts=True) == (4, 8, True)
    units = [RecurrentUnit(range(17), 15, 0, 0, (0, 0)), RecurrentUnit([17], 31, 1, 1, (1,))]
    assert lay_out_units(units).most == (2, 3, True)
    assert not lay_out_units(units[1:]).most.begins_windows
    assert len(lay_out_units(units).table) <= table_size(18, 2)
