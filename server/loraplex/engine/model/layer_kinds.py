"""Kinds of layers as data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from loraplex.engine.kv.layers import CacheKind
from loraplex.kernels.experts.types import ExpertActivation, RouterKind

Activation = Literal["silu", "gelu_tanh"]
"""The last is GELU's tanh approximation."""


class MixerKind(msgspec.Struct, frozen=True, tag=True):
    """The part of a layer that reads other positions (`layers.mixers`). A struct with a tag: kept plans have kinds of
    several classes in one place."""

    cache: CacheKind


class AttentionKind(MixerKind, frozen=True):
    """Attention over rotated queries and keys. A layer whose cache is another's (`CacheKind.shares`) has queries
    alone."""

    num_heads: int
    rope: int
    """The index of its rotation in `RopePlan.ropes`."""
    scale: float
    softcap: float | None
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    """Whether queries and keys are normed, by head."""
    packed: bool
    """Whether the checkpoint has qkv_proj, in the order of our own packed weights: one site for adapters."""
    v_norm: bool = False
    """Whether values are normed by head, without a weight."""
    values_are_keys: bool = False
    """Whether values are the keys, before their norm and rotation: there is no v_proj."""
    out: str = "o_proj"
    """The name of the output's linear."""
    head_norm: str = "norm"
    """The names of the norms by head, behind "q_" and "k_"."""
    head_gate: bool = False
    """Whether each head's result is multiplied by the sigmoid of a number that g_proj gives it."""
    wide_norm: bool = False
    """Whether that is over all heads at once."""
    sinks: bool = False
    """Whether each head's softmax has a score more, whose value is 0."""
    output_gate: bool = False
    """Whether q_proj gives a gate behind each head's query, whose sigmoid multiplies the head's result."""


class ShortConvKind(MixerKind, frozen=True):
    """A causal convolution of each channel, between two gates. The cache has the last rows that it reads: of C numbers
    each, half of them as a key, half as a value."""

    width: int
    """Positions that a row reads, its own included."""
    bias: bool
    """Whether the convolution and both linears have one."""


class DeltaKind(MixerKind, frozen=True):
    """A gated delta net. Its `cache` has no bytes: they depend on the model's dtype (`layers.mixers.Mixer.cache`)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Positions that a row of the convolution reads, its own included."""
    sites: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    """The names of the linears to queries, keys, values and the norm's gate: a pair, or one of each. One for all gives
    the parts of a key head one behind the other, and so does one of both gates."""
    gates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    out: str = "out_proj"
    """The name of the output's linear."""
    norm: str = "norm"
    """The name of the gated norm."""
    norm_eps: float | None = None
    """That norm's; None: the model's."""
    beta_scale: float = 1.0


class MambaKind(MixerKind, frozen=True):
    """A Mamba-2. Its `cache` has no bytes, as that of a delta net."""

    num_heads: int
    head_dim: int
    num_groups: int
    """The heads of a group share keys and queries (B and C)."""
    state_dim: int
    """The size of keys and queries."""
    width: int
    """Positions that a row of the convolution reads, its own included."""
    conv_bias: bool
    bias: bool
    """Whether both linears have one."""
    steps: tuple[float, float]
    """The smallest and the largest."""


class SquaredKind(MixerKind, frozen=True):
    """A feed-forward in a mixer's place: down(relu(up(x))²). Its `cache` is empty."""

    size: int
    bias: bool
    """Whether both linears have one."""

    @property
    def width(self) -> int:
        return self.size


class FeedForwardKind(msgspec.Struct, frozen=True, tag=True):
    """The part of a layer that reads each row alone (`layers.feed_forwards`). A struct as `MixerKind` is."""

    size: int
    activation: Activation

    @property
    def width(self) -> int:
        """Numbers of a row between gate and down."""
        return self.size


class GatedKind(FeedForwardKind, frozen=True):
    """A feed-forward with a gate: down(activation(gate(x)) · up(x))."""

    bias: bool
    sites: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """The names of its linears; two where the checkpoint has gate and up as one, in this order."""


class MixtureKind(FeedForwardKind, frozen=True):
    """Experts: gated feed-forwards of `size`. A router chooses some of them for each row."""

    router: RouterKind
    sites: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's linears."""
    gate: str = "gate"
    """The path of the router's linear."""
    bias: bool = False
    """Whether the router has one, and experts have stacks of them: of gate and up, in turns, and of down."""
    clamped: ExpertActivation | None = None
    """The activation with its numbers; None: `activation` is it."""
    routed: str | None = None
    """The path in the layer of the module that has router and experts; None: the feed-forward's, in which what all rows
    go through has a name of its own. Elsewhere that is the feed-forward itself."""
    from_residual: bool = False
    """Whether router and experts read the layer's residual, each behind a norm of its own, and both results are normed
    before they are added (Gemma 4). The weights of a router's choice are multiplied by a number of their expert."""
    shared: GatedKind | None = None
    """Added to what the experts give, for all rows."""
    shared_name: str = "shared_expert"
    shared_gate: str = ""
    """The linear to a number whose sigmoid multiplies the shared result; empty: there is none."""

    @property
    def width(self) -> int:
        return self.size * self.router.top_k + (0 if self.shared is None else self.shared.size)


@dataclass(frozen=True, slots=True)
class InputKind:
    """An input of its own for each layer: the sum of a token's row in a table and of a projection of its embedding.
    Behind the feed-forward it is multiplied by a gate, projected back, normed and added."""

    size: int
    """The width of one layer's input."""
    vocab_size: int
    """Rows of the table."""
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A mixer and a feed-forward, each with a norm before it (`norms_before`), behind it, before its result is added
    (`norms_behind`), or both; or a mixer alone."""

    mixer: AttentionKind | ShortConvKind | DeltaKind | MambaKind | SquaredKind
    feed_forward: GatedKind | MixtureKind | None
    norms_behind: bool
    norms_before: bool = True
    own_input: InputKind | None = None
    is_scaled: bool = False
    """Whether what leaves the layer is multiplied by a number of its own."""


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of a family's modules."""

    input_norm: str = "input_layernorm"
    feed_forward: str = "mlp"
    feed_forward_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"
    with_norms_behind: tuple[str, str, str] = (
        "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    """Those behind the mixer, before the feed-forward and behind it, where the halves of a layer have norms behind."""
    embedding: str = "embed_tokens"
    mixer: str = ""
    """The name of mixers of all kinds; empty: each kind has its own (`layers.mixers`)."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers of a model that its rows are multiplied by."""

    embedding: float = 1.0
    residual: float = 1.0
    """Multiplies what each half of a layer adds."""
    logits: float = 1.0
    """Divides them."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """RMSNorm, the same for all norms of a model."""

    eps: float
    offset: float = 0.0
    """Added to the weights that the checkpoint stores."""
    in_float32: bool = False
    """Whether the weights are in float32, and the result is rounded once behind them."""
