"""The base linear with 8-bit activations that numba compiles."""

from __future__ import annotations

import ctypes

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite import ir
from numba import types

from loraplex.kernels.backend import make_kernels
from loraplex.kernels.layers.numba_quantise import GROUP, QuantisedRows, quantise_rows
from loraplex.kernels.linear import int8_products, numba_blocks, numba_int8
from loraplex.kernels.linear.int8_products import products
from loraplex.kernels.linear.numba_groups import PackedGroups
from loraplex.kernels.linear.numba_int8 import PackedIntegers, emit_tiles, pack_integers
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.weight_form import WeightForm
from support.kernels.linears import dense, drawn, grouped

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = [*((4, dtype) for dtype in DTYPES), (8, torch.float32), (8, torch.bfloat16)]
"""Bits of a code and dtype: code is compiled for each, which takes a second."""
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
FEATURES = {
    "portable": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl"}),
    "avx512-vnni": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"}),
}
SHAPES = [(32, 32, 32), (1, 64, 32), (100, 128, 64), (33, 192, 192), (80, 576, 96)]


def packed_of(weight: GroupedWeight, dtype: torch.dtype = torch.float32) -> PackedIntegers:
    packed = pack_integers(weight, dtype)
    assert packed is not None
    return packed


def as_quantised(x: torch.Tensor) -> torch.Tensor:
    """What the codes of x stand for, in float64."""
    found = quantise_rows(x)
    codes = found.codes.view(*found.groups.shape[:2], GROUP).double()
    return (codes * found.groups[..., :1].double()).view(x.shape)


