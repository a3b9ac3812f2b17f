"""Keys and values in 8-bit codes on a GPU, beside the model's dtype: attention, and the write behind RoPE.

Each case function gives a dict. Without a GPU it runs interpreted, and gives no times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.attention import BLOCK_SIZE, TOLERANCE, AttentionCase, attention_options, make_plan, make_step
from bench.gpu.timing import Ceilings, median_ms, relative_error
from loraplex.engine.kv.cache import KVCache
from loraplex.kernels.attention import triton_attention
from loraplex.kernels.attention.kv_codes import (
    from_codes,
    hadamard,
    head_width,
    to_codes,
    transform_factors,
    transform_keys,
)
from loraplex.kernels.layers import triton_rope
from loraplex.kernels.layers.rope import apply_rope, rope_cos_sin
from support.kernels.paged import PagedStep, expected_attention
from support.kernels.triton_cache import write_for_triton

_HALF_STEP = 0.57
"""The largest distance of a code from its number, in steps of a code: the scale is rounded too."""
_BLOCKS_AT_A_TIME = 1024


@dataclass(frozen=True)
class RopeCase:
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"rope and KV write {self.rows} × ({self.heads} + 2·{self.kv_heads}) × {self.head_dim}"


def attention_cases(*, small: bool) -> list[AttentionCase]:
    """In the engine's own tilings."""
    if small:
        shape: tuple[int, int, int] = (8, 2, 32)
        many, contexts, chunk, dtype = 3, (40, 130), 37, torch.float16
    else:
        shape, many, contexts, chunk, dtype = (32, 8, 128), 64, (1024, 8192), 2048, torch.bfloat16
    return [
        *(
            AttentionCase(f"decode {many} × {context:,}", *shape, (1,) * many, (context,) * many, dtype=dtype)
            for context in contexts
        ),
        AttentionCase(f"prefill {chunk:,}", *shape, (chunk,), (chunk,), dtype=dtype),
        AttentionCase(
            f"chunk {chunk:,} after {contexts[1]:,}", *shape, (chunk,), (contexts[1] + chunk,), dtype=dtype
        ),
    ]


def rope_cases(*, small: bool) -> list[RopeCase]:
    if small:
        return [RopeCase(5, 4, 2, 32, torch.float16)]
    return [RopeCase(rows, 32, 8, 128, torch.bfloat16) for rows in (1, 64, 2048)]


