"""The Triton kernels of batched LoRA, compiled for GPUs that are not there, just as they are launched for an 8B model.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/lora/test_lora_aot.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.lora import triton_expand, triton_lora, triton_shrink
from loraplex.kernels.lora.readers import triton_add_norm, triton_gated, triton_readers, triton_rotary
from loraplex.kernels.lora.readers.triton_readers import FusedReaders
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import TritonLora
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling
from loraplex.kernels.lora.types import Scratch
from support.kernels.lora_arena import make_arena
from support.kernels.triton_aot import (
    MAX_SHARED_BYTES,
    Recorder,
    Report,
    Variant,
    check,
    launched_variant,
    loads_before_product,
    products_in_flight,
)

RECORD = Path(__file__).parents[1] / "aot" / "lora.json"
GROUP = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
UNSPECIALISED = ("which", "rows_list", "layer", "first_site", "num_sites", "units")
READ = (
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 4096, (14336, 14336)),
    SiteGroup("down", ("down_proj",), 14336, (4096,)),
)
PACKED = SiteGroup("qkv", ("qkv_proj",), 3072, (5120,))
REGISTERS = 65536
"""Of a multiprocessor."""
ROWS_APART = LoraTiling(shrink_by_rows=True, block_k=256, max_splits=16)
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


def recorded_readers(groups: tuple[SiteGroup, ...], dtype: torch.dtype) -> FusedReaders:
    """Of recorded passes of 64 rows."""
    arena = make_arena(groups, 1, dtype, [16], max_rank=64)
    scratch = Scratch(torch.device("cpu"))
    lora = TritonLora(arena.weights, scratch, max_rows=64, max_segments=64, programs=528)
    launcher = lora.recorded(torch.zeros(lora.work_size, dtype=torch.int32), 64)
    return FusedReaders(launcher)


def readers_launched(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The launches of a recorded pass whose B sides are computed by what reads them."""
    found: list[Variant] = []
    with monkeypatch.context() as patch:
        for name, module in (
            ("expand_rotary", triton_rotary),
            ("expand_gated", triton_gated),
            ("expand_norm", triton_add_norm),
        ):
            keep_launches(found, f"{name}, {NAMES[dtype]}", name, module, patch)
        readers = recorded_readers((GROUP, *READ), dtype)
        hidden, inner = torch.empty(64, 4096, dtype=dtype), torch.empty(64, 14336, dtype=dtype)
        rotate(readers, hidden, 32, 8, 128, 64, None)
        readers.gated(0, "gate_up", hidden, torch.empty(64, 28672, dtype=dtype), gelu=False)
        readers.norm(0, "down", inner, hidden, hidden[0], 1e-5, hidden.clone())
    return found


