"""The base linear over codes of 4 bits in Triton: the weights of 8-bit codes to the bit, from half the bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from loraplex.kernels.linear import triton_groups
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.linear.triton_nibbles import (
    PackedNibbles,
    choose_tiling,
    pack_nibbles,
)
from loraplex.kernels.linear.triton_splits import SplitTiling
from loraplex.kernels.triton_backend import triton_ops
from loraplex.kernels.weight_form import WeightForm
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ("signed", "unsigned with offsets", "zeros by group")
SHAPES = [(40, 256, 128), (33, 128, 32), (24, 192, 48), (16, 128, 16)]
"""Outputs, inputs, inputs of a group: blocks of 128 and of 64, groups of several planes and of one."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(columns: int, inputs: int, group: int, kind: str) -> GroupedWeight:
    generator = torch.Generator().manual_seed(columns + inputs)
    groups = (columns, inputs // group)
    codes = torch.randint(0, 16, (columns, inputs), generator=generator).to(torch.int8)
    scales = torch.rand(groups, generator=generator) * 0.01
    if kind == "unsigned with offsets":
        return GroupedWeight(codes, scales, torch.randn(groups, generator=generator), group)
    zeros = torch.full(groups, 8) if kind == "signed" else torch.randint(0, 16, groups, generator=generator)
    return GroupedWeight(codes - zeros.to(torch.int8).repeat_interleave(group, 1), scales, None, group)


def packed_of(weight: GroupedWeight, dtype: torch.dtype = torch.float32) -> PackedNibbles:
    packed = pack_nibbles(weight, dtype, device=DEVICE)
    assert packed is not None
    return packed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "inputs", "group"), SHAPES)
def test_weights_are_those_of_8_bit_codes_to_the_bit(
    columns: int, inputs: int, group: int, kind: str
) -> None:
    weight = weight_of(columns, inputs, group, kind)
    packed = packed_of(weight)
    assert packed.shape == (columns, inputs)
    assert (packed.lows is not None) == (kind == "zeros by group")
    assert packed.words.nbytes * 2 == weight.codes.nbytes
    # Sums of one number and zeros.
    each = torch.eye(inputs, device=DEVICE)
    codes = triton_groups.pack_groups(weight, torch.float32, device=DEVICE)
    assert torch.equal(packed(each), codes(each))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_product(kind: str, dtype: torch.dtype) -> None:
    weight, bias = weight_of(40, 256, 64, kind), draw(40, dtype=dtype, seed=1)
    packed = packed_of(weight, dtype)
    dense = weight.map(lambda part: part.to(DEVICE)).dense().to(dtype).double()
    ways = (
        None,
        SplitTiling(16, 16, packed.block, 2, False, 4),
        SplitTiling(32, 16, packed.block, 2, True, 4),
    )
    for rows, tiling in ((0, None), *((17, way) for way in ways)):
        x = draw(rows, 256, dtype=dtype, seed=rows)
        y = packed(x, bias, tiling=tiling)
        assert (y.shape, y.dtype) == ((rows, 40), dtype)
        want = x.double() @ dense.T + bias.double()
        torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype] * 40, rtol=TOLERANCE[dtype])
    assert not packed.arrived.any()


def test_scales_are_held_in_16_bits_where_those_hold_them() -> None:
    weight = weight_of(16, 128, 32, "signed")
    assert packed_of(weight).scales.dtype is torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        narrow = replace(weight, scales=weight.scales.to(dtype).float())
        packed = packed_of(narrow, torch.bfloat16)
        assert packed.scales.dtype is dtype
        assert packed.makes_pairs
        assert torch.equal(packed.scales.float(), narrow.scales.to(DEVICE).T)


@pytest.mark.parametrize("fault", ["neighbouring scale", "no offsets", "codes of another row"])
def test_planted_faults_are_noticed(fault: str) -> None:
    weight = weight_of(40, 128, 32, "unsigned with offsets")
    wrong = {
        "neighbouring scale": replace(weight, scales=weight.scales.roll(1, 1)),
        "no offsets": replace(weight, offsets=None),
        "codes of another row": replace(weight, codes=weight.codes.roll(1, 0)),
    }[fault]
    x = draw(3, 128)
    want = x.double() @ weight.map(lambda part: part.to(DEVICE)).dense().double().T
    assert (packed_of(wrong)(x).double() - want).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_others(kind: str) -> None:
    rng = random.Random(0)
    ops = triton_ops(device=DEVICE)
    packed = ops.pack(weight_of(48, 1024, 64, kind), WeightForm("groups", 4, 64), torch.float32)
    assert isinstance(packed, PackedNibbles)
    assert choose_tiling(3, packed.shape, packed.block, 4).splits == 2
    x, bias = draw(40, 1024, seed=3), draw(48, seed=1)
    whole = packed(x, bias)
    for _ in range(4):
        first = rng.randrange(40)
        count = rng.randint(1, 40 - first)
        before, behind = (draw(rng.randint(0, 40), 1024, seed=rng.randrange(99)) for _ in "ab")
        behind[:] = float("nan")  # padding holds anything
        got = packed(torch.cat((before, x[first : first + count], behind)), bias)
        at = before.shape[0]
        assert torch.equal(got[at : at + count], whole[first : first + count])


def test_the_order_of_sums_follows_from_the_weight_alone() -> None:
    for shape in ((576, 576), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096)):
        found = [
            choose_tiling(rows, shape, 128, itemsize, most_rows=most_rows)
            for rows in (1, 16, 17, 64, 65, 256, 257, 2048)
            for most_rows in (128, 256)
            for itemsize in (2, 4)
        ]
        assert len({tiling.splits for tiling in found}) == 1


def test_codes_of_more_bits_and_other_groups_take_a_byte_each() -> None:
    ops = triton_ops(device=DEVICE)
    weight = weight_of(16, 128, 32, "signed")
    wide = weight.codes.clone()
    wide[3, :2] = torch.tensor([-9, 7], dtype=torch.int8)
    for other in (
        replace(weight, codes=wide),
        GroupedWeight(weight.codes[:, :96], weight.scales[:, :3], None, 32),
        GroupedWeight(weight.codes[:, :120], weight.scales[:, :3], None, 40),
    ):
        assert pack_nibbles(other, torch.float32, device=DEVICE) is None
        assert isinstance(ops.pack(other, WeightForm("groups", 4), torch.float32), triton_groups.PackedCodes)