def run_attention(
    case: AttentionCase, device: torch.device, ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """`error`: the largest difference from attention in float64 to what the codes stand for, as a part of the largest
    number; `codes_error`: that from attention to the numbers before they were rounded to codes. `ok`: the first is
    within the dtype's rounding, and a second launch gives the same bits. With `ceilings` one layer is timed in a CUDA
    graph: `a_ms` over the dtype, `b_ms` over codes; `floor_ms` is one read of the codes."""
    plain = make_step(case, device)
    coded = in_codes(plain)
    options = attention_options(case)
    plan = make_plan(case, device)
    scratch = triton_attention.AttentionScratch.allocate(plan, device)
    batch = triton_attention.build_attention_batch(plan, scratch, case.num_rows, case.seq_lens, plain.tables)
    run_plain, run_coded = (
        partial(triton_attention.paged_attention, step.q, step.cache, batch, **options)
        for step in (plain, coded)
    )
    got, again = run_coded(), run_coded()
    error = relative_error(got, expected_attention(coded, **options))
    found: dict[str, Any] = {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "error": error,
        "codes_error": relative_error(got, expected_attention(plain, **options)),
        "ok": error <= TOLERANCE[case.dtype] and torch.equal(got, again),
    }
    if ceilings is None:
        return found
    positions = sum(case.seq_lens) * case.kv_heads * 2
    num_bytes = positions * head_width(case.head_dim, torch.int8) + 2 * plain.q.nbytes
    return found | _times(run_plain, run_coded, num_bytes, device, ceilings)


def run_rope(case: RopeCase, device: torch.device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """RoPE of queries and keys, their transform, and the write into any slots. `error`: of queries, as a part of the
    largest number; `steps`: how far a key or value is from its number in float64, in steps of its code, at most. `ok`
    also says that nothing else was written. Times as those of `run_attention`."""
    rows, heads, kv_heads, dim = case.rows, case.heads, case.kv_heads, case.head_dim
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(device, case.dtype)
    positions = torch.randint(0, 8192, (rows,), generator=generator).to(device)
    cos, sin = rope_cos_sin(positions, 1.0 / 500000.0 ** (torch.arange(0, dim, 2, device=device) / dim))
    blocks = -(-rows // BLOCK_SIZE) + 2
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:rows].to(device, torch.int32)
    caches = [
        torch.full((blocks, BLOCK_SIZE, 2, kv_heads, head_width(dim, dtype)), 127, dtype=dtype, device=device)
        for dtype in (case.dtype, torch.int8)
    ]
    want = qkv.double()
    apply_rope(want[:, : heads + kv_heads], cos, sin)
    own = qkv.clone()
    run_plain, run_coded = (
        partial(triton_rope.rope_and_write_kv, own, heads, cos, sin, cache, slots) for cache in caches
    )
    run_coded()
    for first, last, factor in zip(
        (0, heads), (heads, heads + kv_heads), transform_factors(dim), strict=True
    ):
        want[:, first:last] = hadamard(want[:, first:last]) * factor
    error = relative_error(own[:, :heads], want[:, :heads])
    written = _unpacked(caches[1]).flatten(0, 1)
    expected = want[:, heads:].view(rows, 2, kv_heads, dim)
    step = expected.abs().amax(-1, keepdim=True) / 127
    steps = float(((written[slots.long()] - expected).abs() / step).max())
    others = torch.ones(len(written), dtype=torch.bool, device=device)
    others[slots.long()] = False
    untouched = bool(written[others].isnan().all())
    most = _HALF_STEP + 127 * torch.finfo(case.dtype).eps / 2  # numbers are rounded to their dtype first
    found = {
        "case": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "error": error,
        "steps": steps,
        "ok": error <= TOLERANCE[case.dtype] and steps <= most and untouched,
    }
    if ceilings is None:
        return found
    per_row = (
        2 * case.dtype.itemsize * (heads + kv_heads) * dim
        + 2 * kv_heads * head_width(dim, torch.int8)
        + 4 * dim
    )
    return found | _times(run_plain, run_coded, rows * per_row, device, ceilings)


def in_codes(step: PagedStep) -> PagedStep:
    """The same step over a cache of codes, with the keys and values that these stand for, in float32. What the cache
    does not hold is NaN."""
    num_blocks, positions, _, kv_heads, dim = step.cache.shape
    sizes = (num_blocks, positions, 2, kv_heads, head_width(dim, torch.int8))
    cache = torch.full(sizes, 127, dtype=torch.int8, device=step.cache.device)
    for length, table, k, v in zip(step.seq_lens, step.tables, step.keys, step.values, strict=True):
        at = torch.arange(length, device=cache.device)
        slots = torch.tensor(table, device=cache.device)[at // positions] * positions + at % positions
        write_for_triton(torch.stack((k, v), 1), cache, slots)
    keys, values = (
        [from_codes(*to_codes(x), torch.float32) for x in numbers] for numbers in (step.keys, step.values)
    )
    return replace(step, cache=cache, keys=keys, values=values)


def copy_to_codes(source: KVCache, target: KVCache) -> None:
    """Write all that one pool holds into one of codes, of as many blocks."""
    device = source.tensor.device
    for index in range(len(source.tensor)):
        for blocks in range(0, source.num_blocks, _BLOCKS_AT_A_TIME):
            k, v = source.layer(index)[blocks : blocks + _BLOCKS_AT_A_TIME].flatten(0, 1).unbind(1)
            kv = torch.stack((transform_keys(k), v.float()), 1)
            first = blocks * BLOCK_SIZE
            slots = torch.arange(first, first + len(kv), device=device)
            write_for_triton(kv, target.layer(index), slots)


def _unpacked(cache: torch.Tensor) -> torch.Tensor:
    """[N, P, 2, Hkv, D] float64 of a cache of codes in Triton's order."""
    num_blocks, positions, _, kv_heads, width = cache.shape
    operands = triton_attention.cache_operands(cache)
    codes = cache.as_strided((num_blocks, positions, 2, kv_heads, width - 2), (*operands.strides, 1))
    strides = (cache.stride(0) // 2, 1, operands.scales_kind, positions)
    scales = operands.scales.as_strided((num_blocks, positions, 2, kv_heads), strides)
    return from_codes(codes, scales, torch.float64)


def _times(
    run_plain: Any, run_coded: Any, num_bytes: int, device: torch.device, ceilings: Ceilings
) -> dict[str, Any]:
    floor = ceilings.floor_ms(num_bytes)
    a_ms, b_ms = median_ms(run_plain, device), median_ms(run_coded, device)
    found: dict[str, Any] = {"bytes": num_bytes, "floor_ms": floor, "a_ms": a_ms, "b_ms": b_ms}
    if a_ms is not None and b_ms is not None:
        found |= {"a_to_b": a_ms / b_ms, "times_floor": b_ms / floor}
    return found
