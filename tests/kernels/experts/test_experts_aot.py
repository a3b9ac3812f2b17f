"""The Triton kernels of mixtures of experts, compiled for GPUs that are not there, as they are launched for the sizes
of Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3's router.

Operands have no memory, so that nothing of a step can be read on the host: these launches can be recorded.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/experts/test_experts_aot.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.experts import triton_expert_lora, triton_linears, triton_route, triton_rows
from loraplex.kernels.experts.lora_types import ExpertLoraWeights
from loraplex.kernels.experts.triton_expert_lora import TritonExpertLora
from loraplex.kernels.experts.triton_linears import StackedExperts, triton_expert_ops
from loraplex.kernels.experts.types import ExpertActivation, RouterKind, Routes
from support.kernels.lora_arena import expert_groups
from support.kernels.triton_aot import ARCHS, Recorder, Variant, check, launched_variant

RECORD = Path(__file__).parents[1] / "aot" / "experts.json"
META = torch.device("meta")
PROGRAMS = {
    triton_route: ("route_program",),
    triton_rows: ("group_program", "gather_program", "clamped_program", "combine_program", "add_program"),
    triton_linears: ("linear_program",),
    triton_expert_lora: ("shrink_program", "expand_program"),
}
QWEN3 = RouterKind("softmax", 128, 8, normalise=True, weights_in_float32=False)
GPT_OSS = RouterKind("softmax_of_top", 32, 4, weights_in_float32=False)
DEEPSEEK = RouterKind("sigmoid", 256, 8, normalise=True, scaling=2.5, groups=8, top_groups=4)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def run_layer(
    kind: RouterKind, rows: int, hidden: int, width: int, act: ExpertActivation, *, bias: bool
) -> None:
    each = triton_expert_ops(no_codes, batch_invariant=False)
    x, experts = empty(rows, hidden), kind.num_experts
    gate_up, down = (
        StackedExperts((experts, n, k), x.dtype, empty(experts, n, k))
        for n, k in ((2 * width, hidden), (hidden, width))
    )
    routes = each.route(empty(rows, experts), kind)
    places = each.group(routes, experts)
    y = gate_up(each.gather(x, places), places, empty(experts, 2 * width) if bias else None)
    h = triton_rows.clamped(y, act) if act.name == "clamped" else empty(len(y), width)
    out = each.combine(down(h, places, empty(experts, hidden) if bias else None), routes, places)
    each.add_gated(out, x, empty(rows, 1))


def no_codes(*_: Any) -> Any:
    raise AssertionError("these weights are floats")


def run_router() -> None:
    floats = torch.float32
    triton_route.route(empty(64, 256, dtype=floats), DEEPSEEK, empty(256, dtype=floats))


def run_lora(group: str) -> None:
    """Adapters of up to rank 64 on Qwen3-30B-A3B's experts."""
    hidden, width = 2048, 768
    groups = expert_groups(hidden, width, QWEN3.num_experts, (0,))
    tables = np.zeros((2, 1, 4, QWEN3.num_experts, 9, 2), np.int32)
    weights = ExpertLoraWeights(
        empty(1 << 20), groups, np.arange(2, dtype=np.int32), tables, np.zeros((2, 1, 4), np.int32)
    )
    lora = TritonExpertLora(weights).begin(empty(64, dtype=torch.int32))
    places = triton_expert_ops(no_codes, batch_invariant=False).group(
        Routes(empty(64, 8, dtype=torch.int64), empty(64, 8, dtype=torch.float32)), QWEN3.num_experts
    )
    found = next(each for each in groups if each.key == group)
    lora.apply(0, group, empty(512, found.in_features), empty(512, found.out_features), places)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    silu, clamped = ExpertActivation(), ExpertActivation("clamped")
    sizes: dict[str, Callable[[], None]] = {
        "Qwen3-30B-A3B decode": partial(run_layer, QWEN3, 64, 2048, 768, silu, bias=False),
        "Qwen3-30B-A3B prompt": partial(run_layer, QWEN3, 2048, 2048, 768, silu, bias=False),
        "gpt-oss-20b decode": partial(run_layer, GPT_OSS, 16, 2880, 2880, clamped, bias=True),
        "DeepSeek-V3": run_router,
        "LoRA on gate and up": partial(run_lora, "experts.gate_up"),
        "LoRA on down": partial(run_lora, "experts.down"),
    }
    found: dict[tuple[Any, ...], Variant] = {}

    def keep(arguments: dict[str, Any], module: Any, name: str, size: str) -> None:
        kernel = f"{module.__name__}:{name}"
        variant = launched_variant("", kernel, arguments, unspecialised=("places", "layer", "first_site"))
        same = kernel, *map(str, (variant.signature, variant.constants, variant.multiples_of_16))
        found.setdefault(same, replace(variant, name=f"{name.removesuffix('_program')}, {size}"))

    for size, run in sizes.items():
        with monkeypatch.context() as patch:
            for module, names in PROGRAMS.items():
                for name in names:
                    of_program = partial(keep, module=module, name=name, size=size)
                    patch.setattr(module, name, Recorder(getattr(module, name), of_program))
            run()
    return list(found.values())


@pytest.mark.parametrize(
    "archs", [pytest.param((90,), marks=pytest.mark.slow), pytest.param(ARCHS, marks=pytest.mark.soak)]
)
def test_all_compile_and_take_no_more_than_recorded(
    archs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = launched(monkeypatch)
    report = check(variants, RECORD, compiled=[replace(variant, archs=archs) for variant in variants])
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            assert (usage.tensor_cores > 0) == name.startswith(("linear", "shrink")), f"{name} on {arch}"
            reads_rows = name.startswith(
                ("linear", "gather", "clamped", "combine", "add", "shrink", "expand")
            )
            assert usage.wide_loads > 0 or not reads_rows, f"{name} on {arch}"
