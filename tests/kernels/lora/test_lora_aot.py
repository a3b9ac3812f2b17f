"""The Triton kernels of batched LoRA, compiled for GPUs that are not there, just as they are launched for an 8B model.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/lora/test_lora_aot.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.lora import triton_expand, triton_lora, triton_rows, triton_shrink, triton_strips
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
from support.machine_code import read_code

RECORD = Path(__file__).parents[1] / "aot" / "lora.json"
GROUP = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024))
GATE_UP = SiteGroup("gate_up", ("gate_proj", "up_proj"), 4096, (14336, 14336))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
UNSPECIALISED = ("which", "layer", "first_site", "num_sites", "units")
KERNELS = {
    "shrink": ("triton_shrink", triton_shrink.shrink),
    "expand": ("triton_expand", triton_expand.expand),
    "expand_rows": ("triton_rows", triton_rows.expand_rows),
    "expand_strips": ("triton_strips", triton_strips.expand_strips),
    "gated_strips": ("triton_strips", triton_strips.gated_strips),
}
"""The module and the kernel, by the name by which it is launched."""
BY_ROWS = LoraTiling(row_programs=12, row_block_k=1024)
BY_STRIPS = LoraTiling(strip_stages=3)
REGISTERS = 65536
"""Registers of a multiprocessor."""
TOO_LARGE = {
    "expand small, fp16 on sm_80",
    "expand small, fp16 on sm_90",
    "expand large, fp16 on sm_80",
    "expand by strips, 64 ranks, fp16 on sm_80",
    "expand by strips, 64 ranks, fp16 on sm_90",
    "shrink large, 64 ranks, bf16 on sm_80",
    "shrink large, 64 ranks, bf16 on sm_90",
    "shrink large, 64 ranks, fp16 on sm_80",
    "shrink large, 64 ranks, fp16 on sm_90",
}
"""A multiprocessor holds fewer programs of these than are launched for it. B sides in float16 would spill, A sides of
64 ranks take 48 or 64 KiB of shared memory for the stages of their loads."""
KB_ON_THE_WAY = {
    "shrink small": 128,
    "shrink large": 120,
    "shrink batch-invariant": 64,
    "shrink by rows": 128,
    "expand small": 24,
    "expand large": 24,
    "expand batch-invariant": 24,
    "expand by rows": 102,
    "expand by strips": 72,
    "gated by strips": 72,
}
"""The most of a multiprocessor: weights, and with them x or y where these are loaded at once. For the bandwidth of an
H200 22 are needed at all times; B sides have theirs for a small part of the time."""
DEPENDENT = "dependent, "
"""A part of the names of kernels that are launched while those before them run: Hopper's alone."""
EARLY = "early, "
"""A part of the names of A sides among them."""


def launched(
    dtype: torch.dtype,
    rank: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    tiling: LoraTiling | None = None,
    group: SiteGroup = GROUP,
) -> list[Variant]:
    """The launches of a step of `rows` rows of one adapter, those of gate and up with their activation."""
    found: list[Variant] = []
    size = "large" if rows > 16 else "small"
    if tiling is not None and tiling.batch_invariant:
        size = "batch-invariant"

    def keep(kernel: str, arguments: dict[str, Any]) -> None:
        detail = f", {arguments['BLOCK_R']} ranks" if kernel == "shrink" or "strips" in kernel else ""
        words = kernel.replace("_", " by ") if "_" in kernel else f"{kernel} {size}"
        if arguments.get("ROW_K"):
            words = "shrink by rows"
        found.append(
            launched_variant(
                f"{words}{detail}, {NAMES[dtype]}",
                f"loraplex.kernels.lora.{KERNELS[kernel][0]}:{kernel}",
                arguments,
                unspecialised=UNSPECIALISED,
            )
        )

    with monkeypatch.context() as patch:
        for name, (_, kernel) in KERNELS.items():
            patch.setattr(triton_lora, name, Recorder(kernel, partial(keep, name)))
        arena = make_arena([group], 1, dtype, [rank], max_rank=64)
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
        x = torch.empty(rows, group.in_features, dtype=dtype)
        y = torch.empty(rows, sum(group.out_features), dtype=dtype)
        if group is GROUP:
            launcher.apply(0, group.key, x, y)
        else:
            assert launcher.gate(0, group.key, x, y, gelu=False) is not None
    return found


