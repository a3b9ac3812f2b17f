"""B sides of LoRA computed by what reads them, RoPE with the KV write, activation and norm: right against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.gpu.lora import LLAMA_8B, TOLERANCE, distinct
from bench.gpu.timing import relative_error
from loraplex.kernels.layers.rope import apply_rope, rope_cos_sin
from loraplex.kernels.lora.readers.triton_readers import FusedReaders
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import TritonLora
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import Scratch
from support.kernels.lora_arena import lengths, make_arena

_SMALL = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), 48, (80, 80)),
    SiteGroup("down", ("down_proj",), 80, (48,)),
)
_EPS = 1e-5


@dataclass(frozen=True)
class ReadersCase:
    """`rows` (slot, rows) in turn, slot -1 the base, over adapters of these `ranks`."""

    name: str
    ranks: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    dora: tuple[int, ...] = ()


def cases(*, small: bool) -> list[ReadersCase]:
    """Pieces of every kind, beside rows of the base."""
    many = 4 if small else 64
    mixed = ((0, 1), (-1, 2), (1, 3), (2, 9), (3, 1 if small else 33))
    return [
        ReadersCase("a row an adapter", (16,) * many, distinct(many, many)),
        ReadersCase("pieces of 1 to 16 rows, DoRA, base", (8, 24, 64, 16), mixed, dora=(1, 2)),
    ]


def run_case(case: ReadersCase, device: torch.device, *, small: bool) -> dict[str, Any]:
    """`error` is the largest one of the rotation's, the activation's and the norm's, as a part of the largest number.
    In the engine's tiling."""
    qkv, _, gate_up, down = LLAMA_8B
    groups, heads, dtype = (qkv, gate_up, down), (32, 8, 128), torch.bfloat16
    if small:
        groups, heads, dtype = _SMALL, (3, 1, 16), torch.float16
    qkv, gate_up, down = groups
    segments = lengths(case.rows)
    num_rows = sum(count for _, count in case.rows)
    arena = make_arena(groups, 1, dtype, case.ranks, max_rank=64, dora=case.dora, device=device)
    lora = TritonLora(
        arena.weights,
        Scratch(device),
        max_rows=num_rows,
        max_segments=len(segments),
        tiling=LoraTiling(fuse_norm_rows=num_rows),
        programs=None if device.type == "cuda" else 5,
    )
    for slot in range(len(case.ranks)):
        lora.write(slot)
    numbers = np.zeros(lora.work_size, np.int32)
    lora.plan(segments, num_rows, numbers, fixed=True)
    launcher = lora.recorded(torch.from_numpy(numbers).to(device), num_rows)
    readers = FusedReaders(launcher)

    def draw(seed: int, columns: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator(device=device).manual_seed(seed)
        return torch.randn(num_rows, sum(columns), generator=generator, device=device).to(dtype)

    x, y = draw(6, [qkv.in_features]), draw(7, qkv.out_features)
    error = _rotation_error(readers, heads, x, y, arena.expected(0, qkv, segments, x, y))
    x, y = draw(0, [gate_up.in_features]), draw(1, gate_up.out_features)
    gate, up = arena.expected(0, gate_up, segments, x, y).chunk(2, dim=-1)
    gated = readers.gated(0, "gate_up", x, y, gelu=False)
    assert gated is not None
    error = max(error, relative_error(gated, torch.nn.functional.silu(gate) * up))
    inner, out, residual = draw(2, [down.in_features]), draw(3, down.out_features), draw(4, down.out_features)
    weight = 1 + draw(5, down.out_features)[0] * 0.1
    total = arena.expected(0, down, segments, inner, out) + residual.double()
    normed = readers.norm(0, "down", inner, out, weight, _EPS, residual)
    assert normed is not None
    want = total * (total.pow(2).mean(-1, keepdim=True) + _EPS).rsqrt() * weight.double()
    error = max(error, relative_error(residual, total), relative_error(normed, want))
    return {
        "case": f"B sides in their readers: {case.name}",
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        # y and the sum are rounded before the norm.
        "ok": error <= 3 * TOLERANCE[dtype],
    }


def _rotation_error(
    readers: FusedReaders,
    heads: tuple[int, int, int],
    x: torch.Tensor,
    y: torch.Tensor,
    updated: torch.Tensor,
) -> float:
    """Of queries, keys and values. `heads`: Hq, Hkv and D; `updated` is y with its update, in float64."""
    rows, device = y.shape[0], y.device
    num_heads, num_kv_heads, head_dim = heads
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2, device=device) / head_dim)
    cos, sin = rope_cos_sin(torch.arange(rows, device=device), inv_freq)
    cache = torch.zeros(-(-rows // 16), 16, 2, num_kv_heads, head_dim, dtype=y.dtype, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device).flip(0).contiguous()
    assert readers.rotary(
        0, "qkv", x, y, num_heads, cos, sin, cache, slots, q_norm=None, k_norm=None, eps=_EPS
    )
    want = updated.view(rows, -1, head_dim).clone()
    apply_rope(want[:, : num_heads + num_kv_heads], cos, sin)
    written = cache.flatten(0, 1)[slots.long()].flatten(1, 2)
    got = torch.cat((y.view(rows, -1, head_dim)[:, :num_heads], written), 1)
    return relative_error(got, want)
