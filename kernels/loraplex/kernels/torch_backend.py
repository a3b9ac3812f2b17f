"""torch's own operations: they run on any device, and are the reference of the others."""

from __future__ import annotations

from typing import Any

import torch

from loraplex.kernels.attention import kv_codes, torch_attention
from loraplex.kernels.attention.choice import AttentionChoice, AttentionUnavailable, check_name, reason_for
from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.types import AttentionBatch
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.experts import torch_experts
from loraplex.kernels.experts.torch_expert_lora import TorchExpertLoraPass
from loraplex.kernels.layers import activation, norm, rope
from loraplex.kernels.linear import dense, groups
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.lora.reference import TorchLoraPass
from loraplex.kernels.ops import Ops
from loraplex.kernels.recurrent import torch_recurrent
from loraplex.kernels.weight_form import WeightForm

_CPU = torch.device("cpu")


def torch_kernels(device: torch.device, *, batch_invariant: bool) -> Kernels:
    """`batch_invariant` changes nothing: torch chooses the order of its sums by the other rows of a step."""

    def choose_attention(choice: str, needs: AttentionNeeds, dtype: torch.dtype) -> AttentionChoice:
        check_name(choice)
        if choice == "triton":
            raise AttentionUnavailable("it runs beside Triton's kernels, and torch's are used; choose auto")
        shape = needs.shape
        kernel = torch_attention.TorchAttention(shape.num_kv_heads, shape.head_dim, dtype, device)
        return AttentionChoice(kernel, reason_for(choice, "torch"))

    return Kernels(
        backend="torch",
        device=device,
        batch_invariant=batch_invariant,
        ops=torch_ops(device),
        choose_attention=choose_attention,
        lora_pass=TorchLoraPass,
        expert_lora_pass=TorchExpertLoraPass,
        obstacle_to_same_bits=lambda dtype, invariant: (
            "torch's kernels choose the order of their sums by the other rows of a step"
        ),
        multiplies=lambda dtype: dense.multiplies(dtype, device),
    )


def torch_ops(device: torch.device = _CPU) -> Ops:
    def pack(weight: Any, form: WeightForm, dtype: torch.dtype) -> PackedLinear:
        if form.codes == "floats":
            return dense.pack_weight(weight)
        return groups.ReferenceGroups(weight.shape, dtype, weight.map(lambda part: part.to(device)))

    return Ops(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        add=torch.Tensor.add_,
        act_and_mul=activation.act_and_mul,
        rotate_and_write=_rotate_and_write,
        pack=pack,
        to_float32=torch.Tensor.float,
        recurrent=torch_recurrent.recurrent_ops(),
        experts=torch_experts.expert_ops(pack),
    )


def _rotate_and_write(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    v_norm: torch.Tensor | None = None,
    gated: bool = False,
) -> None:
    num_kv_heads, before = cache.shape[3], num_heads * (1 + gated)
    q, k, v = heads.tensor_split((before, before + num_kv_heads), 1)
    if gated:
        q = q[:, ::2]
    if k.shape[1] and not v.shape[1]:
        v = k.clone()
    for part, weight in ((q, q_norm), (k, k_norm), (v, v_norm)):
        if weight is not None and part.shape[1]:
            part.copy_(norm.rms_norm(part, weight, eps))
    # q and k lie side by side where no gates lie between them: one rotation for both.
    for part in (q, k) if gated else (heads[:, : num_heads + num_kv_heads],):
        rope.apply_rope(part, cos, sin)
    if cache.dtype is torch.int8:
        q.copy_(kv_codes.transform_queries(q))
        k, v = kv_codes.transform_keys(k), v.float()
    if k.shape[1]:
        torch_attention.write_kv(torch.stack((k, v), 1), cache, batch)
