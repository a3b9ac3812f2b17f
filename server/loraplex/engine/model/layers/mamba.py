"""A layer's Mamba-2: one linear to all that it computes with, a convolution, the rule, a gate and a norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import MambaKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.padded_heads import pad_values, padded_size, without_padding
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.recorded_layers import CosSin
from loraplex.kernels.recurrent.types import RecurrentHeads, recurrent_bytes


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """`conv` [W, C], its `bias` [C] and what is by head [H] are float32, of numbers in the model's dtype."""

    given: Linear
    """To the gate [H·P], to values [H·P], keys and queries [G·N] of the convolution, and to the steps [H]."""
    conv: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    """[H·P]; of several groups [G, H·P/G]: each is normed by itself."""
    o: Linear


def mamba_groups(kind: MambaKind, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    inner = kind.num_heads * kind.head_dim
    given = inner + _channels(kind) + kind.num_heads
    return (
        SiteGroup("mamba_in", ("in_proj",), hidden, (given,)),
        SiteGroup("mamba_out", ("out_proj",), inner, (hidden,)),
    )


def mamba_cache(kind: MambaKind, dtype: torch.dtype) -> CacheKind:
    """The state, and behind it the window."""
    state, window = recurrent_bytes(_heads(kind), dtype)
    return replace(kind.cache, state_bytes=state, window_bytes=window)


def read_mamba(
    kind: MambaKind, tensors: LayerTensors, prefix: str, layer: int, given: SiteGroup, o: SiteGroup
) -> MambaWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    channels, norm = _channels(kind), tensors.tensor(f"{prefix}norm.weight", o.in_features)
    conv = tensors.tensor(f"{prefix}conv1d.weight", channels, 1, kind.width)[:, 0].T.float()
    bias = tensors.tensor(f"{prefix}conv1d.bias", channels).float() if kind.conv_bias else None
    return MambaWeights(
        given=tensors.linear(prefix, layer, given, kind.bias),
        conv=_pad(kind, conv).contiguous(),
        bias=None if bias is None else _pad(kind, bias),
        a_log=tensors.tensor(f"{prefix}A_log", kind.num_heads).float(),
        dt_bias=tensors.tensor(f"{prefix}dt_bias", kind.num_heads).float(),
        skip=tensors.tensor(f"{prefix}D", kind.num_heads).float(),
        norm=norm if kind.num_groups == 1 else norm.view(kind.num_groups, -1),
        o=tensors.linear(prefix, layer, o, kind.bias),
    )


def run_mamba(
    kind: MambaKind,
    weights: MambaWeights,
    x: torch.Tensor,
    cos_sin: Sequence[CosSin],
    batch: ForwardBatch,
    linears: AdaptedLinears,
    kernel: AttentionKernel,
    scaling: object,
) -> torch.Tensor:
    """[T, C] → [T, H·P], before the output's linear. The layer's state and window have this step's rows afterwards.
    Nothing is rotated."""
    assert batch.recurrent is not None
    heads, layer, ops = _heads(kind), weights.given.layer, linears.recurrent
    memory = batch.kv.recurrent(layer, heads, x.dtype)
    y = linears.apply(weights.given, x, batch)
    inner = kind.num_heads * kind.head_dim
    end = inner + _channels(kind)
    gate, xbc, dt = y[:, :inner], y[:, inner:end], y[:, end:]
    mixed = ops.convolve(_pad(kind, xbc), weights.conv, batch.recurrent, memory, weights.bias)
    step, decay = ops.step_gates(dt, weights.a_log, weights.dt_bias, *kind.steps)
    out = ops.state_rule(mixed, decay, step, weights.skip, batch.recurrent, memory, heads)
    out = without_padding(out, kind.num_heads, kind.head_dim)
    return linears.rms_norm(linears.act_and_mul(gate, False, out), weights.norm)


def _heads(kind: MambaKind) -> RecurrentHeads:
    return RecurrentHeads(
        kind.num_groups, kind.num_heads, kind.state_dim, padded_size(kind.head_dim), kind.width
    )


def _channels(kind: MambaKind) -> int:
    """Those of the checkpoint's convolution."""
    return kind.num_heads * kind.head_dim + 2 * kind.num_groups * kind.state_dim


def _pad(kind: MambaKind, x: torch.Tensor) -> torch.Tensor:
    return pad_values(x, 0, kind.num_heads, kind.head_dim)
