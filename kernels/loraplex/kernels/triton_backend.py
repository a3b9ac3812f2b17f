"""Triton's kernels, for GPUs. Import this where they run: Triton need not be there elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from loraplex.kernels.attention import triton_attention
from loraplex.kernels.attention.choice import AttentionChoice, AttentionUnavailable, check_name
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.torch_prompts import TorchPrompts, obstacle_to_torch
from loraplex.kernels.attention.triton_kernel import TritonAttention
from loraplex.kernels.bundle import FourBits, Kernels
from loraplex.kernels.experts.triton_linears import triton_expert_ops
from loraplex.kernels.layers import triton_activation, triton_norm, triton_rope, triton_short_conv
from loraplex.kernels.linear import (
    dense,
    humming,
    scaled_mm,
    triton_dense,
    triton_fp8,
    triton_groups,
    triton_nibbles,
)
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.ops import Ops
from loraplex.kernels.recurrent import torch_recurrent, triton_convolve, triton_gates, triton_rule
from loraplex.kernels.recurrent.kernel import RecurrentOps
from loraplex.kernels.weight_form import WeightForm


def triton_kernels(device: torch.device, *, batch_invariant: bool) -> Kernels:
    """`batch_invariant`: those whose rows have the same bits in every step (ADR 0040)."""

    def choose_attention(choice: str, needs: AttentionNeeds, dtype: torch.dtype) -> AttentionChoice:
        return _choose_attention(choice, needs, dtype, device, batch_invariant=batch_invariant)

    def choose_four_bits(group: int, dtype: torch.dtype) -> FourBits:
        obstacle = humming.obstacle_to(device, batch_invariant=batch_invariant)
        obstacle = obstacle or humming.obstacle_to_group(group, dtype)
        if obstacle is not None:
            return FourBits("", obstacle)
        return FourBits(humming.NAME, "it is installed")

    return Kernels(
        backend="triton",
        device=device,
        batch_invariant=batch_invariant,
        ops=triton_ops(device=device, batch_invariant=batch_invariant),
        choose_attention=choose_attention,
        lora_pass=None,
        obstacle_to_same_bits=lambda dtype, invariant: None if invariant else "--batch-invariant is off",
        multiplies=lambda dtype: True,
        choose_four_bits=choose_four_bits,
    )


def triton_ops(*, device: torch.device, batch_invariant: bool = False) -> Ops:
    by_library = humming.obstacle_to(device, batch_invariant=batch_invariant) is None

    def pack(weight: Any, form: WeightForm, dtype: torch.dtype) -> PackedLinear:
        if form.codes == "floats":
            return triton_dense.pack_weight(weight) if batch_invariant else dense.pack_weight(weight)
        if form.codes == "float8":
            floats = triton_fp8.pack_floats(weight, dtype, device=device)
            return floats if batch_invariant else scaled_mm.prefer_library(floats)
        found = humming.pack_codes(weight, dtype, device=device) if by_library else None
        return found or pack_groups(weight, dtype, device=device)

    return Ops(
        rms_norm=triton_norm.rms_norm,
        add_rms_norm=triton_norm.add_rms_norm,
        add=torch.Tensor.add_,
        act_and_mul=triton_activation.act_and_mul,
        rotate_and_write=_rotate_and_write,
        pack=pack,
        to_float32=torch.Tensor.float,
        recurrent=RecurrentOps(
            convolve=triton_convolve.convolve,
            delta_gates=triton_gates.delta_gates,
            rule=triton_rule.rule,
            gated_norm=triton_gates.gated_norm,
            output_gate=triton_gates.output_gate,
            by_part=torch_recurrent.by_part,
            step_gates=triton_gates.step_gates,
        ),
        experts=triton_expert_ops(pack, batch_invariant=batch_invariant),
        short_conv=triton_short_conv.short_conv,
    )


def pack_groups(weight: GroupedWeight, dtype: torch.dtype, *, device: torch.device) -> PackedLinear:
    """The weight for Triton's kernels: two codes in a byte where they fit, else one."""
    packed = triton_nibbles.pack_nibbles(weight, dtype, device=device)
    return packed or triton_groups.pack_groups(weight, dtype, device=device)


def _rotate_and_write(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    batch: triton_attention.TritonAttentionBatch,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    v_norm: torch.Tensor | None = None,
    gated: bool = False,
) -> None:
    norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm, "eps": eps}
    triton_rope.rope_and_write_kv(heads, num_heads, cos, sin, cache, batch.slots, **norms, gated=gated)


def _choose_attention(
    choice: str, needs: AttentionNeeds, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> AttentionChoice:
    check_name(choice)
    obstacle = obstacle_to_torch(needs, dtype, device, batch_invariant=batch_invariant)
    if choice == "torch":
        if obstacle is not None:
            raise AttentionUnavailable(f"{obstacle}; choose auto or triton")
        return AttentionChoice(TorchPrompts(needs, dtype, device), "as was asked for")
    kernel = TritonAttention(needs, dtype, device, batch_invariant=batch_invariant)
    other = "--attention torch would run too" if obstacle is None else f"torch: {obstacle}"
    return AttentionChoice(kernel, "as was asked for" if choice == "triton" else f"the default; {other}")
