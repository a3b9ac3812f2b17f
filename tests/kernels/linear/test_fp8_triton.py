"""The base linear over 8-bit floats in Triton and in torch: what test_splits_triton.py does not ask of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.kernels.linear import scaled_mm, triton_fp8
from loraplex.kernels.linear.stored import FloatWeight
from loraplex.kernels.linear.triton_fp8 import PackedFloats, pack_floats
from loraplex.kernels.triton_backend import triton_ops
from loraplex.kernels.weight_form import WeightForm, fits_tiles
from support.kernels.linears import dense, drawn, floats
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return drawn(*shape, dtype=dtype, seed=seed).to(DEVICE)


def packed_of(weight: FloatWeight, dtype: torch.dtype = torch.float32) -> PackedFloats:
    return pack_floats(weight, dtype, device=DEVICE)


def test_every_8_bit_float_is_multiplied_as_it_is() -> None:
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor([*numbers, 0, 0], dtype=torch.uint8).view(16, 16)
    weight = FloatWeight(values.view(torch.float8_e4m3fn), torch.ones(16, 1), activations=False)
    for dtype in (torch.float32, torch.float16):
        found = packed_of(weight, dtype)(torch.eye(16, dtype=dtype, device=DEVICE))
        assert torch.equal(found.float().cpu(), weight.values.float().T)


def test_weights_whose_groups_fit_no_tile_are_left_to_others() -> None:
    fitting = [(64, 64), (300, 300), (16, 64), (32, 96), (128, 256), (192, 384)]
    assert all(fits_tiles(group, inputs) for group, inputs in fitting)
    assert not any(fits_tiles(group, inputs) for group, inputs in [(8, 64), (48, 96), (80, 160), (128, 192)])
    with pytest.raises(ValueError, match="groups of 8 of 64 inputs fit no tile"):
        pack_floats(floats(8, 64, 8), torch.float32, device=DEVICE)


def test_activations_get_a_scale_a_row() -> None:
    x = draw(5, 96, dtype=torch.bfloat16) * torch.tensor([1e-3, 1, 10, 1e4, 0], device=DEVICE)[:, None]
    values, scales = scaled_mm.to_floats(x)
    torch.testing.assert_close(scales, x.abs().amax(1, keepdim=True).float() / 448)
    # Half of a step between e4m3's numbers.
    assert ((values.float() * scales - x.float()).abs() <= x.float().abs() / 16 + scales * 2**-10).all()
    x[2, 3] = float("inf")
    again, with_infinity = scaled_mm.to_floats(x)
    assert with_infinity.isnan().flatten().tolist() == [False, False, True, False, False]
    others = [0, 1, 3, 4]
    assert torch.equal(again.view(torch.uint8)[others], values.view(torch.uint8)[others])


def test_torchs_product_is_that_of_the_rounded_activations() -> None:
    weight = floats(48, 96, 96)
    packed = scaled_mm.prefer_library(replace(packed_of(weight, torch.bfloat16), converts=True))
    bias = draw(48, dtype=torch.bfloat16, seed=1)
    for shape in ((0, 96), (5, 96), (2, 3, 96), (140, 96)):  # few rows and many have ways of their own
        x = draw(*shape, dtype=torch.bfloat16)
        y = packed(x, bias)
        values, scales = scaled_mm.to_floats(x.view(-1, 96))
        want = (values.double() * scales.double()) @ dense(weight).to(DEVICE).T + bias.double()
        assert (y.shape, y.dtype) == ((*shape[:-1], 48), torch.bfloat16)
        torch.testing.assert_close(y.view(-1, 48).double(), want, atol=0.05, rtol=0.02)


def test_torchs_product_is_for_what_it_can_multiply_without_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = replace(packed_of(floats(48, 96, 96), torch.bfloat16), converts=True)
    assert scaled_mm.obstacle_to(packed) is None
    for change, words in (
        ({"converts": False}, "8.9 is needed"),
        ({"group": 32}, "along its inputs"),
        ({"dtype": torch.float16}, "bfloat16, and the model's are float16"),
        ({"shape": (40, 96)}, "40 outputs of 96 inputs"),
        ({"activations": False}, "activations in 16 bits"),
    ):
        assert words in (scaled_mm.obstacle_to(replace(packed, **change)) or "")
        assert type(scaled_mm.prefer_library(replace(packed, **change))) is PackedFloats
    assert isinstance(scaled_mm.prefer_library(packed), scaled_mm.ScaledFloats)
    monkeypatch.setattr(triton_fp8, "pack_floats", lambda weight, dtype, *, device: packed)
    for invariant, kind in ((False, scaled_mm.ScaledFloats), (True, PackedFloats)):
        ops = triton_ops(device=DEVICE, batch_invariant=invariant)
        assert type(ops.pack(None, WeightForm("float8", 8), torch.bfloat16)) is kind
