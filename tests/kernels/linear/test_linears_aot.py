"""The base linears in Triton, compiled for GPUs that are not there, as an 8B model launches them.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/linear/test_linears_aot.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.kernels.linear import triton_dense, triton_groups, triton_nibbles
from loraplex.kernels.linear.triton_fp8 import floats_tiling
from loraplex.kernels.weight_form import block_of_4_bits
from support.kernels.triton_aot import ARCHS, Variant, check, products_in_flight

RECORDS = Path(__file__).parents[1] / "aot"
PROGRAMS = "loraplex.kernels.linear.triton_"
MOST_ROWS = {80: 128, 90: 256}
HALVES = ("x_ptr", "bias_ptr", "y_ptr")
Signature = Mapping[str, str]


def linear(
    name: str, program: str, signature: Signature, constants: Mapping[str, Any], tiling: Any, arch: int = 0
) -> Variant:
    """A product whose rows, bias and outputs are in bfloat16, for one architecture or all."""
    blocks = {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k}
    return Variant(
        f"{name}, sm_{arch}" if arch else name,
        PROGRAMS + program,
        dict.fromkeys(HALVES, "*bf16") | signature | dict.fromkeys(("num_rows", "N", "K"), "i32"),
        {**blocks, "HAS_BIAS": False, "PRECISION": "tf32", **constants},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        multiples_of_16=("N", "K"),
        archs=(arch,) if arch else ARCHS,
    )


def in_splits(tiling: Any) -> dict[str, Any]:
    return {"SPLITS": tiling.splits, "APART": tiling.apart, "AWAIT": True}


def dense() -> list[Variant]:
    weights, program = {"weight_ptr": "*bf16"}, "dense:linear_program"
    return [
        linear(
            f"linear, {name}", program, weights, {"HAS_BIAS": bias}, triton_dense.choose_tiling(outputs, 2)
        )
        for name, outputs, bias in (
            ("o", 4096, False), ("8192 columns", 8192, True), ("head", 128256, False),
        )
    ]  # fmt: skip


def fp8() -> list[Variant]:
    return [
        *(rounding(inputs) for inputs in (4096, 14336)),
        *(
            floats(f"{name}, {rows} rows", rows, shape, group, arch)
            for name, shape, group, steps in (
                ("o, a scale a row", (4096, 4096), 4096, (16, 64, 256)),
                ("gate and up, a scale a row", (28672, 4096), 4096, (16, 64, 256, 2048)),
                ("down, blocks of 128", (4096, 14336), 128, (16, 64, 256, 2048)),
            )
            for rows in steps
            for arch in ARCHS
        ),
    ]


def rounding(inputs: int) -> Variant:
    """What makes 8-bit activations, as no A100 does."""
    block = 1 << (inputs - 1).bit_length()
    return Variant(
        f"rows of {inputs} as 8-bit floats",
        "loraplex.kernels.linear.scaled_mm:to_floats_program",
        {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_row": "i32", "K": "i32"},
        {"BLOCK": block},
        num_warps=min(16, max(4, block // 1024)),
        multiples_of_16=("x_row", "K"),
        archs=(90,),
    )


def floats(name: str, rows: int, shape: tuple[int, int], group: int, arch: int) -> Variant:
    tiling, converts = floats_tiling(rows, shape, group, 2), arch >= 89
    signature = dict.fromkeys(("scales_ptr", "planes_ptr"), "*fp32") | {
        "values_ptr": "*fp8e4nv" if converts else "*u8", "arrived_ptr": "*i32",
    }  # fmt: skip
    constants = in_splits(tiling) | {"GROUP": group, "WHOLE": True, "CONVERTS": converts}
    return linear(
        f"linear over 8-bit floats, {name}", "fp8:floats_program", signature, constants, tiling, arch
    )


def groups() -> list[Variant]:
    return [
        codes(f"{name}, {rows} rows", rows, shape, group, arch, offsets=offsets)
        for name, shape, group, offsets, steps in (
            ("o, groups of 64", (4096, 4096), 64, False, (16, 32, 64, 128, 256, 2048)),
            ("gate and up, groups of 128", (28672, 4096), 128, False, (16, 32, 64, 256)),
            ("q, k and v of Q4_K_M", (6144, 4096), 16, True, (16, 256, 2048)),
            ("down of Q4_0", (4096, 14336), 32, True, (16, 64, 256, 2048)),
            ("down, a scale a row", (4096, 14336), 14336, False, (16, 256, 2048)),
            ("head, groups of 64", (128256, 4096), 64, False, (16, 64, 256)),
        )
        for rows in steps
        for arch in ARCHS
    ]


def codes(name: str, rows: int, shape: tuple[int, int], group: int, arch: int, *, offsets: bool) -> Variant:
    tiling = triton_groups.choose_tiling(rows, shape, group, 2, most_rows=MOST_ROWS[arch])
    signature = dict.fromkeys(("scales_ptr", "offsets_ptr", "planes_ptr"), "*fp32") | {
        "codes_ptr": "*i8", "arrived_ptr": "*i32",
    }  # fmt: skip
    constants = in_splits(tiling) | {"GROUP": group, "HAS_OFFSETS": offsets}
    return linear(f"linear over codes, {name}", "groups:groups_program", signature, constants, tiling, arch)


def nibbles() -> list[Variant]:
    return [
        codes_of_4_bits(f"{name}, {rows} rows", rows, shape, group, arch, kind)
        for name, shape, group, kind, steps in (
            ("gate and up of GPTQ", (28672, 4096), 128, "scales", (16, 2048)),
            ("q, k and v of AWQ", (6144, 4096), 128, "zeros", (256,)),
            ("down of Q4_1", (4096, 14336), 32, "offsets", (64, 2048)),
        )
        for rows in steps
        for arch in ARCHS
    ]


def codes_of_4_bits(
    name: str, rows: int, shape: tuple[int, int], group: int, arch: int, kind: str
) -> Variant:
    block = block_of_4_bits(shape[1], group)
    assert block is not None
    tiling = triton_nibbles.choose_tiling(rows, shape, block, 2, most_rows=MOST_ROWS[arch])
    signature = dict.fromkeys(("scales_ptr", "offsets_ptr"), "*fp16") | {
        "words_ptr": "*i16", "lows_ptr": "*i8", "planes_ptr": "*fp32", "arrived_ptr": "*i32",
    }  # fmt: skip
    constants = in_splits(tiling) | {
        "GROUP": group, "LOW": 0 if kind == "offsets" else -8, "HAS_OFFSETS": kind == "offsets",
        "HAS_LOWS": kind == "zeros", "PAIRS": kind != "offsets",
    }  # fmt: skip
    return linear(
        f"linear over 4-bit codes, {name}", "nibbles:nibbles_program", signature, constants, tiling, arch
    )


@dataclass(frozen=True)
class Kind:
    """Launches of one kind of linear."""

    variants: Callable[[], list[Variant]]
    few: tuple[str, ...]
    """Of their names, what the short version compiles."""
    on_hopper: tuple[int, int] = (1, 0)
    """Products of each that take weights from registers, and those that are left in flight."""
    spilled: Mapping[int, int] | None = None
    """The most bytes a thread, where it may spill."""


KINDS = {
    "dense": Kind(dense, ("linear",), on_hopper=(0, 0)),
    # Each kind of widening, and what rounds activations. An A100 has no instruction that widens e4m3.
    "fp8": Kind(fp8, ("down, blocks of 128, 256 rows", "rows of 4096"), spilled={80: 40}),
    # Each kind of codes and of splits.
    "groups": Kind(
        groups,
        (
            "o, groups of 64, 16 rows",
            "o, groups of 64, 256 rows",
            "gate and up, groups of 128, 16 rows",
            "q, k and v of Q4_K_M, 16 rows",
            "q, k and v of Q4_K_M, 256 rows",
            "down, a scale a row, 2048 rows",
        ),
    ),
    # Two weights at once, and one.
    "nibbles": Kind(nibbles, ("gate and up of GPTQ, 16 rows", "down of Q4_1, 64 rows")),
}


def chosen(name: str, every: bool) -> list[Variant]:
    kind = KINDS[name]
    return [one for one in kind.variants() if every or any(part in one.name for part in kind.few)]


short_and_long = pytest.mark.parametrize(
    ("kind", "every"),
    [
        pytest.param(kind, every, marks=pytest.mark.soak if every else pytest.mark.slow)
        for kind in KINDS
        for every in (False, True)
    ],
)


@short_and_long
def test_all_compile_and_take_no_more_than_recorded(kind: str, every: bool) -> None:
    report = check(KINDS[kind].variants(), RECORDS / f"{kind}.json", compiled=chosen(kind, every))
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            allowed = (KINDS[kind].spilled or {}).get(int(arch.removeprefix("sm_")), 0)
            assert usage.spill_bytes <= allowed, f"{name} on {arch}"
            assert usage.wide_loads > 0 or kind == "nibbles", f"{name} on {arch}"
            assert usage.tensor_cores > 0 or name.startswith("rows of"), f"{name} on {arch}"


@short_and_long
def test_on_hopper_no_product_of_weights_in_registers_is_left_in_flight(kind: str, every: bool) -> None:
    hopper = [one for one in chosen(kind, every) if 90 in one.archs and not one.name.startswith("rows of")]
    assert products_in_flight(*hopper) == [KINDS[kind].on_hopper] * len(hopper)
    if kind in ("groups", "nibbles"):
        # The trap is there, and this is how it looks.
        trap = replace(hopper[0], constants={**hopper[0].constants, "AWAIT": False})
        (found,) = products_in_flight(trap)
        assert found[1] > 0
