"""A layer's attention: packed queries, keys and values, norms by head, rotation, the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import AttentionKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.recorded_layers import CosSin

QueryScaling = tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]
"""Factors by row and the cache that is not written, as `AdaptedLinears.scale_queries` takes them."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`qkv` has no values where they are the keys, and queries alone where the keys are another layer's. The norms are
    [D], of all heads where the kind has wide ones, None where it has none; that of values is of ones. `sinks` [Hq] are
    float32."""

    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    v_norm: torch.Tensor | None
    gate: Linear | None
    sinks: torch.Tensor | None
    o: Linear


def attention_groups(kind: AttentionKind, hidden: int) -> tuple[SiteGroup, ...]:
    """Queries, keys and values, the gate of each head where there is one, and the output."""
    query, kv = kind.num_heads * kind.cache.head_dim, kind.cache.kv_heads * kind.cache.head_dim
    kinds = 1 if kind.cache.shares is not None else 2 if kind.values_are_keys else 3
    sizes = query * (1 + kind.output_gate), kv, kv
    qkv = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj")[:kinds], hidden, sizes[:kinds])
    if kind.packed:
        qkv = SiteGroup("qkv", ("qkv_proj",), hidden, (query + 2 * kv,))
    gate = (SiteGroup("g", ("g_proj",), hidden, (kind.num_heads,)),) if kind.head_gate else ()
    return qkv, *gate, SiteGroup("o", (kind.out,), query, (hidden,))


def read_attention(
    kind: AttentionKind, tensors: LayerTensors, prefix: str, layer: int, qkv: SiteGroup, *others: SiteGroup
) -> AttentionWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    norm, head_dim, own = kind.head_norm, kind.cache.head_dim, kind.cache.shares is None
    q_heads, k_heads = (kind.num_heads, kind.cache.kv_heads) if kind.wide_norm else (1, 1)
    *gate, o = others
    return AttentionWeights(
        qkv=tensors.linear(prefix, layer, qkv, kind.qkv_bias),
        q_norm=tensors.norm(f"{prefix}q_{norm}", q_heads * head_dim) if kind.qk_norm else None,
        k_norm=tensors.norm(f"{prefix}k_{norm}", k_heads * head_dim) if kind.qk_norm and own else None,
        v_norm=tensors.unit_norm(head_dim) if kind.v_norm and own else None,
        gate=tensors.linear(prefix, layer, gate[0], False) if gate else None,
        sinks=tensors.tensor(f"{prefix}sinks", kind.num_heads, dtype=torch.float32) if kind.sinks else None,
        o=tensors.linear(prefix, layer, o, kind.o_bias),
    )


def attend(
    kind: AttentionKind,
    weights: AttentionWeights,
    x: torch.Tensor,
    cos_sin: Sequence[CosSin],
    batch: ForwardBatch,
    linears: AdaptedLinears,
    kernel: AttentionKernel,
    scaling: QueryScaling | None,
) -> torch.Tensor:
    """[T, C] → [T, Hq·D], before the output's linear. The layer's cache has the keys and values of this step
    afterwards. `cos_sin`: of each rotation."""
    cache = batch.kv.layer(weights.qkv.layer)
    queries = linears.apply_and_rotate(
        weights.qkv,
        x,
        batch,
        cache,
        kind.num_heads,
        cos_sin[kind.rope],
        weights.q_norm,
        weights.k_norm,
        weights.v_norm,
        kind.output_gate,
    )
    gates = queries[:, 1::2] if kind.output_gate else None
    if gates is not None:
        queries = queries[:, ::2]
    attention = batch.attention_of(weights.qkv.layer)
    if scaling is not None:
        linears.scale_queries(queries, *scaling, attention)
    out = kernel.run(
        queries,
        cache,
        attention,
        scale=kind.scale,
        window=kind.cache.window,
        softcap=kind.softcap,
        sinks=weights.sinks,
    )
    if weights.gate is not None:
        out = out * linears.apply(weights.gate, x, batch).sigmoid()[:, :, None]
    if gates is not None:
        return linears.recurrent.output_gate(out, gates)
    return out.view(x.shape[0], kind.num_heads * kind.cache.head_dim)
