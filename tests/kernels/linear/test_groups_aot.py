"""The base linear over codes, compiled for GPUs that are not there, as an 8B model launches it.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/linear/test_groups_aot.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.kernels.linear.triton_groups import choose_tiling
from support.kernels.triton_aot import Variant, check

RECORD = Path(__file__).parents[1] / "aot" / "groups.json"


def variants() -> list[Variant]:
    found = []
    for name, out_features, group, offsets in (
        ("o, groups of 64", 4096, 64, False),
        ("gate and up, groups of 128", 28672, 128, False),
        ("q, k and v of Q4_K_M", 6144, 16, True),
        ("down, a scale a row", 4096, 14336, False),
        ("head, groups of 64", 128256, 64, False),
    ):
        tiling = choose_tiling(out_features, group, 2)
        found.append(
            Variant(
                f"linear over codes, {name}",
                "loraplex.kernels.linear.triton_groups:groups_program",
                dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
                | {"codes_ptr": "*i8", "scales_ptr": "*fp32", "offsets_ptr": "*fp32"}
                | dict.fromkeys(("num_rows", "N", "K"), "i32"),
                {
                    "GROUP": group, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
                    "HAS_OFFSETS": offsets, "HAS_BIAS": False, "PRECISION": "tf32",
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
