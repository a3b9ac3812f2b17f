"""Norms, RoPE with the KV write and gated activations on a GPU: right against float64, and how near their floor.

Each case function gives a dict, with times where it gets `ceilings`. Without a GPU it runs interpreted, and gives none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.kernels.layers import triton_activation, triton_norm, triton_rope
from loraplex.kernels.layers.rope import rope_cos_sin

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK_SIZE = 16


def norm_case(
    rows: int,
    columns: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    float32_weight: bool = False,
    ceilings: Ceilings | None = None,
) -> dict[str, Any]:
    """Residual addition and RMSNorm, with a weight as Gemma's where it is float32."""
    x, residual = _draw(0, device, dtype, rows, columns), _draw(1, device, dtype, rows, columns)
    weight = 1 + _draw(2, device, torch.float32 if float32_weight else dtype, columns) * 0.1
    total = (x.float() + residual.float()).to(dtype).double()
    want = total * (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    out = residual.clone()
    got = triton_norm.add_rms_norm(x, out, weight, 1e-5)
    exact = torch.equal(out.double(), total)
    return _result(
        f"norm {rows} × {columns}{', float32 weight' if float32_weight else ''}",
        dtype,
        max(relative_error(got, want), 0.0 if exact else float("inf")),
        4 * rows * columns * dtype.itemsize,
        lambda: triton_norm.add_rms_norm(x, residual, weight, 1e-5),
        device,
        ceilings,
    )


def activation_case(
    rows: int,
    inner: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gelu: bool = False,
    ceilings: Ceilings | None = None,
) -> dict[str, Any]:
    """SiLU·mul, or GELU's tanh approximation."""
    gate_up = _draw(0, device, dtype, rows, 2 * inner) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    functional = torch.nn.functional
    want = (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up
    run = partial(triton_activation.act_and_mul, gelu=gelu)
    return _result(
        f"{'gelu' if gelu else 'silu'} and mul {rows} × {inner}",
        dtype,
        relative_error(run(gate_up), want),
        3 * rows * inner * dtype.itemsize,
        lambda: run(gate_up),
        device,
        ceilings,
    )


def rope_case(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    norm: bool = False,
    ceilings: Ceilings | None = None,
) -> dict[str, Any]:
    """RoPE of queries and keys and the write of keys and values into any slots, with Qwen3's norm before."""
    qkv = _draw(0, device, dtype, rows, heads + 2 * kv_heads, head_dim)
    positions = torch.randint(0, 8192, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    inv_freq = 1.0 / 500000.0 ** (torch.arange(0, head_dim, 2, device=device) / head_dim)
    cos, sin = rope_cos_sin(positions, inv_freq)
    blocks = -(-rows // BLOCK_SIZE) + 2
    cache = torch.full((blocks, BLOCK_SIZE, 2, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    order = torch.randperm(blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(2))
    slots = order[:rows].to(device, torch.int32)
    weights: dict[str, Any] = {}
    if norm:
        weights = {
            f"{name}_norm": 1 + _draw(at, device, dtype, head_dim) * 0.1 for at, name in ((3, "q"), (4, "k"))
        }
        weights["eps"] = 1e-6
    turned = _turned(qkv, heads + kv_heads, heads, cos, sin, weights)
    own = qkv.clone()

    def run() -> None:
        triton_rope.rope_and_write_kv(own, heads, cos, sin, cache, slots, **weights)

    run()
    flat = cache.view(-1, 2 * kv_heads, head_dim)
    error = max(
        relative_error(own[:, :heads], turned[:, :heads]),
        relative_error(flat[slots.long()], turned[:, heads:]),
    )
    untouched = torch.ones(len(flat), dtype=torch.bool, device=device)
    untouched[slots.long()] = False
    if not bool(flat[untouched].isnan().all()):
        error = float("inf")
    num_bytes = rows * head_dim * dtype.itemsize * (2 * heads + 4 * kv_heads) + 2 * cos.numel() * 4
    name = f"rope and KV write {rows} × ({heads} + 2·{kv_heads}) × {head_dim}{', norm' if norm else ''}"
    return _result(name, dtype, error, num_bytes, run, device, ceilings)


def small_cases(device: torch.device) -> list[dict[str, Any]]:
    """For the interpreter, and for a first look at a GPU."""
    return [
        norm_case(3, 40, device, dtype=torch.float32),
        norm_case(3, 40, device, dtype=torch.float16, float32_weight=True),
        activation_case(2, 50, device, dtype=torch.float16),
        activation_case(2, 50, device, dtype=torch.float32, gelu=True),
        rope_case(3, 4, 2, 16, device, dtype=torch.float32),
        rope_case(3, 4, 2, 16, device, dtype=torch.float16, norm=True),
    ]


def full_cases(device: torch.device, ceilings: Ceilings | None = None) -> list[dict[str, Any]]:
    """Llama-3.1-8B's sizes for decode and prefill, then Qwen3's and Gemma's."""
    found = []
    for rows in (64, 2048):
        found += [
            norm_case(rows, 4096, device, ceilings=ceilings),
            activation_case(rows, 14336, device, ceilings=ceilings),
            rope_case(rows, 32, 8, 128, device, ceilings=ceilings),
            rope_case(rows, 16, 8, 128, device, norm=True, ceilings=ceilings),
            norm_case(rows, 2304, device, float32_weight=True, ceilings=ceilings),
            activation_case(rows, 9216, device, gelu=True, ceilings=ceilings),
        ]
    return found


def _turned(
    qkv: torch.Tensor, turned: int, heads: int, cos: torch.Tensor, sin: torch.Tensor, weights: dict[str, Any]
) -> torch.Tensor:
    x = qkv.double()
    if weights:
        normed = x[:, :turned] * (x[:, :turned].pow(2).mean(-1, keepdim=True) + weights["eps"]).rsqrt()
        normed[:, :heads] *= weights["q_norm"].double()
        normed[:, heads:] *= weights["k_norm"].double()
        x[:, :turned] = normed
    half = cos.shape[-1]
    a, b = x[:, :turned, :half].clone(), x[:, :turned, half : 2 * half].clone()
    x[:, :turned, :half] = a * cos.double() - b * sin.double()
    x[:, :turned, half : 2 * half] = b * cos.double() + a * sin.double()
    return x


def _draw(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _result(
    name: str,
    dtype: torch.dtype,
    error: float,
    num_bytes: int,
    run: Callable[[], object],
    device: torch.device,
    ceilings: Ceilings | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        "ok": error <= TOLERANCE[dtype],
    }
    if ceilings is None:
        return result
    floor = ceilings.floor_ms(num_bytes)
    ms = median_ms(run, device)
    result |= {"bytes": num_bytes, "floor_ms": floor, "graph_ms": ms}
    if ms is not None:
        result["times_floor"] = ms / floor
    return result
