"""The Triton kernels of batched LoRA, compiled for GPUs that are not there, just as they are launched for an 8B model.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/lora/test_lora_aot.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.lora import triton_expand, triton_lora, triton_shrink
from loraplex.kernels.lora.readers import triton_add_norm, triton_gated, triton_readers
from loraplex.kernels.lora.readers.triton_readers import FusedReaders
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import TritonLora
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling
from loraplex.kernels.lora.types import Scratch
from support.kernels.lora_arena import make_arena
from support.kernels.triton_aot import Recorder, Variant, check, launched_variant, products_in_flight

RECORD = Path(__file__).parents[1] / "aot" / "lora.json"
GROUP = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
UNSPECIALISED = ("which", "rows_list", "layer", "first_site", "num_sites", "units")
READ = (
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 4096, (14336, 14336)),
    SiteGroup("down", ("down_proj",), 14336, (4096,)),
)
ROWS_APART = LoraTiling(shrink_by_rows=True)
DEPENDENT = "dependent, "
"""Of the names of kernels that are launched while those before them run: Hopper's alone."""


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
        size = "batch-invariant" if tiling.batch_invariant else "small, rows apart"

    def keep(stage: str, arguments: dict[str, Any]) -> None:
        detail = f", {arguments['BLOCK_R']} ranks" if stage == "shrink" else ""
        found.append(
            launched_variant(
                f"{stage} {size}{detail}, {NAMES[dtype]}",
                f"loraplex.kernels.lora.triton_{stage}:{stage}",
                arguments,
                unspecialised=UNSPECIALISED,
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


def readers_launched(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The launches of a recorded pass whose B sides are computed by what reads them."""
    found: list[Variant] = []

    def keep(name: str, module: str, arguments: dict[str, Any]) -> None:
        path = f"loraplex.kernels.lora.readers.{module}:{name}"
        of = f"{name}, {NAMES[dtype]}"
        found.append(launched_variant(of, path, arguments, unspecialised=UNSPECIALISED))

    with monkeypatch.context() as patch:
        for name, module in (("expand_gated", triton_gated), ("expand_norm", triton_add_norm)):
            short = module.__name__.rpartition(".")[2]
            recorder = Recorder(
                getattr(module, name), lambda arguments, of=(name, short): keep(*of, arguments)
            )
            patch.setattr(triton_readers, name, recorder)
        for stage in ("shrink", "expand"):
            patch.setattr(triton_lora, stage, Recorder(getattr(triton_lora, stage), lambda _: None))
        arena = make_arena(READ, 1, dtype, [16], max_rank=64)
        scratch = Scratch(torch.device("cpu"))
        lora = TritonLora(
            arena.weights,
            scratch,
            max_rows=64,
            max_segments=64,
            programs=528,
        )
        launcher = lora.recorded(torch.zeros(lora.work_size, dtype=torch.int32), 64)
        readers = FusedReaders(launcher, launcher)
        hidden, inner = torch.empty(64, 4096, dtype=dtype), torch.empty(64, 14336, dtype=dtype)
        readers.gated(0, "gate_up", hidden, torch.empty(64, 28672, dtype=dtype), gelu=False)
        readers.norm(0, "down", inner, hidden, hidden[0], 1e-5, hidden.clone())
    return found


def dependent(variant: Variant) -> Variant:
    """As it is launched where a B side is launched while its A side runs."""
    return replace(
        variant,
        name=DEPENDENT + variant.name,
        constants={**variant.constants, "DEPENDENT": True},
        archs=(90,),
    )


@pytest.mark.slow
def test_all_compile_and_take_no_more_than_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = []
    for dtype in (torch.bfloat16, torch.float16):
        variants += launched(dtype, 16, 1, monkeypatch)
        variants += launched(dtype, 16, 100, monkeypatch)
        variants += launched(dtype, 64, 100, monkeypatch)[:1]
        variants += launched(dtype, 64, 1, monkeypatch, INVARIANT_TILING)
        variants += readers_launched(dtype, monkeypatch)
    variants += launched(torch.bfloat16, 16, 1, monkeypatch, ROWS_APART)[:1]
    small = [*launched(torch.bfloat16, 16, 1, monkeypatch), *readers_launched(torch.bfloat16, monkeypatch)]
    variants += [dependent(variant) for variant in small]
    report = check(variants, RECORD)
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.wide_loads > 0, f"{name} on {arch}"
            assert (usage.tensor_cores > 0) is ("expand_norm" not in name), f"{name} on {arch}"


@pytest.mark.slow
def test_on_hopper_no_product_takes_an_operand_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the A side, whose operands both come from memory, nor the B side, whose tiles are too low."""
    shrink, expand = launched(torch.bfloat16, 64, 100, monkeypatch)
    assert products_in_flight(shrink, expand) == [(0, 0), (0, 0)]