def dependent(variant: Variant) -> Variant:
    """The variant for devices that launch a B side while its A side runs."""
    return replace(
        variant,
        name=DEPENDENT + variant.name,
        constants={**variant.constants, "DEPENDENT": True},
        archs=(90,),
    )


def early(variant: Variant) -> Variant:
    """The variant of an A side that begins while the kernel before it ends."""
    constants = {**variant.constants, "DEPENDENT": True, "EARLY": True}
    return replace(variant, name=EARLY + variant.name, constants=constants, archs=(90,))


def programs_and_warps(name: str) -> tuple[int, int]:
    """The programs of a launch that a multiprocessor shall hold, and the warps of each."""
    tiling = LoraTiling()
    if "expand by rows" in name:
        return BY_ROWS.row_programs, 1
    programs = tiling.shrink_programs if "shrink" in name else tiling.expand_programs
    return programs, tiling.large_warps if "large" in name or "by strips" in name else tiling.small_warps


def too_large_for_their_launches(report: Report) -> list[str]:
    """The kernels whose programs do not all fit: a multiprocessor holds fewer than are launched for it, by their
    registers, which threads get by eights, or by their shared memory."""
    found = []
    for name, by_arch in report.items():
        if "batch-invariant" in name:
            continue
        programs, warps = programs_and_warps(name)
        for arch, usage in by_arch.items():
            threads = 32 * warps
            registers = programs * threads * (-(-usage.registers // 8) * 8)
            shared = programs * (usage.shared_bytes + (1 << 10))  # the driver takes 1 KiB for each
            if registers > REGISTERS or shared > MAX_SHARED_BYTES[int(arch.removeprefix("sm_"))]:
                found.append(f"{name} on {arch}")
    return found


def short(variants: list[Variant]) -> Iterator[Variant]:
    """Those of Llama's shapes in bfloat16, on Hopper as they are launched there."""
    dependents = {variant.name for variant in variants if variant.archs == (90,)}
    for variant in variants:
        if variant.name.endswith("bf16") and "64" not in variant.name:
            has_dependent = DEPENDENT + variant.name in dependents
            yield replace(variant, archs=(80,)) if has_dependent else variant


def dependents(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The launches of a decoding step on Hopper, in both forms, and A sides that begin early."""
    today = launched(torch.bfloat16, 16, 1, monkeypatch)
    by_rows = launched(torch.bfloat16, 16, 1, monkeypatch, BY_ROWS)
    by_strips = launched(torch.bfloat16, 16, 100, monkeypatch, BY_STRIPS)[1:]
    gated = launched(torch.bfloat16, 16, 100, monkeypatch, BY_STRIPS, GATE_UP)[1:]
    return [*map(dependent, today + by_rows + by_strips + gated), early(today[0]), early(by_rows[0])]


def all_variants(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    variants = []
    for dtype in (torch.bfloat16, torch.float16):
        variants += launched(dtype, 16, 1, monkeypatch)
        variants += launched(dtype, 16, 100, monkeypatch)
        variants += launched(dtype, 64, 100, monkeypatch)[:1]
        variants += launched(dtype, 64, 1, monkeypatch, INVARIANT_TILING)
        variants += launched(dtype, 16, 1, monkeypatch, BY_ROWS)
        for rank in (16, 64):
            variants += launched(dtype, rank, 100, monkeypatch, BY_STRIPS)[1:]
            if dtype is torch.bfloat16 or rank == 16:
                variants += launched(dtype, rank, 100, monkeypatch, BY_STRIPS, GATE_UP)[1:]
    return variants + dependents(monkeypatch)


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.soak)]
)
def test_all_compile_and_take_no_more_than_recorded(every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = all_variants(monkeypatch)
    report = check(variants, RECORD, compiled=variants if every else list(short(variants)))
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.wide_loads > 0, f"{name} on {arch}"
            assert (usage.tensor_cores == 0) == ("expand by rows" in name), f"{name} on {arch}"
    compiled = {f"{name} on {arch}" for name, by_arch in report.items() for arch in by_arch}
    assert set(too_large_for_their_launches(report)) == TOO_LARGE & compiled


@pytest.mark.slow
def test_on_hopper_no_product_takes_an_operand_from_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the A side, whose operands both come from memory, nor the B side, whose tiles are too low."""
    shrink, expand = launched(torch.bfloat16, 64, 100, monkeypatch)
    assert products_in_flight(shrink, expand) == [(0, 0), (0, 0)]


@pytest.mark.slow
def test_an_a_sides_first_load_of_weights_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item's descriptor was loaded with the item before. A B side loads piece and record first."""
    shrink, expand = launched(torch.bfloat16, 16, 1, monkeypatch)
    assert loads_before_product(shrink) == 1
    assert loads_before_product(expand) > 1


@pytest.mark.slow
def test_b_sides_by_rows_have_enough_bytes_on_the_way_for_the_bandwidth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200 needs 22 KB on the way a multiprocessor, by Little's law. The runs of loads are those of a row, its later
    ranks, its vectors; then of several rows the same. y is one load for each row."""
    (by_rows,) = launched(torch.bfloat16, 16, 1, monkeypatch, BY_ROWS)[1:]
    now = launched(torch.bfloat16, 16, 1, monkeypatch)[1]
    hopper, ampere, today = read_code([(dependent(by_rows), 90), (by_rows, 80), (dependent(now), 90)])
    assert hopper.at_once[:3] == ampere.at_once[:3] == [17, 16, 4]
    assert hopper.at_once[3:5] == ampere.at_once[3:5] == [12, 8]
    assert hopper.before_wait[:2] == [16, 8]  # B's first ranks; y is loaded behind the wait
    for code in (hopper, ampere):
        of_tiles = [loads for at, loads in enumerate(code.at_once) if at not in (2, 5)]
        fewest = min(bytes_on_the_way(loads, BY_ROWS.row_programs, 1) for loads in of_tiles)
        assert fewest >= 40 << 10
        assert code.barriers <= 4
    assert bytes_on_the_way(max(today.at_once), LoraTiling().expand_programs, 4) == 24 << 10


@pytest.mark.slow
def test_strips_have_enough_bytes_on_the_way_for_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the first tiles of a strip, all but one stage, then of one tile for each that is computed: y and B."""
    (of_16,) = launched(torch.bfloat16, 16, 100, monkeypatch, BY_STRIPS)[1:]
    (of_64,) = launched(torch.bfloat16, 64, 100, monkeypatch, BY_STRIPS)[1:]
    (gated,) = launched(torch.bfloat16, 16, 100, monkeypatch, BY_STRIPS, GATE_UP)[1:]
    (gated_64,) = launched(torch.bfloat16, 64, 100, monkeypatch, BY_STRIPS, GATE_UP)[1:]
    narrow, *others = read_code(
        [
            (dependent(of_16), 90), (of_64, 90), (of_16, 80), (dependent(gated), 90), (gated, 80), (gated_64, 90)
        ]
    )  # fmt: skip
    assert [narrow.copies] * 5 == [code.copies for code in others]
    assert narrow.copies == [2 * 6, 6]
    assert bytes_on_the_way(narrow.copies[0], BY_STRIPS.expand_programs, BY_STRIPS.large_warps) == 72 << 10


@pytest.mark.slow
def test_a_sides_by_rows_have_enough_bytes_on_the_way_and_begin_before_x_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runs of loads are those of a row's 8 ranks, of 8 more, then of two rows the same, each with its x. On tensor
    cores A is brought into the cache before the wait: what is copied to shared memory by turns begins behind it."""
    today, by_rows = (
        launched(torch.bfloat16, 16, 1, monkeypatch)[0],
        launched(torch.bfloat16, 16, 1, monkeypatch, BY_ROWS)[0],
    )
    rows, tiles, ampere = read_code([(early(by_rows), 90), (early(today), 90), (by_rows, 80)])
    assert rows.at_once == ampere.at_once == [9, 9, 10, 10]
    assert rows.before_wait[:2] == rows.before_wait[3:5] == [8, 8]
    assert tiles.fetched > 0
    assert not any(tiles.before_wait)
    assert bytes_on_the_way(8, *programs_and_warps(by_rows.name)) == 64 << 10


@pytest.mark.slow
def test_the_bytes_that_each_kernel_has_on_the_way_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [(variant, arch) for variant in short(all_variants(monkeypatch)) for arch in variant.archs]
    for (variant, arch), code in zip(jobs, read_code(jobs), strict=True):
        name = variant.name.removeprefix(DEPENDENT).removeprefix(EARLY).partition(",")[0]
        most = bytes_on_the_way(max(code.at_once + code.copies), *programs_and_warps(variant.name))
        assert most >> 10 == KB_ON_THE_WAY[name], f"{variant.name} on sm_{arch}"


def bytes_on_the_way(loads: int, programs: int, warps: int) -> int:
    """Return those of a multiprocessor, by loads of 16 bytes a thread at once."""
    return 16 * loads * programs * 32 * warps
