"""The base linear over codes of 4 bits, compiled for GPUs that are not there, as an 8B model launches it.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/linear/test_nibbles_aot.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.kernels.linear.triton_nibbles import choose_tiling
from loraplex.kernels.weight_form import block_of_4_bits
from support.kernels.triton_aot import ARCHS, Variant, check, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "nibbles.json"
MOST_ROWS = {80: 128, 90: 256}
FEW = ("gate and up of GPTQ, 16 rows", "down of Q4_1, 64 rows")
"""The variants of the short version: two weights at once, and one."""


def variants() -> list[Variant]:
    return [
        variant(name, rows, shape, group, arch, kind)
        for name, shape, group, kind, steps in (
            ("gate and up of GPTQ", (28672, 4096), 128, "scales", (16, 2048)),
            ("q, k and v of AWQ", (6144, 4096), 128, "zeros", (256,)),
            ("down of Q4_1", (4096, 14336), 32, "offsets", (64, 2048)),
        )
        for rows in steps
        for arch in ARCHS
    ]


def variant(name: str, rows: int, shape: tuple[int, int], group: int, arch: int, kind: str) -> Variant:
    block = block_of_4_bits(shape[1], group)
    assert block is not None
    tiling = choose_tiling(rows, shape, block, 2, most_rows=MOST_ROWS[arch])
    return Variant(
        f"linear over 4-bit codes, {name}, {rows} rows, sm_{arch}",
        "loraplex.kernels.linear.triton_nibbles:nibbles_program",
        dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
        | dict.fromkeys(("scales_ptr", "offsets_ptr"), "*fp16")
        | {"words_ptr": "*i16", "lows_ptr": "*i8", "planes_ptr": "*fp32", "arrived_ptr": "*i32"}
        | dict.fromkeys(("num_rows", "N", "K"), "i32"),
        {
            "GROUP": group, "LOW": 0 if kind == "offsets" else -8, "BLOCK_M": tiling.block_m,
            "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "SPLITS": tiling.splits,
            "APART": tiling.apart, "HAS_OFFSETS": kind == "offsets", "HAS_LOWS": kind == "zeros",
            "HAS_BIAS": False, "PAIRS": kind != "offsets", "PRECISION": "tf32", "AWAIT": True,
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
        for usage in by_arch.values():
            assert usage.spill_bytes == 0, name
            assert usage.tensor_cores > 0, name


@short_and_long
def test_on_hopper_no_product_of_weights_in_registers_is_left_in_flight(every: bool) -> None:
    hopper = [variant for variant in chosen(every) if variant.archs == (90,)]
    assert products_in_flight(*hopper) == [(1, 0)] * len(hopper)
    # The trap is there, and this is how it looks.
    trap = replace(hopper[0], constants={**hopper[0].constants, "AWAIT": False})
    (found,) = products_in_flight(trap)
    assert found[1] > 0
