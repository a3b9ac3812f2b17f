"""The Triton kernels of recurrent layers and short convolutions, compiled for GPUs that are not there, as they are
launched for Qwen3.5's, Granite 4's, Nemotron-H's and LFM2's sizes.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/recurrent/test_recurrent_aot.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.kernels.layers import triton_short_conv
from loraplex.kernels.recurrent import triton_convolve, triton_gates, triton_rule
from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentMemory,
    RecurrentRows,
    RecurrentUnit,
    lay_out_units,
    recurrent_bytes,
    recurrent_memory,
)
from support.kernels.triton_aot import ARCHS, Recorder, Variant, check, launched_variant

RECORD = Path(__file__).parents[1] / "aot" / "recurrent.json"
DTYPE, ROWS = torch.bfloat16, 18
HEADS = {"0.8B": RecurrentHeads(16, 16, 128, 128), "27B": RecurrentHeads(16, 48, 128, 128)}
MAMBAS = {"H-1B": RecurrentHeads(1, 48, 128, 64), "Nemotron-H": RecurrentHeads(8, 128, 128, 64)}
PROGRAMS = {
    triton_short_conv: ("short_conv_program",),
    triton_convolve: ("convolve_program",),
    triton_gates: ("gates_program", "steps_program", "gated_norm_program", "output_gate_program"),
    triton_rule: ("rule_program", "keep_program"),
}


def launched(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The launches of a layer of each size, for a prompt that ends a window, and of LFM2-1.2B's convolution."""
    return [
        *recorded("0.8B", lambda: run_layer(HEADS["0.8B"]), PROGRAMS, monkeypatch),
        *recorded("27B", lambda: run_layer(HEADS["27B"]), [triton_rule], monkeypatch),
        *recorded("H-1B", lambda: run_mamba(MAMBAS["H-1B"]), PROGRAMS, monkeypatch),
        *recorded("Nemotron-H", lambda: run_mamba(MAMBAS["Nemotron-H"]), [triton_rule], monkeypatch),
        *recorded("LFM2", run_short_conv, PROGRAMS, monkeypatch),
    ]


def recorded(
    size: str, run: Callable[[], object], modules: Collection[Any], monkeypatch: pytest.MonkeyPatch
) -> list[Variant]:
    """What `run` launches of the programs of these modules; none runs."""
    found: list[Variant] = []

    def keep(arguments: dict[str, Any], module: Any, name: str) -> None:
        kernel = f"{module.__name__}:{name}"
        full = f"{name.removesuffix('_program')}, {size}"
        variant = launched_variant(full, kernel, arguments, unspecialised=("count",))
        # Parts of the arrays that travel with a step may lie anywhere.
        if module in modules:
            found.append(replace(variant, unaligned=("slots_ptr", "previous_ptr")))

    with monkeypatch.context() as patch:
        for module, names in PROGRAMS.items():
            for name in names:
                of_program = partial(keep, module=module, name=name)
                patch.setattr(module, name, Recorder(getattr(module, name), of_program))
        run()
    return found


def run_short_conv() -> None:
    gates, places = torch.zeros(2, 3 * 2048, dtype=DTYPE), torch.zeros(2, 2, dtype=torch.int32)
    cache, slots = torch.zeros(1, 16, 2, 8, 128, dtype=DTYPE), torch.zeros(2, dtype=torch.int32)
    triton_short_conv.short_conv(gates, cache, slots, places, torch.zeros(3, 2048), None)


def memory_and_units(heads: RecurrentHeads) -> tuple[RecurrentMemory, RecurrentRows]:
    sizes = recurrent_bytes(heads, DTYPE)
    memory = recurrent_memory(heads, DTYPE, *(torch.zeros(1, size, dtype=torch.uint8) for size in sizes))
    return memory, lay_out_units([RecurrentUnit(range(ROWS), 0, 0, 0, (0,))])


def run_mamba(heads: RecurrentHeads) -> None:
    memory, units = memory_and_units(heads)
    inner = heads.value_heads * heads.value_dim
    y = torch.zeros(ROWS, inner + heads.channels + heads.value_heads, dtype=DTYPE)
    floats, end = torch.zeros(heads.value_heads), inner + heads.channels
    weight, bias = torch.zeros(heads.width, heads.channels), torch.zeros(heads.channels)
    mixed = triton_convolve.convolve(y[:, inner:end], weight, units, memory, bias)
    step, decay = triton_gates.step_gates(y[:, end:], floats, floats, 0.0, 3e38)
    triton_rule.rule(mixed, decay, step, units, memory, heads, floats)


def run_layer(heads: RecurrentHeads) -> None:
    rows, values = ROWS, heads.value_heads * heads.value_dim
    memory, units = memory_and_units(heads)
    y = torch.zeros(rows, heads.channels + values, dtype=DTYPE)
    mixed = triton_convolve.convolve(
        y[:, : heads.channels], torch.zeros(heads.width, heads.channels), units, memory
    )
    ab, floats = torch.zeros(rows, 2 * heads.value_heads, dtype=DTYPE), torch.zeros(heads.value_heads)
    beta, decay = triton_gates.delta_gates(
        ab[:, : heads.value_heads], ab[:, heads.value_heads :], floats, floats
    )
    out = triton_rule.rule(mixed, decay, beta, units, memory, heads)
    triton_gates.gated_norm(out, y[:, heads.channels :], torch.zeros(heads.value_dim, dtype=DTYPE), 1e-6)
    queries = torch.zeros(rows, 16, 256, dtype=DTYPE)
    triton_gates.output_gate(queries[:, ::2].contiguous(), queries[:, 1::2])


@pytest.mark.parametrize(
    "archs", [pytest.param((90,), marks=pytest.mark.slow), pytest.param(ARCHS, marks=pytest.mark.soak)]
)
def test_all_compile_and_take_no_more_than_recorded(
    archs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = launched(monkeypatch)
    assert len(variants) == 15
    report = check(variants, RECORD, compiled=[replace(variant, archs=archs) for variant in variants])
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert usage.tensor_cores == 0, f"{name} on {arch}"  # TF32 would cost states half their digits
            # Single numbers alone are read narrow.
            assert usage.wide_loads > 0 or name.startswith(("gates", "steps")), f"{name} on {arch}"
