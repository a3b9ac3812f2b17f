"""The base linear over codes in groups in Triton: the product, and the same bits in every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.kernels.linear import groups
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.linear.triton_groups import (
    PackedCodes,
    choose_tiling,
    pack_groups,
)
from loraplex.kernels.linear.triton_splits import SplitTiling
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = SplitTiling(16, 16, 16, 1, False, 4, 2)
IN_LINE = replace(SMALL, splits=3)
APART = SplitTiling(32, 16, 16, 3, True, 4, 2)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
SHAPES = [(40, 64, 64), (7, 36, 36), (33, 96, 32), (48, 64, 16), (16, 300, 300), (24, 80, 40)]
"""Outputs, inputs, inputs of a group: blocks of K that a group fills, that it does not, and many of a group."""

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weight_of(columns: int, inputs: int, group: int, *, offsets: bool) -> GroupedWeight:
    generator = torch.Generator().manual_seed(columns + inputs)
    codes = torch.randint(-128, 128, (columns, inputs), generator=generator).to(torch.int8)
    shape = (columns, inputs // group)
    scales = torch.rand(shape, generator=generator) * 0.01
    return GroupedWeight(codes, scales, torch.randn(shape, generator=generator) if offsets else None, group)


def exact(x: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """The product with the weights that a checkpoint of x's dtype would hold."""
    dense = weight.codes.double() * weight.scales.double().repeat_interleave(weight.group, 1)
    if weight.offsets is not None:
        dense += weight.offsets.double().repeat_interleave(weight.group, 1)
    return x.double() @ dense.to(x.device, x.dtype).double().T


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("columns", "inputs", "group"), SHAPES)
def test_the_product(columns: int, inputs: int, group: int, offsets: bool, dtype: torch.dtype) -> None:
    weight = weight_of(columns, inputs, group, offsets=offsets)
    packed = pack_groups(weight, dtype, device=DEVICE)
    assert packed.shape == (columns, inputs)
    bias = draw(columns, dtype=dtype, seed=1)
    for rows, tiling in ((0, None), (1, None), (5, SMALL), (17, IN_LINE), (17, APART), (70, None)):
        x = draw(rows, inputs, dtype=dtype, seed=rows)
        y = packed(x, bias, tiling=tiling)
        assert (y.shape, y.dtype) == ((rows, columns), dtype)
        want = exact(x, weight) + bias.double()
        torch.testing.assert_close(y.double(), want, atol=TOLERANCE[dtype] * 30, rtol=TOLERANCE[dtype])
    stacked = draw(2, 3, inputs, dtype=dtype)
    together = packed(stacked.view(6, inputs))
    torch.testing.assert_close(packed(stacked).view(6, columns), together, atol=0, rtol=0)


@pytest.mark.parametrize("fault", ["neighbouring scale", "no offsets", "codes of another row"])
def test_planted_faults_are_noticed(fault: str) -> None:
    weight = weight_of(40, 64, 16, offsets=True)
    assert weight.offsets is not None
    wrong = {
        "neighbouring scale": replace(weight, scales=weight.scales.roll(1, 1)),
        "no offsets": replace(weight, offsets=None),
        "codes of another row": replace(weight, codes=weight.codes.roll(1, 0)),
    }[fault]
    x = draw(3, 64)
    y = pack_groups(wrong, torch.float32, device=DEVICE)(x)
    assert (y.double() - exact(x, weight)).abs().max() > 0.01


def test_it_is_as_exact_as_torchs_operations() -> None:
    weight, x = weight_of(40, 96, 32, offsets=True), draw(9, 96)
    want = groups.linear(x.cpu(), weight)
    got = pack_groups(weight, torch.float32, device=DEVICE)(x).cpu()
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize(
    ("inputs", "group", "offsets"),
    [
        (2048, 64, False),
        pytest.param(2080, 40, True, marks=pytest.mark.slow),
        pytest.param(2048, 1024, True, marks=pytest.mark.slow),
    ],
)
def test_splits_apart_and_in_line_give_a_row_the_same_bits(inputs: int, group: int, offsets: bool) -> None:
    """K in splits: of whole groups, of groups that fill no block of K, and of parts of a group."""
    packed = pack_groups(weight_of(20, inputs, group, offsets=offsets), torch.float32, device=DEVICE)
    x, bias = draw(200, inputs, seed=2), draw(20, seed=1)
    ways = {rows: tiling_of(rows, packed) for rows in (1, 5, 16, 17, 64, 65, 200)}
    assert {tiling.splits for tiling in ways.values()} == {4}
    assert {tiling.apart for tiling in ways.values()} == {True, False}
    whole = packed(x, bias)
    for rows in sorted(ways)[:-1]:
        assert torch.equal(packed(x[:rows].contiguous(), bias), whole[:rows]), rows
    for tiling in (replace(ways[200], block_m=64, block_n=16), replace(ways[1], block_m=64, block_n=16)):
        assert torch.equal(packed(x[:64].contiguous(), bias, tiling=tiling), whole[:64])


def test_splits_that_are_programs_leave_their_counts_at_zero() -> None:
    packed = pack_groups(weight_of(70, 1024, 64, offsets=False), torch.float32, device=DEVICE)
    x = draw(3, 1024)
    assert tiling_of(3, packed).apart
    first = packed(x)
    assert not packed.arrived.any()
    assert torch.equal(packed(x), first)


def tiling_of(rows: int, weight: PackedCodes) -> SplitTiling:
    return choose_tiling(rows, weight.shape, weight.group, weight.dtype.itemsize, most_rows=weight.most_rows)


def test_the_order_of_sums_follows_from_the_weight_alone() -> None:
    """A block of K lies in one group, stages fit the shared memory, and sums of splits in the memory meant for them."""
    for group in (16, 32, 36, 64, 128, 4096):
        for shape in ((576, 576), (4096, 4096), (4096, 14336), (14336, 8192), (28672, 4096), (128256, 4096)):
            for itemsize in (2, 4):
                found = [
                    choose_tiling(rows, shape, group, itemsize, most_rows=most_rows)
                    for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 2048)
                    for most_rows in (128, 256)
                ]
                assert len({(tiling.block_k, tiling.splits) for tiling in found}) == 1
                for tiling in found:
                    assert tiling.block_k >= min(group, 64 if itemsize == 2 else 32)
                    stage = tiling.block_k * (itemsize * tiling.block_m + tiling.block_n)
                    assert tiling.num_stages * stage <= 163 << 10
                    assert not tiling.apart or tiling.block_m <= 256


def test_splits_are_programs_only_for_rows_of_one_tile() -> None:
    for shape in ((4096, 14336), (6144, 4096), (15872, 8192)):
        for rows in range(1, 600):
            tiling = choose_tiling(rows, shape, 64, 2, most_rows=256)
            assert tiling.splits > 1
            assert not tiling.apart or rows <= tiling.block_m
            assert not tiling.apart or tiling.splits * rows * shape[0] * 4 <= 32 << 20
            assert tiling.apart or rows > 64
            assert tiling.apart or tiling.block_m <= 128
