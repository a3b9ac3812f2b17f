"""Gated delta nets and Mamba-2, of each implementation: the rule against float64, what is kept, and rounding."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from loraplex.kernels.numba_backend import numba_ops
from loraplex.kernels.recurrent.torch_recurrent import recurrent_ops
from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentUnit,
    lay_out_units,
    recurrent_bytes,
    recurrent_memory,
)
from loraplex.kernels.triton_backend import triton_ops
from support.kernels.recurrent import (
    INTERPRETED,
    in_float64,
    run_in_steps,
    run_rows,
    run_whole,
    sequence,
    spoilt_memory,
    targets_of,
)
from support.kernels.triton_interpreter import repair_bfloat16

OPS = {
    "torch": recurrent_ops(),
    "numba": numba_ops().recurrent,
    "triton": triton_ops(device=torch.device("cpu")).recurrent,
}
SHAPES = [RecurrentHeads(2, 2, 64, 64), RecurrentHeads(1, 3, 32, 96, 3), RecurrentHeads(1, 2, 96, 192)]
RULES = [
    *((heads, False) for heads in SHAPES),
    (RecurrentHeads(1, 4, 64, 64), True),
    (RecurrentHeads(2, 4, 32, 32), True),
]
"""Sizes of delta nets, and of Mamba-2 (True)."""


CPU = ["torch", pytest.param("numba", marks=pytest.mark.slow)]


@pytest.fixture(params=CPU)
def ops_of_cpus(request: pytest.FixtureRequest):
    return OPS[request.param]


@pytest.fixture(params=[*CPU, pytest.param("triton", marks=INTERPRETED)])
def ops(request: pytest.FixtureRequest, monkeypatch):
    if request.param == "triton":
        request.getfixturevalue("quick_interpreter")
        repair_bfloat16(monkeypatch)
    return OPS[request.param]


@pytest.mark.parametrize("strength", [0.05, 2.0, 30.0])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_the_rule_is_that_of_float64_at_any_decay(ops_of_cpus, heads, strength):
    own = sequence(heads, 70, strength)
    want = in_float64(own)
    got = run_whole(ops_of_cpus, own, spoilt_memory(heads, torch.float32))
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_steps_of_any_rows_give_what_the_whole_gives(ops_of_cpus, heads, seed):
    """From memory full of NaN, among others' rows, with drafts thrown away and states that are not written in place."""
    own = sequence(heads, 90, 1.0, seed=seed)
    want = run_whole(ops_of_cpus, own, spoilt_memory(heads, torch.float32))
    got = run_in_steps(ops_of_cpus, own, spoilt_memory(heads, torch.float32), seed)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [heads for heads, mamba in RULES if mamba], ids=str)
def test_mambas_rule_is_that_of_float64_in_any_step(ops_of_cpus, heads):
    for strength in (0.05, 2.0, 30.0):
        own = sequence(heads, 70, strength, mamba=True)
        want = in_float64(own)
        got = run_whole(ops_of_cpus, own, spoilt_memory(heads, torch.float32))
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()
        got = run_in_steps(ops_of_cpus, own, spoilt_memory(heads, torch.float32), 1)
        assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.slow  # compiling for two dtypes takes 10 s
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strength", [0.1, 30.0])
@pytest.mark.parametrize(("heads", "mamba"), RULES, ids=str)
def test_numbas_rows_have_the_same_bits_in_any_step(heads, mamba, strength, dtype):
    """Whatever the cuts, the company, the drafts, the threads and what memory held."""
    own = sequence(heads, 150, strength, dtype, mamba=mamba)
    want = run_whole(OPS["numba"], own, spoilt_memory(heads, dtype))
    assert want.isfinite().all()
    before = torch.get_num_threads()
    try:
        for seed in range(20):
            torch.set_num_threads(1 + seed % 3)
            got = run_in_steps(OPS["numba"], own, spoilt_memory(heads, dtype), seed)
            assert torch.equal(got, want), seed
    finally:
        torch.set_num_threads(before)


def test_a_state_begins_a_sequence_in_another_window_and_stays_as_it_is(ops):
    """A hit: positions 48 on, behind the state that another sequence wrote. It goes on in states of its own."""
    heads = SHAPES[0]
    own, memory = sequence(heads, 70, 1.0), spoilt_memory(heads, torch.float32)
    want = run_whole(ops, own, memory)
    memory = spoilt_memory(heads, torch.float32)
    first = RecurrentUnit(range(48), 0, 0, 0, (1, 2, 3))
    run_rows(ops, own, lay_out_units([first]), memory, own.x, own.decay, own.beta)
    kept = memory.states[3].clone(), memory.tails[3].clone()
    for window in (1, 2):
        hit = lay_out_units([RecurrentUnit(range(48, 70), 48, window, 3, (window + 3,))])
        got = run_rows(ops, own, hit, memory, own.x, own.decay, own.beta)[48:]
        torch.testing.assert_close(got, want[48:], atol=1e-6, rtol=1e-5)
    assert torch.equal(memory.states[3], kept[0])
    assert torch.equal(memory.tails[3], kept[1])


