"""The base linears in Triton whose K is cut into splits, over codes, codes of 4 bits and 8-bit floats: the product, and
the same bits in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from loraplex.kernels.linear import groups, triton_groups, triton_nibbles
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.linear.triton_fp8 import pack_floats
from loraplex.kernels.linear.triton_groups import pack_groups
from loraplex.kernels.linear.triton_nibbles import pack_nibbles
from loraplex.kernels.linear.triton_splits import SplitLinear, SplitTiling
from loraplex.kernels.triton_backend import triton_ops
from loraplex.kernels.weight_form import WeightForm
from support.kernels import linears
from support.kernels.linears import exact, grouped
from support.kernels.poison import poison_new_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@dataclass(frozen=True)
class Kind:
    """One way to store a weight."""

    weight: Callable[..., Any]
    """Of outputs, inputs and inputs of a group."""
    pack: Callable[..., Any]
    shapes: tuple[tuple[int, int, int], ...]
    """Blocks of K that a group fills, that it does not, and many of a group; of 4 bits, one plane and several."""
    split: tuple[int, int, int]
    """A shape whose K is cut."""


OF_8_BITS = ((40, 64, 64), (7, 36, 36), (33, 96, 32), (48, 64, 16), (16, 300, 300), (24, 80, 40))
OF_4_BITS = ((40, 256, 64), (33, 128, 32), (24, 192, 48), (16, 128, 16))
OF_FLOATS = ((40, 64, 64), (7, 80, 80), (33, 96, 32), (48, 256, 128), (16, 300, 300))
KINDS = {
    "codes": Kind(grouped, pack_groups, OF_8_BITS, (20, 2048, 64)),
    "codes, offsets": Kind(partial(grouped, zeros="floats"), pack_groups, OF_8_BITS, (20, 2080, 40)),
    "4 bits": Kind(partial(grouped, bits=4), pack_nibbles, OF_4_BITS, (48, 1024, 64)),
    "4 bits, offsets": Kind(
        partial(grouped, bits=4, zeros="floats", least=0), pack_nibbles, OF_4_BITS, (48, 1024, 64)
    ),
    "4 bits, zeros": Kind(partial(grouped, bits=4, zeros="whole"), pack_nibbles, OF_4_BITS, (48, 1024, 64)),
    "floats": Kind(linears.floats, pack_floats, OF_FLOATS, (20, 2048, 128)),
}
NIBBLES = [name for name in KINDS if name.startswith("4")]

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value"),
]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return linears.drawn(*shape, dtype=dtype, seed=seed).to(DEVICE)


def packed_of(name: str, weight: Any, dtype: torch.dtype = torch.float32) -> Any:
    packed = KINDS[name].pack(weight, dtype, device=DEVICE)
    assert isinstance(packed, SplitLinear)
    return packed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name, kind in KINDS.items()
        for shape in (kind.shapes[:1] if name in NIBBLES else kind.shapes)
    ],
)
def test_the_product(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight, (columns, inputs, _) = KINDS[name].weight(*shape), shape
    packed, bias = packed_of(name, weight, dtype), draw(columns, dtype=dtype, seed=1)
    assert packed.shape == (columns, inputs)
    small = SplitTiling(16, 16, getattr(packed, "block", 16), 1, False, 4, 2)
    in_line, apart = replace(small, splits=2), replace(small, block_m=32, splits=2, apart=True)
    if name not in NIBBLES:
        in_line, apart = replace(in_line, splits=3), replace(apart, splits=3)
    for rows, tiling in ((0, None), (1, None), (5, small), (17, in_line), (17, apart), (70, None)):
        x = draw(rows, inputs, dtype=dtype, seed=rows)
        y = packed(x, bias, tiling=tiling)
        assert (y.shape, y.dtype) == ((rows, columns), dtype)
        want, most = exact(x, weight, bias), TOLERANCE[dtype]
        torch.testing.assert_close(y.double(), want, atol=most * 30, rtol=most)
    assert not packed.arrived.any()
    stacked = draw(2, 3, inputs, dtype=dtype)
    together = packed(stacked.view(6, inputs))
    torch.testing.assert_close(packed(stacked).view(6, columns), together, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["codes, offsets", "4 bits, offsets", "floats"])
@pytest.mark.parametrize("fault", linears.FAULTS)
def test_planted_faults_are_noticed(fault: str, name: str) -> None:
    if (fault, name) == ("no offsets", "floats"):
        return
    weight, x = KINDS[name].weight(40, 128, 32), draw(3, 128)
    wrong = packed_of(name, linears.spoilt(weight, fault))
    assert (wrong(x).double() - exact(x, weight)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, kind.split) for name, kind in KINDS.items() if name != "codes, offsets"),
        pytest.param("codes, offsets", KINDS["codes, offsets"].split, marks=pytest.mark.slow),
        pytest.param("codes, offsets", (20, 2048, 1024), marks=pytest.mark.slow),
        ("floats", (20, 2048, 2048)),
    ],
)
def test_splits_apart_and_in_line_give_a_row_the_same_bits(name: str, shape: tuple[int, int, int]) -> None:
    """K in splits: of whole groups, of groups that fill no block of K, and of parts of a group."""
    columns, inputs, _ = shape
    packed = packed_of(name, KINDS[name].weight(*shape))
    x, bias = draw(200, inputs, seed=2), draw(columns, seed=1)
    ways = {rows: packed.choose_tiling(rows) for rows in (1, 17, 65, 200)}
    assert {tiling.splits for tiling in ways.values()} == {2 if name in NIBBLES else 4}
    assert {tiling.apart for tiling in ways.values()} == {True, False}
    whole = packed(x, bias)
    for rows in sorted(ways)[:-1]:
        assert torch.equal(packed(x[:rows].contiguous(), bias), whole[:rows]), rows
        assert not packed.arrived.any()
    if name not in NIBBLES:
        for tiling in (ways[200], ways[1]):
            other = replace(tiling, block_m=64, block_n=16)
            assert torch.equal(packed(x[:64].contiguous(), bias, tiling=other), whole[:64])


def test_it_is_as_exact_as_torchs_operations() -> None:
    weight, x = grouped(40, 96, 32, zeros="floats"), draw(9, 96)
    want = groups.linear(x.cpu(), weight)
    got = packed_of("codes, offsets", weight)(x).cpu()
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-6)


def test_the_order_of_sums_follows_from_the_weight_alone() -> None:
    """A block of K lies in one group, stages fit the shared memory, and sums of splits in the memory meant for them."""
    for group in (16, 32, 36, 64, 128, 4096):
        for shape in ((576, 576), (4096, 4096), (4096, 14336), (14336, 8192), (28672, 4096), (128256, 4096)):
            for itemsize in (2, 4):
                found = [
                    triton_groups.choose_tiling(rows, shape, group, itemsize, most_rows=most_rows)
                    for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 2048)
                    for most_rows in (128, 256)
                ]
                assert len({(tiling.block_k, tiling.splits) for tiling in found}) == 1
                for tiling in found:
                    assert tiling.block_k >= min(group, 64 if itemsize == 2 else 32)
                    stage = tiling.block_k * (itemsize * tiling.block_m + tiling.block_n)
                    assert tiling.num_stages * stage <= 163 << 10
                    assert not tiling.apart or tiling.block_m <= 256
    for shape in ((576, 576), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096)):
        of_nibbles = [
            triton_nibbles.choose_tiling(rows, shape, 128, itemsize, most_rows=most_rows)
            for rows in (1, 16, 17, 64, 65, 256, 257, 2048)
            for most_rows in (128, 256)
            for itemsize in (2, 4)
        ]
        assert len({tiling.splits for tiling in of_nibbles}) == 1


def test_splits_are_programs_only_for_rows_of_one_tile() -> None:
    for shape in ((4096, 14336), (6144, 4096), (15872, 8192)):
        for rows in range(1, 600):
            tiling = triton_groups.choose_tiling(rows, shape, 64, 2, most_rows=256)
            assert tiling.splits > 1
            assert not tiling.apart or rows <= tiling.block_m
            assert not tiling.apart or tiling.splits * rows * shape[0] * 4 <= 32 << 20
            assert tiling.apart or rows > 64
            assert tiling.apart or tiling.block_m <= 128


# Codes of 4 bits, two in a byte.


@pytest.mark.parametrize("name", NIBBLES)
@pytest.mark.parametrize("shape", [(40, 256, 128), *OF_4_BITS[1:]])
def test_weights_are_those_of_8_bit_codes_to_the_bit(name: str, shape: tuple[int, int, int]) -> None:
    weight = KINDS[name].weight(*shape)
    packed = packed_of(name, weight)
    assert packed.shape == shape[:2]
    assert (packed.lows is not None) == (name == "4 bits, zeros")
    assert packed.words.nbytes * 2 == weight.codes.nbytes
    # Sums of one number and zeros.
    each = torch.eye(shape[1], device=DEVICE)
    assert torch.equal(packed(each), packed_of("codes", weight)(each))


def test_scales_are_held_in_16_bits_where_those_hold_them() -> None:
    weight = grouped(16, 128, 32, bits=4)
    assert packed_of("4 bits", weight).scales.dtype is torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        narrow = replace(weight, scales=weight.scales.to(dtype).float())
        packed = packed_of("4 bits", narrow, torch.bfloat16)
        assert packed.scales.dtype is dtype
        assert packed.makes_pairs
        assert torch.equal(packed.scales.float(), narrow.scales.to(DEVICE).T)


def test_codes_of_more_bits_and_other_groups_take_a_byte_each() -> None:
    ops = triton_ops(device=DEVICE)
    weight = grouped(16, 128, 32, bits=4)
    wide = weight.codes.clone()
    wide[3, :2] = torch.tensor([-9, 7], dtype=torch.int8)
    for other in (
        replace(weight, codes=wide),
        GroupedWeight(weight.codes[:, :96], weight.scales[:, :3], None, 32),
        GroupedWeight(weight.codes[:, :120], weight.scales[:, :3], None, 40),
    ):
        assert pack_nibbles(other, torch.float32, device=DEVICE) is None
        assert isinstance(ops.pack(other, WeightForm("groups", 4), torch.float32), triton_groups.PackedCodes)


@pytest.mark.parametrize("name", NIBBLES)
def test_a_row_has_the_same_bits_beside_any_others(name: str) -> None:
    """Whose K is cut; test_packed.py has the others."""
    rng = random.Random(0)
    packed = packed_of(name, KINDS[name].weight(*KINDS[name].split))
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
