"""A layer's gated delta net: a convolution over queries, keys and values, the rule with its state, and a gated norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ForwardBatch, ModelUnsupported
from loraplex.engine.model.layer_kinds import DeltaKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.padded_heads import pad_values, padded_size, without_padding
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.recorded_layers import CosSin
from loraplex.kernels.recurrent.types import RecurrentHeads, recurrent_bytes


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """`conv` [W, channels], `a_log` and `dt_bias` [Hv] are float32, of numbers in the model's dtype."""

    given: Linear
    """To queries, keys, values and the norm's gate."""
    gates: Linear
    """To the two gates of each value head."""
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    """[Dv], without an offset."""
    o: Linear


def delta_groups(kind: DeltaKind, hidden: int) -> tuple[SiteGroup, SiteGroup, SiteGroup]:
    keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
    sizes = {
        1: (2 * keys + 2 * values,),
        2: (2 * keys + values, values),
        4: (keys, keys, values, values),
    }[len(kind.sites)]
    gates = (2 * kind.value_heads // len(kind.gates),) * len(kind.gates)
    return (
        SiteGroup("delta_in", kind.sites, hidden, sizes),
        SiteGroup("delta_gates", kind.gates, hidden, gates),
        SiteGroup("delta_out", (kind.out,), values, (hidden,)),
    )


def delta_cache(kind: DeltaKind, dtype: torch.dtype) -> CacheKind:
    """The state, and behind it the window."""
    state, window = recurrent_bytes(_heads(kind), dtype)
    return replace(kind.cache, state_bytes=state, window_bytes=window)


def read_delta(
    kind: DeltaKind,
    tensors: LayerTensors,
    prefix: str,
    layer: int,
    given: SiteGroup,
    gates: SiteGroup,
    o: SiteGroup,
) -> DeltaWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    return DeltaWeights(
        given=tensors.linear(prefix, layer, given, bias=False),
        gates=tensors.linear(prefix, layer, gates, bias=False),
        conv=_pad(kind, _convolution(kind, tensors, prefix)[:, 0].T.float()).contiguous(),
        # In the model's dtype first, as transformers loads them.
        a_log=tensors.tensor(f"{prefix}A_log", kind.value_heads).float(),
        dt_bias=tensors.tensor(f"{prefix}dt_bias", kind.value_heads).float(),
        norm=tensors.tensor(f"{prefix}{kind.norm}.weight", kind.value_dim),
        o=tensors.linear(prefix, layer, o, bias=False),
    )


def _convolution(kind: DeltaKind, tensors: LayerTensors, prefix: str) -> torch.Tensor:
    """[C, 1, W]. Of OLMo Hybrid it is stored in three parts: those of queries, keys and values, or, as transformers
    saves it, thirds of all channels."""
    channels, names = _channels(kind), [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
    if len(kind.sites) < 4 or names[0] not in tensors:
        return tensors.tensor(f"{prefix}conv1d.weight", channels, 1, kind.width)
    keys, third = kind.key_heads * kind.key_dim, -(-channels // 3)

    def read(size: int) -> torch.Tensor:
        sizes = size, size, channels - 2 * size
        return torch.cat(
            [tensors.tensor(name, rows, 1, kind.width) for name, rows in zip(names, sizes, strict=True)]
        )

    try:
        return read(keys)
    except ModelUnsupported:
        return read(third)


def run_delta(
    kind: DeltaKind,
    weights: DeltaWeights,
    x: torch.Tensor,
    cos_sin: Sequence[CosSin],
    batch: ForwardBatch,
    linears: AdaptedLinears,
    kernel: AttentionKernel,
    scaling: object,
) -> torch.Tensor:
    """[T, C] → [T, Hv·Dv], before the output's linear. The layer's state and window have this step's rows afterwards.
    Nothing is rotated."""
    assert batch.recurrent is not None
    heads, layer, ops = _heads(kind), weights.given.layer, linears.recurrent
    memory = batch.kv.recurrent(layer, heads, x.dtype)
    y = linears.apply(weights.given, x, batch)
    gates = linears.apply(weights.gates, x, batch)
    if len(kind.sites) == 1:
        each, heads_in = kind.value_heads // kind.key_heads, kind.key_heads
        values = each * kind.value_dim
        y = ops.by_part(y, heads_in, (kind.key_dim, kind.key_dim, values, values))
        gates = ops.by_part(gates, heads_in, (each, each))
    channels = _channels(kind)
    mixed = ops.convolve(_pad(kind, y[:, :channels]), weights.conv, batch.recurrent, memory)
    beta, decay = ops.delta_gates(
        gates[:, : kind.value_heads],
        gates[:, kind.value_heads :],
        weights.a_log,
        weights.dt_bias,
        kind.beta_scale,
    )
    out = ops.delta_rule(mixed, decay, beta, batch.recurrent, memory, heads)
    out = without_padding(out, kind.value_heads, kind.value_dim)
    return ops.gated_norm(out, y[:, channels:], weights.norm, kind.norm_eps or linears.eps)


def _heads(kind: DeltaKind) -> RecurrentHeads:
    return RecurrentHeads(
        kind.key_heads, kind.value_heads, kind.key_dim, padded_size(kind.value_dim), kind.width
    )


def _channels(kind: DeltaKind) -> int:
    """Those of the checkpoint's convolution."""
    return 2 * kind.key_heads * kind.key_dim + kind.value_heads * kind.value_dim


def _pad(kind: DeltaKind, x: torch.Tensor) -> torch.Tensor:
    return pad_values(x, 2 * kind.key_heads * kind.key_dim, kind.value_heads, kind.value_dim)
