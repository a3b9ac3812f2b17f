"""The batch-invariant base linear, compiled for GPUs that are not there, as an 8B model launches it.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/linear/test_dense_aot.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.kernels.linear.triton_dense import choose_tiling
from support.kernels.triton_aot import Variant, check, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "dense.json"


def variants() -> list[Variant]:
    found = []
    for name, out_features, bias in (
        ("o", 4096, False),
        ("8192 columns", 8192, True),
        ("head", 128256, False),
    ):
        tiling = choose_tiling(out_features, 2)
        found.append(
            Variant(
                f"linear, {name}",
                "loraplex.kernels.linear.triton_dense:linear_program",
                dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
                | dict.fromkeys(("num_rows", "N", "K"), "i32"),
                {
                    "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
                    "HAS_BIAS": bias, "PRECISION": "tf32",
                },
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
                multiples_of_16=("N", "K"),
            )
        )  # fmt: skip
    return found


@pytest.mark.slow
def test_all_compile_and_take_no_more_than_recorded() -> None:
    for name, by_arch in check(variants(), RECORD).items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.wide_loads > 0, f"{name} on {arch}"
            assert usage.tensor_cores > 0, f"{name} on {arch}"


@pytest.mark.slow
def test_on_hopper_no_product_takes_an_operand_from_registers() -> None:
    assert products_in_flight(*variants()) == [(0, 0)] * 3
