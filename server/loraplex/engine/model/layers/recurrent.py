"""Mixers with a state, a gated delta net and Mamba-2: linears, a convolution, the rule, and a norm with a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import DeltaKind, MambaKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.padded_heads import pad_values, padded_size, without_padding
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.recorded_layers import CosSin
from loraplex.kernels.recurrent.types import RecurrentHeads, recurrent_bytes

RecurrentKind = DeltaKind | MambaKind


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The weights of a mixer. `conv`, `bias` and those by value head [Hv] are float32, of numbers in the model's dtype;
    what belongs to one of the two mixers is None for the other."""

    given: Linear
    """To queries, keys, values and the norm's gate; of Mamba-2 to the gate [H·P], to values [H·P], keys and queries
    [G·N] of the convolution, and to the steps [H]."""
    gates: Linear | None
    """To the two gates of each value head, in a delta net."""
    conv: torch.Tensor
    """[W, C]"""
    bias: torch.Tensor | None
    """The convolution's, [C], of Mamba-2."""
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor | None
    """Mamba-2's."""
    norm: torch.Tensor
    """[Dv] without an offset; of Mamba-2 [H·P], or of several groups, each normed by itself, [G, H·P/G]."""
    o: Linear


def recurrent_cache(kind: RecurrentKind, dtype: torch.dtype) -> CacheKind:
    """The state, and behind it the window."""
    state, window = recurrent_bytes(_heads(kind), dtype)
    return replace(kind.cache, state_bytes=state, window_bytes=window)


def run_recurrent(
    kind: RecurrentKind,
    weights: RecurrentWeights,
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
    rows, heads, ops = batch.recurrent, _heads(kind), linears.recurrent
    memory = batch.kv.recurrent(weights.given.layer, heads, x.dtype)
    y, channels = linears.apply(weights.given, x, batch), num_channels(kind)
    if isinstance(kind, DeltaKind):
        assert weights.gates is not None
        gates = linears.apply(weights.gates, x, batch)
        if len(kind.sites) == 1:
            each, heads_in = kind.value_heads // kind.key_heads, kind.key_heads
            values = each * kind.value_dim
            y = ops.by_part(y, heads_in, (kind.key_dim, kind.key_dim, values, values))
            gates = ops.by_part(gates, heads_in, (each, each))
        mixed, gate = y[:, :channels], y[:, channels:]
        b, a = gates[:, : kind.value_heads], gates[:, kind.value_heads :]
        beta, decay = ops.delta_gates(b, a, weights.a_log, weights.dt_bias, kind.beta_scale)
    else:
        inner = kind.num_heads * kind.head_dim
        gate, mixed, dt = y[:, :inner], y[:, inner : inner + channels], y[:, inner + channels :]
        beta, decay = ops.step_gates(dt, weights.a_log, weights.dt_bias, *kind.steps)
    mixed = ops.convolve(pad_channels(kind, mixed), weights.conv, rows, memory, weights.bias)
    out = ops.rule(mixed, decay, beta, rows, memory, heads, weights.skip)
    _, value_heads, _, value_dim = _sizes(kind)
    out = without_padding(out, value_heads, value_dim)
    if isinstance(kind, DeltaKind):
        return ops.gated_norm(out, gate, weights.norm, kind.norm_eps or linears.eps)
    return linears.rms_norm(linears.act_and_mul(gate, False, out), weights.norm)


def num_channels(kind: RecurrentKind) -> int:
    """Those of the checkpoint's convolution."""
    key_heads, value_heads, key_dim, value_dim = _sizes(kind)
    return 2 * key_heads * key_dim + value_heads * value_dim


def pad_channels(kind: RecurrentKind, x: torch.Tensor) -> torch.Tensor:
    """x [..., C] of the checkpoint's channels, with values in their padded sizes. Mamba-2 has them first."""
    key_heads, value_heads, key_dim, value_dim = _sizes(kind)
    first = 2 * key_heads * key_dim if isinstance(kind, DeltaKind) else 0
    return pad_values(x, first, value_heads, value_dim)


def _heads(kind: RecurrentKind) -> RecurrentHeads:
    key_heads, value_heads, key_dim, value_dim = _sizes(kind)
    return RecurrentHeads(key_heads, value_heads, key_dim, padded_size(value_dim), kind.width)


def _sizes(kind: RecurrentKind) -> tuple[int, int, int, int]:
    """The numbers of key and value heads, and the sizes of these."""
    if isinstance(kind, DeltaKind):
        return kind.key_heads, kind.value_heads, kind.key_dim, kind.value_dim
    return kind.num_groups, kind.num_heads, kind.state_dim, kind.head_dim