def families_rotated(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Other families' launches of the B side with RoPE and the KV write."""
    found: list[Variant] = []
    for family, group, *heads, norm in (
        ("Qwen3 4B", SiteGroup("qkv", GROUP.sites, 2560, (4096, 1024, 1024)), 32, 8, 128, 64, dtype),
        ("Gemma 3 12B", SiteGroup("qkv", GROUP.sites, 3840, (4096, 2048, 2048)), 16, 8, 256, 128, torch.float32),
        ("Phi-4 mini", PACKED, 24, 8, 128, 48, None),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            keep_launches(
                found, f"expand_rotary of {family}, {NAMES[dtype]}", "expand_rotary", triton_rotary, patch
            )
            readers = recorded_readers((group,), dtype)
            rotate(readers, torch.empty(64, group.in_features, dtype=dtype), *heads, norm)
    return found


def rotate(
    readers: FusedReaders,
    x: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    half: int,
    norm: torch.dtype | None,
) -> None:
    y = torch.empty(64, (num_heads + 2 * num_kv_heads) * head_dim, dtype=x.dtype)
    cos = torch.empty(64, 1, half)
    cache = torch.empty(2, 16, 2, num_kv_heads, head_dim, dtype=x.dtype)
    weight = None if norm is None else torch.empty(head_dim, dtype=norm)
    slots = torch.zeros(64, dtype=torch.int32)
    readers.rotary(0, "qkv", x, y, num_heads, cos, cos, cache, slots, q_norm=weight, k_norm=weight, eps=1e-6)


def keep_launches(
    found: list[Variant], title: str, name: str, module: ModuleType, patch: pytest.MonkeyPatch
) -> None:
    """Of one reader, in place of launching it or the A side before it."""

    def keep(arguments: dict[str, Any]) -> None:
        found.append(
            launched_variant(title, f"{module.__name__}:{name}", arguments, unspecialised=UNSPECIALISED)
        )

    patch.setattr(triton_readers, name, Recorder(getattr(module, name), keep))
    patch.setattr(triton_lora, "shrink", Recorder(triton_shrink.shrink, lambda _: None))


def dependent(variant: Variant) -> Variant:
    """As it is launched where a B side is launched while its A side runs."""
    return replace(
        variant,
        name=DEPENDENT + variant.name,
        constants={**variant.constants, "DEPENDENT": True},
        archs=(90,),
    )


def too_large_for_their_launches(report: Report) -> list[str]:
    """The kernels of small pieces whose programs do not all fit: a multiprocessor holds fewer than are launched for it,
    by their registers, which threads get by eights, or by their shared memory."""
    tiling = LoraTiling()
    found = []
    for name, by_arch in report.items():
        if "large" in name or "norm" in name or "batch-invariant" in name:
            continue
        programs = tiling.shrink_programs if "shrink" in name else tiling.expand_programs
        for arch, usage in by_arch.items():
            threads = 32 * tiling.small_warps
            registers = programs * threads * (-(-usage.registers // 8) * 8)
            shared = programs * (usage.shared_bytes + (1 << 10))  # the driver takes 1 KiB for each
            if registers > REGISTERS or shared > MAX_SHARED_BYTES[int(arch.removeprefix("sm_"))]:
                found.append(f"{name} on {arch}")
    return found


def short(variants: list[Variant]) -> Iterator[Variant]:
    """Those of Llama's shapes in bfloat16, on Hopper as they are launched there."""
    dependents = {variant.name for variant in variants if variant.name.startswith(DEPENDENT)}
    for variant in variants:
        if variant.name.endswith("bf16") and not any(word in variant.name for word in ("of", "64", "apart")):
            has_dependent = DEPENDENT + variant.name in dependents
            yield replace(variant, archs=(80,)) if has_dependent else variant


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.soak)]
)
def test_all_compile_and_take_no_more_than_recorded(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = []
    for dtype in (torch.bfloat16, torch.float16):
        variants += launched(dtype, 16, 1, monkeypatch)
        variants += launched(dtype, 16, 100, monkeypatch)
        variants += launched(dtype, 64, 100, monkeypatch)[:1]
        variants += launched(dtype, 64, 1, monkeypatch, INVARIANT_TILING)
        variants += readers_launched(dtype, monkeypatch)
        variants += families_rotated(dtype, monkeypatch)
    variants += launched(torch.bfloat16, 16, 1, monkeypatch, ROWS_APART)[:1]
    small = [*launched(torch.bfloat16, 16, 1, monkeypatch), *readers_launched(torch.bfloat16, monkeypatch)]
    variants += [dependent(variant) for variant in small]
    report = check(variants, RECORD, compiled=variants if every else list(short(variants)))
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.wide_loads > 0, f"{name} on {arch}"
            assert (usage.tensor_cores > 0) is ("expand_norm" not in name), f"{name} on {arch}"
    large = ["expand small, fp16 on sm_80", "expand small, fp16 on sm_90"]
    assert too_large_for_their_launches(report) == [
        name for name in large if name.rpartition(" on ")[0] in report
    ]


@pytest.mark.slow
def test_on_hopper_no_product_takes_an_operand_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the A side, whose operands both come from memory, nor the B side, whose tiles are too low."""
    shrink, expand = launched(torch.bfloat16, 64, 100, monkeypatch)
    assert products_in_flight(shrink, expand) == [(0, 0), (0, 0)]


@pytest.mark.slow
def test_an_a_sides_first_load_of_weights_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor was loaded with the item before. A B side loads piece and record first."""
    shrink, expand = launched(torch.bfloat16, 16, 1, monkeypatch)
    assert loads_before_product(shrink) == 1
    assert loads_before_product(expand) > 1
