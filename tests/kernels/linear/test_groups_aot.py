"""The base linear over codes, compiled for GPUs that are not there, as an 8B model launches it.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/linear/test_groups_aot.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.kernels.linear.triton_groups import choose_tiling
from support.kernels.triton_aot import ARCHS, Variant, check, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "groups.json"
MOST_ROWS = {80: 128, 90: 256}
FEW = (
    "o, groups of 64, 16 rows",
    "o, groups of 64, 256 rows",
    "gate and up, groups of 128, 16 rows",
    "q, k and v of Q4_K_M, 16 rows",
    "q, k and v of Q4_K_M, 256 rows",
    "down, a scale a row, 2048 rows",
)
"""What the short version compiles: each kind of codes and of splits."""


def variants() -> list[Variant]:
    return [
        variant(name, rows, shape, group, arch, offsets=offsets)
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


def variant(name: str, rows: int, shape: tuple[int, int], group: int, arch: int, *, offsets: bool) -> Variant:
    tiling = choose_tiling(rows, shape, group, 2, most_rows=MOST_ROWS[arch])
    return Variant(
        f"linear over codes, {name}, {rows} rows, sm_{arch}",
        "loraplex.kernels.linear.triton_groups:groups_program",
        dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
        | dict.fromkeys(("scales_ptr", "offsets_ptr", "planes_ptr"), "*fp32")
        | {"codes_ptr": "*i8", "arrived_ptr": "*i32"}
        | dict.fromkeys(("num_rows", "N", "K"), "i32"),
        {
            "GROUP": group, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
            "SPLITS": tiling.splits, "APART": tiling.apart, "HAS_OFFSETS": offsets, "HAS_BIAS": False,
            "PRECISION": "tf32", "AWAIT": True,
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
            assert usage.wide_loads > 0, name
            assert usage.tensor_cores > 0, name


@short_and_long
def test_on_hopper_no_product_of_weights_in_registers_is_left_in_flight(every: bool) -> None:
    hopper = [variant for variant in chosen(every) if variant.archs == (90,)]
    assert products_in_flight(*hopper) == [(1, 0)] * len(hopper)
    # The trap is there, and this is how it looks.
    trap = replace(hopper[0], constants={**hopper[0].constants, "AWAIT": False})
    (found,) = products_in_flight(trap)
    assert found[1] > 0
