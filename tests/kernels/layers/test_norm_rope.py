"""Norm, rotation and activation against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.layers.activation import act_and_mul
from loraplex.kernels.layers.norm import add_rms_norm, rms_norm
from loraplex.kernels.layers.rope import CosSinTable, apply_rope, rope_cos_sin

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(dtype):
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(5, 24).to(dtype),
        torch.randn(5, 24).to(dtype),
        torch.randn(24).to(dtype),
    )
    total = residual.clone().add_(x)
    want = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(rms_norm(total, weight, 1e-5), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float32_norm_is_rounded_once(dtype):
    torch.manual_seed(0)
    x, residual = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype)
    # Near 1, as Gemma's are, where bfloat16 has steps of 0.8 %: all but a few results must be the nearest number.
    weight = 1 + torch.randn(24) * 0.003
    total = residual.clone().add_(x)
    want = total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=2**-8 if dtype is torch.bfloat16 else 1e-5)
    if dtype is torch.bfloat16:
        assert (got != want.to(dtype)).float().mean() < 0.02
    assert torch.equal(rms_norm(total, weight, 1e-5), got)


def test_a_table_has_the_cosines_of_any_positions_in_any_order():
    inv_freq = torch.rand(7)
    table = CosSinTable(inv_freq, 1.25)
    for positions in ([0], [1023, 3, 3], [1024], [5000, 0, 2047], [2]):
        found = table.rows(torch.tensor(positions))
        want = rope_cos_sin(torch.tensor(positions), inv_freq, 1.25)
        for got, expected in zip(found, want, strict=True):
            assert got.shape == (len(positions), 1, 7)
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    again = CosSinTable(inv_freq, 1.25)
    again.rows(torch.tensor([5000]))
    everything = torch.arange(5000)
    # However the table grew.
    assert torch.equal(again.rows(everything)[0], table.rows(everything)[0])


def test_columns_beyond_the_rotated_part_stay():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 10)
    before = x.clone()
    cos, sin = rope_cos_sin(torch.tensor([1, 2, 900]), torch.tensor([1.0, 0.1, 0.01]))
    apply_rope(x, cos, sin)
    assert torch.equal(x[..., 6:], before[..., 6:])
    part = before[..., :6].clone()
    apply_rope(part, cos, sin)
    assert torch.equal(x[..., :6], part)
    assert (part != before[..., :6]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_rotates_pairs_in_place(dtype):
    torch.manual_seed(0)
    packed = torch.randn(6, 5, 8).to(dtype)
    x = packed[:, 1:4]  # a view, as the model passes one
    before, outside = x.double().clone(), packed[:, [0, 4]].clone()
    positions = torch.tensor([0, 1, 7, 100, 5000, 5001])
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = rope_cos_sin(positions, inv_freq, 1.5)
    apply_rope(x, cos, sin)
    assert torch.equal(packed[:, [0, 4]], outside)
    for t, position in enumerate(positions.tolist()):
        for d in range(4):
            angle = torch.tensor(position, dtype=torch.float32) * inv_freq[d]
            pair = torch.complex(before[t, :, d], before[t, :, d + 4])
            turned = pair * torch.polar(torch.tensor(1.5, dtype=torch.float64), angle.double())
            got = torch.complex(x[t, :, d].double(), x[t, :, d + 4].double())
            torch.testing.assert_close(got, turned, atol=TOLERANCE[dtype] * 3, rtol=TOLERANCE[dtype])


def test_silu_and_mul():
    torch.manual_seed(0)
    x = torch.randn(3, 10) * 20
    gate, up = x[:, :5].double(), x[:, 5:].double()
    torch.testing.assert_close(
        act_and_mul(x, False).double(), gate * torch.sigmoid(gate) * up, atol=1e-5, rtol=1e-5
    )


def test_gelu_tanh_and_mul():
    torch.manual_seed(0)
    x = torch.randn(3, 10) * 4
    gate, up = x[:, :5].double(), x[:, 5:].double()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(
        act_and_mul(x, True).double(), 0.5 * gate * (1 + torch.tanh(inner)) * up, atol=1e-5, rtol=1e-5
    )
