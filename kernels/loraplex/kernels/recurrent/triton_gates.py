"""The gates and the gated norm around the rules in Triton: the functions of
`loraplex.kernels.recurrent.torch_recurrent`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _GATES = 1024, 128
"""Columns of a program, and gates of one."""
_HEADS = 8
"""Heads of a program."""


def delta_gates(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises ValueError where they do not fit."""
    rows, heads = b.shape
    if a.shape != b.shape or a.dtype is not b.dtype or a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"gates {list(a.shape)} {a.dtype} do not fit {list(b.shape)} {b.dtype}")
    if any(each.shape != (heads,) or each.dtype is not torch.float32 for each in (a_log, dt_bias)):
        raise ValueError(f"a_log and dt_bias must be [{heads}] float32")
    beta, decay = torch.empty(2, rows, heads, device=b.device).unbind()
    if rows:
        gates_program[(triton.cdiv(rows * heads, _GATES),)](
            b, a, a_log, dt_bias, beta, decay, rows * heads, b.stride(0), a.stride(0), scale,
            HEADS=heads, BLOCK=_GATES, num_warps=4,
        )  # fmt: skip
    return beta, decay


@triton.jit(do_not_specialize=["count"])
def gates_program(
    b_ptr,
    a_ptr,
    a_log_ptr,
    dt_bias_ptr,
    beta_ptr,
    decay_ptr,
    count,
    b_row,
    a_row,
    scale,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In float64: there are few, and a decay's digits stay in the state. Grid: rows · HEADS ÷ BLOCK."""
    dtype = b_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    row = (at // HEADS).to(tl.int64)
    head = at % HEADS
    x = tl.load(b_ptr + row * b_row + head, mask=there, other=0.0).to(tl.float64)
    gate = (1 / (1 + tl.exp(-x))).to(tl.float32).to(dtype).to(tl.float32)
    tl.store(beta_ptr + at, (gate * scale).to(dtype).to(tl.float32), mask=there)
    own = tl.load(a_ptr + row * a_row + head, mask=there, other=0.0).to(tl.float32)
    x = (own + tl.load(dt_bias_ptr + head, mask=there, other=0.0)).to(tl.float64)
    soft = tl.where(x > 20.0, x, tl.log(1 + tl.exp(x)))
    rate = tl.exp(tl.load(a_log_ptr + head, mask=there, other=0.0).to(tl.float64))
    tl.store(decay_ptr + at, tl.exp(-rate * soft).to(tl.float32), mask=there)


def step_gates(
    dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises ValueError where they do not fit."""
    rows, heads = dt.shape
    if dt.stride(1) != 1 or any(
        each.shape != (heads,) or each.dtype is not torch.float32 for each in (a_log, dt_bias)
    ):
        raise ValueError(f"a_log and dt_bias must be [{heads}] float32, as dt has {heads} heads in its rows")
    step, decay = torch.empty(2, rows, heads, device=dt.device).unbind()
    if rows:
        steps_program[(triton.cdiv(rows * heads, _GATES),)](
            dt, a_log, dt_bias, step, decay, rows * heads, dt.stride(0), low, high,
            HEADS=heads, BLOCK=_GATES, num_warps=4,
        )  # fmt: skip
    return step, decay


@triton.jit(do_not_specialize=["count"])
def steps_program(
    dt_ptr,
    a_log_ptr,
    dt_bias_ptr,
    step_ptr,
    decay_ptr,
    count,
    dt_row,
    low,
    high,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """In float64, like `gates_program`. Grid: rows · HEADS ÷ BLOCK."""
    dtype = dt_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    head = at % HEADS
    own = tl.load(dt_ptr + (at // HEADS).to(tl.int64) * dt_row + head, mask=there, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head, mask=there, other=0.0).to(dtype).to(tl.float32)
    x = (own + bias).to(dtype).to(tl.float64)
    # The quotient takes off what the sum lost: a step may be far below 1.
    grown = tl.exp(x)
    whole = 1 + grown
    soft = tl.where(whole == 1, grown, tl.log(whole) * (grown / (whole - 1)))
    step = tl.where(x > 20.0, x, soft).to(tl.float32).to(dtype).to(tl.float32)
    step = tl.where(step < low, low, tl.where(step > high, high, step))
    tl.store(step_ptr + at, step, mask=there)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=there, other=0.0).to(tl.float64))
    tl.store(decay_ptr + at, tl.exp(-rate * step.to(tl.float64)).to(tl.float32), mask=there)


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Raises ValueError where they do not fit."""
    rows, columns = o.shape
    dim = len(weight)
    if (
        o.shape != z.shape
        or columns % dim
        or not o.dtype is z.dtype is weight.dtype
        or z.stride(1) != 1
        or not o.is_contiguous()
    ):
        raise ValueError(
            f"rows {list(o.shape)} {o.dtype}, a gate {list(z.shape)} {z.dtype} and a weight {list(weight.shape)} "
            f"{weight.dtype} do not fit"
        )
    out = torch.empty(rows, columns, dtype=o.dtype, device=o.device)
    if rows:
        heads = columns // dim
        gated_norm_program[(rows, triton.cdiv(heads, _HEADS))](
            o, z, weight, out, z.stride(0), eps,
            HEADS=heads, DIM=dim, BLOCK_HEADS=_HEADS, BLOCK=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def gated_norm_program(
    o_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    z_row,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_HEADS heads of a row. Grid: rows, heads ÷ BLOCK_HEADS."""
    dtype = o_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    there = (head < HEADS) & (d < DIM)
    at = head * DIM + d
    x = tl.load(o_ptr + row * HEADS * DIM + at, mask=there, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    gate = tl.load(z_ptr + row * z_row + at, mask=there, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]).to(dtype).to(tl.float32)
    weighted = (normed * weight).to(dtype).to(tl.float32)
    gated = weighted * (gate / (1 + tl.exp(-gate)))
    tl.store(out_ptr + row * HEADS * DIM + at, gated.to(dtype), mask=there)


def output_gate(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Raises ValueError where they do not fit."""
    rows, heads, dim = attended.shape
    if (
        attended.shape != gate.shape
        or attended.dtype is not gate.dtype
        or gate.stride(2) != 1
        or not attended.is_contiguous()
    ):
        raise ValueError(f"a gate {list(gate.shape)} {gate.dtype} does not fit heads {list(attended.shape)}")
    out = torch.empty(rows, heads * dim, dtype=attended.dtype, device=attended.device)
    if rows:
        output_gate_program[(rows, triton.cdiv(heads * dim, _BLOCK))](
            attended, gate, out, gate.stride(0), gate.stride(1),
            DIM=dim, COLUMNS=heads * dim, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def output_gate_program(
    attended_ptr,
    gate_ptr,
    out_ptr,
    gate_row,
    gate_head,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of a row. Grid: rows, columns ÷ BLOCK."""
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < COLUMNS
    x = tl.load(attended_ptr + row * COLUMNS + at, mask=there, other=0.0).to(tl.float32)
    own = gate_ptr + row * gate_row + at // DIM * gate_head + at % DIM
    gate = tl.load(own, mask=there, other=0.0).to(tl.float32)
    opened = (1 / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + at, (x * opened).to(dtype), mask=there)
