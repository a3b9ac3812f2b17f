"""The gated short convolution in Triton: `loraplex.kernels.layers.short_conv`, rounded where that rounds."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 512


def short_conv(
    gates: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    previous: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """See `loraplex.kernels.layers.short_conv`; but slots [T] are int32, -1 for a row that is kept nowhere, and
    previous [T, K - 1] int32 is as `loraplex.kernels.attention.previous.rows_among` has it. So one launch both keeps
    rows and reads those before them. Raises ValueError where these do not fit."""
    rows, channels = len(gates), gates.shape[1] // 3
    width, block = len(weight), cache[0, 0].numel()
    if (
        gates.shape != (rows, 3 * channels)
        or weight.shape != (width, channels)
        or previous.shape != (rows, width - 1)
        or slots.shape != (rows,)
        or block != channels
        or not cache[0, 0].is_contiguous()
        or not (gates.stride(1) == previous.stride(1) == 1 and weight.is_contiguous())
        or cache.dtype is not gates.dtype
    ):
        raise ValueError(
            f"gates {list(gates.shape)} {gates.dtype}, a weight {list(weight.shape)}, places {list(previous.shape)} "
            f"and a cache {list(cache.shape)} {cache.dtype} do not fit"
        )
    out = torch.empty(rows, channels, dtype=gates.dtype, device=gates.device)
    if rows:
        short_conv_program[(rows, triton.cdiv(channels, _BLOCK))](
            gates,
            cache,
            slots,
            previous,
            weight,
            weight if bias is None else bias,
            out,
            gates.stride(0),
            previous.stride(0),
            cache.stride(0),
            cache.stride(1),
            CHANNELS=channels,
            WIDTH=width,
            POSITIONS=cache.shape[1],
            BLOCK=_BLOCK,
            HAS_BIAS=bias is not None,
            num_warps=4,
        )
    return out


@triton.jit
def short_conv_program(
    gates_ptr,
    cache_ptr,
    slots_ptr,
    previous_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    gates_row,
    previous_row,
    cache_block,
    cache_position,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """BLOCK channels of one row. Grid: rows, channels ÷ BLOCK. A row before it that is of this step is made again, for
    another program writes it."""
    dtype = gates_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias_ptr + c, mask=there, other=0.0)
    for step in range(WIDTH - 1):
        place = tl.load(previous_ptr + row * previous_row + step).to(tl.int64)
        from_cache = cache_ptr + place // POSITIONS * cache_block + place % POSITIONS * cache_position
        cached = tl.load(from_cache + c, mask=there & (place >= 0), other=0.0)
        made = _gated(gates_ptr + (-2 - place) * gates_row, c, there & (place < -1), CHANNELS, dtype)
        before = tl.where(place >= 0, cached, made).to(tl.float32)
        total += before * tl.load(weight_ptr + step * CHANNELS + c, mask=there, other=0.0)
    kept = _gated(gates_ptr + row * gates_row, c, there, CHANNELS, dtype)
    total += kept.to(tl.float32) * tl.load(weight_ptr + (WIDTH - 1) * CHANNELS + c, mask=there, other=0.0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    to_cache = cache_ptr + slot // POSITIONS * cache_block + slot % POSITIONS * cache_position
    tl.store(to_cache + c, kept, mask=there & (slot >= 0))
    gate = tl.load(gates_ptr + row * gates_row + CHANNELS + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * CHANNELS + c, (gate * total.to(dtype).to(tl.float32)).to(dtype), mask=there)


@triton.jit
def _gated(row_ptr, c, there, CHANNELS: tl.constexpr, dtype: tl.constexpr):
    """b · x of a row, rounded; 0 where it is not `there`."""
    b = tl.load(row_ptr + c, mask=there, other=0.0).to(tl.float32)
    return (b * tl.load(row_ptr + 2 * CHANNELS + c, mask=there, other=0.0).to(tl.float32)).to(dtype)
