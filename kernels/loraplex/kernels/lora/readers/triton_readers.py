"""Batched LoRA whose B side is computed by what reads it: a launch, a read and a write of y less for each.

    expand(qkv)      → norms, RoPE and KV write        `expand_rotary`: by pieces, as `expand`
    expand(gate_up)  → SiLU·mul or GELU·mul            `expand_gated`: by pieces too
    expand(o, down)  → residual addition → RMSNorm     `expand_norm`: by rows, as a norm needs whole ones

Rows of the base go through the same launch. What is read is what `expand` would have written, rounded to y's dtype, so
that heads and activations have its bits. Norms sum a row's ranks without tensor cores, whatever the rows of its piece:
before the rounding they differ from `expand` by the order of float32 sums where a piece has more than ROW_ROWS rows.

For recorded passes: their lists name the rows (`loraplex.kernels.lora.triton_plan`).
"""

from __future__ import annotations

import torch
import triton

from loraplex.kernels.layers.triton_rope import check_heads
from loraplex.kernels.lora.readers.triton_add_norm import expand_norm
from loraplex.kernels.lora.readers.triton_gated import expand_gated
from loraplex.kernels.lora.readers.triton_rotary import expand_rotary
from loraplex.kernels.lora.triton_lora import LoraLauncher

_BASE_HEADS = 8
"""Heads a program computes of a row that no adapter changes."""
_BASE_COLUMNS = 1024
_MAX_WARPS = 16
_WARP_COLUMNS = 256
_MAX_NORM_COLUMNS = 4096
"""A program holds a row, and 16 ranks of B beside it: of wider rows they do not fit its registers."""


class FusedReaders:
    """The adapters of one step in place of `LoraPass.apply` and the operation behind it. y is what the base's linear
    returned for x. `launcher`: of a recorded pass; its tiling says what is computed here. False or None: it is not."""

    def __init__(self, launcher: LoraLauncher) -> None:
        self._launcher = launcher

    def rotary(
        self,
        layer: int,
        group: str,
        x: torch.Tensor,
        y: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> bool:
        """Compute `Ops.rotate_and_write` of a group of Q, K and V, or one site for the three. y [T, (Hq + 2·Hkv)·D]:
        its queries are changed in place. slots [T]: of the batch's attention. False also for heads that are wider than
        what a program computes, and for a cache of codes: a program has no registers for what those take. Raises
        ValueError where the shapes are not the group's, or not those of `loraplex.kernels.layers.triton_rope`."""
        tiling = self._launcher.tiling
        num_kv_heads, head_dim, half = cache.shape[3], cache.shape[4], cos.shape[-1]
        block_half, rest = triton.next_power_of_2(half), head_dim - 2 * half
        block_rest = triton.next_power_of_2(rest) if rest > 0 else 0
        heads = self._columns(y) // (2 * block_half + block_rest)
        if not tiling.fuse_rotary or not heads or cache.dtype is torch.int8:
            return False
        plan, operands, constants = self._launcher.reader_operands(layer, group, y)
        all_heads = num_heads + 2 * num_kv_heads
        if y.shape[1] != all_heads * head_dim:
            raise ValueError(f"{y.shape[1]} columns are not {all_heads} heads of {head_dim}")
        check_heads(
            y.view(y.shape[0], all_heads, head_dim), num_heads, cos, sin, cache, slots, q_norm, k_norm
        )
        self._launcher.shrink(layer, group, x)
        items = y.shape[0] * (triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads))
        block, position, kind, head, _ = cache.stride()
        expand_rotary[(min(self._launcher.expand_programs, items),)](
            y,
            y.stride(0),
            cos,
            sin,
            cache,
            slots,
            y if q_norm is None else q_norm,
            y if k_norm is None else k_norm,
            eps,
            block,
            position,
            kind,
            head,
            *operands,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            BLOCK_HALF=block_half,
            BLOCK_REST=block_rest,
            BLOCK_SIZE=cache.shape[1],
            NORM=q_norm is not None,
            SPLIT_SITES=len(plan.group.sites) == 3,
            **constants,
            BLOCK_M=tiling.small_rows,
            HEADS=heads,
            BASE_HEADS=_BASE_HEADS,
            BY_ROWS=tiling.expand_by_rows and not tiling.batch_invariant,
            num_warps=tiling.small_warps,
            num_stages=tiling.small_stages,
            maxnreg=tiling.expand_registers,
        )
        return True

    def gated(
        self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, *, gelu: bool
    ) -> torch.Tensor | None:
        """Compute `Ops.act_and_mul` of a group of gate and up, or one site for both: y
        [T, 2·I] → [T, I]. Raises ValueError where the shapes are not the group's."""
        tiling = self._launcher.tiling
        if not tiling.fuse_gated:
            return None
        plan, operands, constants = self._launcher.reader_operands(layer, group, y)
        self._launcher.shrink(layer, group, x)
        rows, inner = y.shape[0], y.shape[1] // 2
        out = torch.empty(rows, inner, dtype=y.dtype, device=y.device)
        block_n = self._columns(y) // 2
        items = rows * triton.cdiv(inner, min(block_n, _BASE_COLUMNS))
        expand_gated[(min(self._launcher.expand_programs, items),)](
            y,
            y.stride(0),
            out,
            *operands,
            INNER=inner,
            SPLIT_SITES=len(plan.group.sites) == 2,
            GELU=gelu,
            **constants,
            BLOCK_M=tiling.small_rows,
            BLOCK_N=block_n,
            BASE_N=_BASE_COLUMNS,
            BY_ROWS=tiling.expand_by_rows and not tiling.batch_invariant,
            num_warps=tiling.small_warps,
            num_stages=tiling.small_stages,
            maxnreg=tiling.expand_registers,
        )
        return out

    def norm(
        self,
        layer: int,
        group: str,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Compute `Ops.add_rms_norm` of a group of one site, or `Ops.rms_norm` without a residual: [T, C]. Raises
        ValueError where the shapes are not the group's, or do not fit each other."""
        tiling = self._launcher.tiling
        rows, columns = y.shape
        if rows > tiling.fuse_norm_rows or columns > _MAX_NORM_COLUMNS:
            return None
        if weight.shape != (columns,) or (residual is not None and residual.shape != y.shape):
            raise ValueError(f"no norm of {list(y.shape)} with a weight of {list(weight.shape)}")
        _, operands, constants = self._launcher.reader_operands(layer, group, y)
        self._launcher.shrink(layer, group, x)
        out = torch.empty(rows, columns, dtype=y.dtype, device=y.device)
        block = triton.next_power_of_2(columns)
        expand_norm[(rows,)](
            y,
            y.stride(0),
            y if residual is None else residual,
            0 if residual is None else residual.stride(0),
            out,
            weight,
            eps,
            *operands,
            COLUMNS=columns,
            ADD=residual is not None,
            **constants,
            BLOCK=block,
            num_warps=min(_MAX_WARPS, max(1, block // _WARP_COLUMNS)),
        )
        return out

    def _columns(self, y: torch.Tensor) -> int:
        """How many columns of y a program computes. Products of other numbers than bfloat16 take twice the registers
        and more."""
        return self._launcher.tiling.block_n // (1 if y.dtype is torch.bfloat16 else 2)
