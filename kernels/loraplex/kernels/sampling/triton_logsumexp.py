"""log Σ exp over a vocabulary in Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
# The second half of a scratch tensor: aligned or not, by the number of rows.
_SCRATCH = ("sum_ptr",)


def log_sum_exp(x: torch.Tensor, *, tile: int = _TILE) -> torch.Tensor:
    """[L, 1] float32: log Σ_v exp(x[l, v]) for x [L, V] float32, the last axis contiguous. Not finite where the row has
    a NaN or +inf. Sums run in a fixed order. Raises ValueError for other shapes."""
    if x.dim() != 2 or x.dtype is not torch.float32 or x.stride(1) != 1 or not x.shape[1]:
        raise ValueError(f"no log-sum-exp of {list(x.shape)} {x.dtype} with strides {x.stride()}")
    rows, columns = x.shape
    splits = triton.cdiv(columns, tile)
    out = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        parts = torch.empty(2, rows, splits, dtype=torch.float32, device=x.device)
        warps = min(8, max(1, tile // 256))
        tile_sums[(splits, rows)](
            x, x.stride(0), parts[0], parts[1], COLUMNS=columns, SPLITS=splits, TILE=tile, num_warps=warps
        )
        join_sums[(rows,)](
            parts[0],
            parts[1],
            out,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=1,
        )
    return out


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compile both kernels in each form that rows of this length take: where V is no multiple of four, those that begin
    in the middle of a tensor are not aligned."""
    x = torch.zeros(2, vocab_size, device=device)
    log_sum_exp(x)
    log_sum_exp(x[1:])


@triton.jit(do_not_specialize_on_alignment=_SCRATCH)
def tile_sums(
    x_ptr, x_row, best_ptr, sum_ptr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """best and sum [rows, SPLITS]: a tile's largest number, and Σ exp(x - best). Grid: SPLITS, rows."""
    split, row = tl.program_id(0), tl.program_id(1)
    c = split * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + row.to(tl.int64) * x_row + c, mask=c < COLUMNS, other=float("-inf"))
    best = tl.max(x, 0)
    # Where all are -inf, the sum is 0 rather than NaN.
    total = tl.sum(tl.exp(x - tl.where(best > float("-inf"), best, 0.0)), 0)
    tl.store(best_ptr + row * SPLITS + split, best)
    tl.store(sum_ptr + row * SPLITS + split, total)


@triton.jit(do_not_specialize_on_alignment=_SCRATCH)
def join_sums(best_ptr, sum_ptr, out_ptr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """out [rows]. Grid: rows."""
    row = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    bests = tl.load(best_ptr + row * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    sums = tl.load(sum_ptr + row * SPLITS + s, mask=s < SPLITS, other=0.0)
    best = tl.max(bests, 0)
    shares = tl.where(sums == 0.0, 0.0, sums * tl.exp(bests - best))
    tl.store(out_ptr + row, best + tl.log(tl.sum(shares, 0)))
