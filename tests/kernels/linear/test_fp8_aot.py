"""The base linear over 8-bit floats, compiled for GPUs that are not there, as an 8B model launches it.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/linear/test_fp8_aot.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.kernels.linear.triton_fp8 import floats_tiling
from support.kernels.triton_aot import ARCHS, Variant, check, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "fp8.json"
FEW = ("down, blocks of 128, 256 rows", "rows of 4096")
"""What the short version compiles: each kind of widening, and what rounds activations."""
MOST_SPILLED = {"sm_80": 40, "sm_90": 0}
"""Bytes a thread. An A100 has no instruction that widens e4m3."""


def variants() -> list[Variant]:
    return [
        *(rounding(inputs) for inputs in (4096, 14336)),
        *(
            variant(name, rows, shape, group, arch)
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


def variant(name: str, rows: int, shape: tuple[int, int], group: int, arch: int) -> Variant:
    tiling = floats_tiling(rows, shape, group, 2)
    converts = arch >= 89
    return Variant(
        f"linear over 8-bit floats, {name}, {rows} rows, sm_{arch}",
        "loraplex.kernels.linear.triton_fp8:floats_program",
        dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
        | dict.fromkeys(("scales_ptr", "planes_ptr"), "*fp32")
        | {"values_ptr": "*fp8e4nv" if converts else "*u8", "arrived_ptr": "*i32"}
        | dict.fromkeys(("num_rows", "N", "K"), "i32"),
        {
            "GROUP": group, "WHOLE": True, "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "SPLITS": tiling.splits, "APART": tiling.apart,
            "HAS_BIAS": False, "PRECISION": "tf32", "AWAIT": True, "CONVERTS": converts,
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        multiples_of_16=("N", "K"),
        archs=(arch,),
    )  # fmt: skip


def chosen(every: bool) -> list[Variant]:
    return [variant for variant in variants() if every or any(name in variant.name for name in FEW)]


short_and_long = pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.soak)]
)


@short_and_long
def test_all_compile_and_take_no_more_than_recorded(every: bool) -> None:
    for name, by_arch in check(variants(), RECORD, compiled=chosen(every)).items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes <= MOST_SPILLED[arch], name
            assert usage.wide_loads > 0, name
            assert usage.tensor_cores > 0 or name.startswith("rows of"), name


@short_and_long
def test_on_hopper_no_product_of_weights_in_registers_is_left_in_flight(every: bool) -> None:
    hopper = [
        variant
        for variant in chosen(every)
        if variant.archs == (90,) and not variant.name.startswith("rows of")
    ]
    assert products_in_flight(*hopper) == [(1, 0)] * len(hopper)
