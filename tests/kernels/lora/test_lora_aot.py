"""The Triton kernels of batched LoRA, compiled for GPUs that are not there, just as they are launched for an 8B model.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/lora/test_lora_aot.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.lora import triton_expand, triton_lora, triton_shrink
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import TritonLora
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling
from loraplex.kernels.lora.types import Scratch
from support.kernels.lora_arena import make_arena
from support.kernels.triton_aot import Recorder, Variant, check, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "lora.json"
GROUP = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
UNSPECIALISED = ("which", "layer", "first_site", "num_sites", "units")


def launched(
    dtype: torch.dtype,
    rank: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    tiling: LoraTiling | None = None,
) -> list[Variant]:
    """The launches of a step of `rows` rows of one adapter."""
    found: list[Variant] = []
    size = "large" if rows > 16 else "small"
    if tiling is not None:
        size = "batch-invariant"

    def keep(stage: str, arguments: dict[str, Any]) -> None:
        warps, stages = arguments.pop("num_warps"), arguments.pop("num_stages")
        constants = {name: value for name, value in arguments.items() if name.isupper() and name != "K"}
        rest = {name: value for name, value in arguments.items() if name not in constants}
        detail = f", {constants['BLOCK_R']} ranks" if stage == "shrink" else ""
        found.append(
            Variant(
                f"{stage} {size}{detail}, {NAMES[dtype]}",
                f"loraplex.kernels.lora.triton_{stage}:{stage}",
                {
                    name: f"*{NAMES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"
                    for name, value in rest.items()
                },
                constants,
                num_warps=warps,
                num_stages=stages,
                multiples_of_16=tuple(
                    name
                    for name, value in rest.items()
                    if isinstance(value, int) and value % 16 == 0 and name not in UNSPECIALISED
                ),
            )
        )

    with monkeypatch.context() as patch:
        for stage, kernel in (("shrink", triton_shrink.shrink), ("expand", triton_expand.expand)):
            recorder = Recorder(kernel, lambda arguments, stage=stage: keep(stage, arguments))
            patch.setattr(triton_lora, stage, recorder)
        arena = make_arena([GROUP], 1, dtype, [rank], max_rank=64)
        lora = TritonLora(
            arena.weights,
            Scratch(torch.device("cpu")),
            max_rows=rows,
            max_segments=1,
            tiling=tiling or LoraTiling(),
            programs=528,
        )
        lora.write(0)
        numbers = np.zeros(lora.work_size, np.int32)
        step = lora.plan([(0, 0, rows)], rows, numbers)
        launcher = lora.launcher(torch.from_numpy(numbers), step, [0])
        x = torch.empty(rows, GROUP.in_features, dtype=dtype)
        launcher.apply(0, "qkv", x, torch.empty(rows, sum(GROUP.out_features), dtype=dtype))
    return found


@pytest.mark.slow
def test_all_compile_and_take_no_more_than_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = []
    for dtype in (torch.bfloat16, torch.float16):
        variants += launched(dtype, 16, 1, monkeypatch)
        variants += launched(dtype, 16, 100, monkeypatch)
        variants += launched(dtype, 64, 100, monkeypatch)[:1]
        variants += launched(dtype, 64, 1, monkeypatch, INVARIANT_TILING)
    report = check(variants, RECORD)
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.wide_loads > 0, f"{name} on {arch}"
            assert usage.tensor_cores > 0, f"{name} on {arch}"


@pytest.mark.slow
def test_on_hopper_no_product_takes_an_operand_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the A side, whose operands both come from memory, nor the B side, whose tiles are too low."""
    shrink, expand = launched(torch.bfloat16, 64, 100, monkeypatch)
    assert products_in_flight(shrink, expand) == [(0, 0), (0, 0)]