def test_tails_and_inputs_are_those_of_the_convolution(ops):
    heads = SHAPES[1]
    own, memory = sequence(heads, 37, 1.0), spoilt_memory(heads, torch.float32)
    ops.convolve(own.x, own.weight, lay_out_units([RecurrentUnit(range(37), 0, 1, 0, (0, 4))]), memory)
    assert torch.equal(memory.tails[4], own.x[30:32])
    assert torch.equal(memory.inputs[1, :5], own.x[32:])
    assert memory.tails[2].isnan().all()


def test_a_nan_stays_in_its_sequence(ops):
    heads = SHAPES[0]
    own = sequence(heads, 40, 1.0)
    own.x[3] = float("nan")
    units = [RecurrentUnit(range(20), 0, 0, 0, (0,)), RecurrentUnit(range(20, 40), 0, 1, 1, (1,))]
    memory = spoilt_memory(heads, torch.float32)
    got = run_rows(ops, own, lay_out_units(units), memory, own.x, own.decay, own.beta)
    assert got[3:20].isnan().all()
    assert got[:3].isfinite().all()
    assert got[20:].isfinite().all()
    assert memory.states[0].isnan().any()
    assert memory.states[1].isfinite().all()


def test_coefficients_do_not_become_subnormal(ops):
    """Decays of e^-30: what is left of a state is 0 from 1e-24 on, and not a number that is slow to compute with."""
    heads = SHAPES[0]
    own, memory = sequence(heads, 32, 1.0), spoilt_memory(heads, torch.float32)
    own.decay[:] = 1e-13
    own.beta[31] = 0.0
    run_whole(ops, own, memory)
    state = memory.states[2]
    assert (state == 0).any() or state.abs().min() > 1e-24
    own.decay[:], own.beta[16:] = 0.04, 0.0  # 16 of them are 4e-23: kept
    run_whole(ops, own, memory)
    assert (memory.states[2].abs() > 0).any()
    own.decay[:] = 0.03  # 4e-25
    run_whole(ops, own, memory)
    assert not memory.states[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates(ops, dtype):
    torch.manual_seed(0)
    both = torch.randn(9, 10).to(dtype) * 8
    b, a = both.split(5, 1)
    a_log, dt_bias = torch.randn(5), torch.randn(5)
    for scale in (1.0, 2.0):
        beta, decay = ops.delta_gates(b, a, a_log, dt_bias, scale)
        assert beta.dtype is decay.dtype is torch.float32
        torch.testing.assert_close(beta, (b.sigmoid() * scale).float(), atol=2e-7, rtol=0)
        soft = torch.nn.functional.softplus(a.double() + dt_bias.double())
        want = torch.exp(-a_log.double().exp() * soft).float()
        torch.testing.assert_close(decay, want, atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_mamba(ops, dtype):
    """As transformers rounds them: the sum, and its softplus."""
    torch.manual_seed(0)
    dt = (torch.randn(9, 10).to(dtype) * 8)[:, 2:7]
    a_log, dt_bias = torch.randn(5), torch.randn(5).to(dtype).float()
    for low, high in ((0.0, 3e38), (0.5, 3.0)):
        step, decay = ops.step_gates(dt, a_log, dt_bias, low, high)
        assert step.dtype is decay.dtype is torch.float32
        want = torch.nn.functional.softplus(dt + dt_bias.to(dtype)).clamp(low, high)
        few_differ(step.to(dtype), want)
        torch.testing.assert_close(decay, torch.exp(-a_log.exp() * step), atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_norm_and_output_gate_round_as_transformers(ops, dtype):
    torch.manual_seed(1)
    o, wide = torch.randn(7, 4 * 64).to(dtype) * 3, torch.randn(7, 1000).to(dtype) * 3
    z = wide[:, 100:356]
    norm = Qwen3_5RMSNormGated(64, 1e-5)
    norm.weight.data = torch.randn(64)
    norm = norm.to(dtype)
    want = norm(o.view(7, 4, 64), z.reshape(7, 4, 64)).flatten(1)
    got = ops.gated_norm(o, z, norm.weight.data, 1e-5)
    few_differ(got, want)
    heads = wide[:, :512].view(7, 4, 128)
    attended = o.view(7, 4, 64)
    few_differ(
        ops.output_gate(attended, heads[:, :, 64:]), (attended * heads[:, :, 64:].sigmoid()).flatten(1)
    )


def test_the_output_gate_of_heads_that_fill_no_whole_vectors(ops_of_cpus):
    attended, wide = torch.randn(7, 6, 40), torch.randn(7, 1000)
    gate = wide[:, 760:].view(7, 6, 40)
    few_differ(ops_of_cpus.output_gate(attended, gate), (attended * gate.sigmoid()).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_by_head_become_columns_by_part(ops_of_cpus, dtype):
    wide = torch.randn(9, 500).to(dtype)
    for heads, sizes in ((3, (2, 2)), (4, (16, 16, 40, 40)), (1, (5,))):
        x = wide[:, 7 : 7 + heads * sum(sizes)]
        each = [head.split(sizes, 1) for head in x.chunk(heads, 1)]
        want = torch.cat([head[part] for part in range(len(sizes)) for head in each], 1)
        assert torch.equal(ops_of_cpus.by_part(x, heads, sizes), want)


def few_differ(got, want):
    """By an ulp, near ties alone."""
    assert got.dtype is want.dtype
    ulp = 2**-7 if want.dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(got, want, atol=1e-6, rtol=ulp)
    if want.dtype is torch.bfloat16:
        assert (got != want).float().mean() <= 0.01


def test_the_convolution_rounds_the_sum_and_the_activation(ops):
    torch.manual_seed(2)
    heads, dtype = SHAPES[0], torch.bfloat16
    own = sequence(heads, 50, 1.0, dtype)
    bias = torch.randn(heads.channels)
    rows = lay_out_units([RecurrentUnit(range(50), 0, 0, 0, targets_of(0, 50, 0))])
    for each in (None, bias):
        got = ops.convolve(own.x, own.weight, rows, spoilt_memory(heads, dtype), each)
        padded = torch.nn.functional.pad(own.x.float().T, (heads.width - 1, 0))[None]
        sums = torch.nn.functional.conv1d(
            padded, own.weight.T[:, None].contiguous(), each, groups=heads.channels
        )
        few_differ(got, torch.nn.functional.silu(sums[0].T.to(dtype)))


@pytest.mark.parametrize("name", [pytest.param("numba", marks=pytest.mark.slow), "triton"])
def test_operands_that_do_not_fit_are_refused(name):
    ops, heads = OPS[name], SHAPES[0]
    own, memory = sequence(heads, 5, 1.0), spoilt_memory(heads, torch.float32)
    rows = lay_out_units([RecurrentUnit(range(5), 0, 0, 0, ())])
    with pytest.raises(ValueError, match="do not fit"):
        ops.convolve(own.x[:, 1:], own.weight, rows, memory)
    with pytest.raises(ValueError, match="do not fit"):
        ops.convolve(own.x.bfloat16(), own.weight, rows, memory)
    with pytest.raises(ValueError, match="do not fit"):
        ops.rule(own.x, own.decay[1:], own.beta, rows, memory, heads)
    with pytest.raises(ValueError, match="do not fit"):
        ops.gated_norm(own.x, own.x[:, :64], torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match="does not fit"):
        ops.output_gate(own.x.view(5, 6, 64), own.x.view(5, 3, 128))
    with pytest.raises(ValueError, match="gates"):
        ops.delta_gates(own.x[:, :2], own.x[:, :3], torch.ones(2), torch.ones(2))


def test_targets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="17 rows from position 15 on end 2 windows, and 1 targets"):
        lay_out_units([RecurrentUnit(range(17), 15, 0, 0, (0,))])
    with pytest.raises(ValueError, match="each key head"):
        RecurrentHeads(2, 3, 64, 64)
    states, windows = recurrent_bytes(SHAPES[0], torch.bfloat16)
    with pytest.raises(ValueError, match=f"not the layer's {windows}"):
        recurrent_memory(
            SHAPES[0], torch.bfloat16, torch.zeros(1, states, dtype=torch.uint8),
            torch.zeros(1, states, dtype=torch.uint8),
        )  # fmt: skip


def test_the_memory_of_a_running_sequence_of_qwen3_5_0_8b():
    states, windows = recurrent_bytes(RecurrentHeads(16, 16, 128, 128), torch.bfloat16)
    assert states == 16 * 128 * 128 * 4 + 3 * 6144 * 2
    assert 18 * (states + windows) / 2**20 < 26.6
