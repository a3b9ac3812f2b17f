"""The gated activation in Triton: the functions of `loraplex.kernels.layers.activation`, rounded once."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def act_and_mul(gate_up: torch.Tensor, gelu: bool, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up, or gelu(gate) · up with the tanh approximation, in float32 inside. gate_up: [T, 2·I], gate
    before up, the last axis contiguous; or the gate alone, [T, I], and `up` [T, I], its last axis contiguous. Returns
    [T, I], contiguous. Raises ValueError for other shapes."""
    if gate_up.dim() != 2 or (up is None and gate_up.shape[1] % 2) or gate_up.stride(1) != 1:
        raise ValueError(f"{list(gate_up.shape)} is no [rows, gate and up] with contiguous rows")
    if up is None:
        up = gate_up[:, gate_up.shape[1] // 2 :]
    elif up.shape != gate_up.shape or up.dtype is not gate_up.dtype or up.stride(1) != 1:
        raise ValueError(f"a gate of {list(gate_up.shape)} does not fit {list(up.shape)} {up.dtype}")
    rows, inner = up.shape
    strides = gate_up.stride(0), up.stride(0)
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        gated_program[(rows, triton.cdiv(inner, _BLOCK))](
            gate_up, up, out, *strides, INNER=inner, BLOCK=_BLOCK, GELU=gelu, num_warps=4
        )
    return out


@triton.jit
def activated(gate, up, GELU: tl.constexpr):
    """f(gate) · up, in float32."""
    z = gate
    if GELU:
        # 0.5·(1 + tanh(z)) is the logistic function of 2z.
        z = 2 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-z)) * up


@triton.jit
def gated_program(
    gate_ptr, up_ptr, out_ptr, gate_row, up_row, INNER: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """out[row, c] = f(gate[row, c]) · up[row, c]. Grid: rows, columns ÷ BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < INNER
    gate = tl.load(gate_ptr + row * gate_row + c, mask=there, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * INNER + c, activated(gate, up, GELU).to(out_ptr.dtype.element_ty), mask=there)