@pytest.mark.parametrize(("bits", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize(("columns", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("offsets", [False, True])
def test_products_are_those_of_the_quantised_rows_and_rounded_once(
    columns: int, inputs: int, group: int, bits: int, offsets: bool, dtype: torch.dtype
) -> None:
    weight = grouped(columns, inputs, group, bits=bits, zeros="floats" if offsets else "")
    packed = packed_of(weight, dtype)
    assert (packed.shape, packed.bits) == ((columns, inputs), bits)
    assert packed.codes.shape[-2:] == (numba_blocks.block_size(), 4)
    for bias in (None, drawn(columns, seed=1, dtype=dtype)):
        for rows in (0, 1, 2, 3, 4, 5, 7, 13, 64):
            x = drawn(rows, inputs, seed=2, dtype=dtype)
            y = packed(x, bias)
            assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, columns), dtype, True)
            exact = as_quantised(x) @ dense(weight).T + (0.0 if bias is None else bias.double())
            # Sums of float32: of codes of 8 bits they are eight times as large.
            most = exact.abs() * ROUNDING[dtype] + 2e-5 * (bits / 4) ** 3 * inputs**0.5
            assert ((y.double() - exact).abs() <= most).all()


@pytest.mark.parametrize("codes", [(0, 15), (-8, 7), (-128, -113), (-128, 127), (-127, 127)], ids=str)
def test_sums_of_extreme_codes_are_exact(codes: tuple[int, int]) -> None:
    inputs, rows = 96, 6
    columns = 40
    weight_codes = torch.full((columns, inputs), codes[1], dtype=torch.int8)
    weight_codes[::2] = codes[0]
    weight_codes[1::3, ::2] = codes[0]
    weight = GroupedWeight(weight_codes, torch.ones(columns, 3), None, 32)
    x = torch.full((rows, inputs), 127.0)  # codes of themselves
    x[1] = -127.0
    x[2, ::2] = -127.0
    x[3, 1::4] = -127.0
    x[4] = torch.arange(inputs) % 255 - 127.0
    x[4, ::32] = 127.0
    packed = packed_of(weight, torch.float32)
    assert torch.equal(packed(x).long(), x.long() @ weight_codes.long().T)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_of_a_step_in_place_of_a_row_is_noticed(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_of(grouped(64, 128, 32, bits=bits), torch.float32)
    x = drawn(9, 128, seed=1)
    x[5] *= 3
    right = quantise_rows

    def of_the_step(rows: torch.Tensor) -> QuantisedRows:
        """The codes of every row on the scales of the largest."""
        largest = rows.abs().view(len(rows), -1, GROUP).amax((0, 2)).repeat_interleave(GROUP)
        found = right(torch.cat([largest.expand_as(rows), rows]))
        scales = found.groups[: len(rows)].clone()
        codes = (rows / (largest / 127)).round().to(torch.int8)
        sums = codes.view(len(rows), -1, GROUP).sum(-1)
        scales[..., 1] = scales[..., 0] * sums
        scales[..., 2] = (sums * -128).int().view(torch.float32)
        return QuantisedRows(codes, scales)

    together = packed(x)
    assert torch.equal(packed(x[2:3]), together[2:3])
    monkeypatch.setattr(numba_int8, "quantise_rows", of_the_step)
    assert (packed(x) - together).abs().max() < (0.1 if bits == 4 else 2.0)
    assert not torch.equal(packed(x[2:3]), packed(x)[2:3])


def test_other_groups_are_left_to_others() -> None:
    weight = grouped(40, 64, 64, bits=4, least=-3)
    other = GroupedWeight(weight.codes[:, :48], weight.scales, None, 48)
    assert numba_int8.bits_of(other) is None
    assert pack_integers(other, torch.float32) is None


def test_a_code_beyond_16_numbers_of_its_group_makes_8_bits_of_all() -> None:
    weight = grouped(40, 64, 64, bits=4, least=-3)
    wide_codes = weight.codes.clone()
    wide_codes[3, 5] = wide_codes[3].amin() + 16
    wide = GroupedWeight(wide_codes, weight.scales, None, 64)
    pack = make_kernels("numba", torch.device("cpu")).ops.pack
    of_4, of_8 = (WeightForm("groups", bits, 64, "int8") for bits in (4, 8))
    found = [(numba_int8.bits_of(each), type(pack(each, of_4, torch.float32))) for each in (weight, wide)]
    assert found == [(4, PackedIntegers), (8, PackedGroups)]
    packed = pack(wide, of_8, torch.float32)
    assert isinstance(packed, PackedIntegers)
    assert packed.bits == 8
    exact = WeightForm("groups", 4, 64)
    assert isinstance(pack(weight, exact, torch.float32), PackedGroups)


def test_scales_are_kept_in_float16_where_it_holds_them() -> None:
    for least in (0, -8, 5):
        made = grouped(40, 64, 32, bits=4, least=least)
        half = GroupedWeight(made.codes, made.scales.half().float(), None, 32)
        found = [packed_of(weight, torch.float32).scales.dtype for weight in (half, made)]
        assert found == [torch.float16 if least in (0, -8) else torch.float32, torch.float32]


class _Processor:
    """What the emitting functions ask numba's context for."""

    def __init__(self, features: frozenset[str]) -> None:
        self._features = features

    def codegen(self) -> _Processor:
        return self

    def magic_tuple(self) -> tuple[str, str, str]:
        return "", "", ",".join(f"+{name}" for name in sorted(self._features))


def tile_module(features: frozenset[str], bits: int) -> llvm.ModuleRef:
    """A module with the function `tile` for a processor and codes of some bits: its rows, then the addresses and sizes
    of `emit_tiles`."""
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [nir.I64] * 13)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    rows, *arguments = function.args
    kinds = (types.float32, types.int16, types.uint8 if bits == 4 else types.int8)
    emit_tiles(_Processor(features), builder, kinds, rows, arguments)
    builder.ret_void()
    return llvm.parse_assembly(str(module))


def emulated_dot(module: ir.Module) -> ir.Function:
    """vpdpbusd by its definition: unsigned bytes of the second times signed bytes of the third, in 32 bits. A function,
    that LLVM need not compile it at each place."""
    if "dot" in module.globals:
        return module.globals["dot"]
    function = ir.Function(module, ir.FunctionType(nir.V_I32, [nir.V_I32] * 3), "dot")
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    bytes_kind, wide = ir.VectorType(nir.I8, 64), ir.VectorType(nir.I32, 64)
    total, codes, given = function.args
    product = builder.mul(
        builder.zext(builder.bitcast(codes, bytes_kind), wide),
        builder.sext(builder.bitcast(given, bytes_kind), wide),
    )
    for byte in range(4):
        places = ir.Constant(nir.V_I32, list(range(byte, 64, 4)))
        total = builder.add(total, builder.shuffle_vector(product, ir.Constant(wide, ir.Undefined), places))
    builder.ret(total)
    return function


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_processors_products_are_equal(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for other processors runs here, with AVX512-VNNI's product emulated."""
    if "avx2" not in llvm.get_host_cpu_features() and name != "portable":
        pytest.skip("a processor without AVX2")
    features, right = FEATURES[name], nir.call

    def call(
        builder: ir.IRBuilder, intrinsic: str, result: ir.Type, given: list[ir.Value], **options: object
    ) -> ir.Value:
        if intrinsic == "llvm.x86.avx512.vpdpbusd.512":
            return builder.call(emulated_dot(builder.module), given)
        return right(builder, intrinsic, result, given, **options)

    width, columns, inputs = (32 if "avx512f" in features else 16), 29, 96
    made = grouped(columns, inputs, 32, bits=bits, least=0, zeros="floats")
    assert made.offsets is not None
    weight = GroupedWeight(made.codes, made.scales.half().float(), made.offsets.half().float(), 32)
    steps = [drawn(rows, inputs, seed=rows) for rows in (1, 3, products(features, bits).most_rows)]
    expected = [packed_of(weight)(x) for x in steps]
    monkeypatch.setattr(numba_blocks, "block_size", lambda: width)
    packed = packed_of(weight, torch.float32)
    assert packed.offsets is not None
    assert packed.offsets.dtype is packed.scales.dtype is torch.float16
    monkeypatch.setattr(int8_products.nir, "call", call)
    module = tile_module(features, bits)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=0
    )
    with llvm.create_mcjit_compiler(module, machine) as engine:
        tile = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 13)(engine.get_function_address("tile"))
        for x, wanted in zip(steps, expected, strict=True):
            y, given = torch.empty(len(x), columns), quantise_rows(x)
            for block in range(len(packed.codes)):
                count = min(width, columns - block * width)
                tile(
                    len(x), given.codes.data_ptr(), given.groups.data_ptr(), packed.codes[block].data_ptr(),
                    packed.scales[block].data_ptr(), packed.offsets[block].data_ptr(), 0,
                    y.data_ptr() + 4 * block * width, 4 * columns, inputs // GROUP, 1, inputs // GROUP, count,
                )  # fmt: skip
            assert torch.equal(y, wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("name", "cpu", "wanted"),
    [("avx512-vnni", "icelake-server", "vpdpbusd"), ("avx2", "haswell", "vpmaddubsw")],
)
def test_code_for_other_processors_has_their_products(name: str, cpu: str, wanted: str, bits: int) -> None:
    if "x86_64" not in llvm.get_default_triple():
        pytest.skip("LLVM is built for other processors here")
    machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=cpu, opt=2)
    found = machine.emit_assembly(tile_module(FEATURES[name], bits))
    assert found.count(wanted) >= 8
    assert "call" not in found
