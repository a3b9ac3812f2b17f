"""A row of the table of families: its kinds of layers, and the config fields that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.engine.model.layer_kinds import (
    Activation,
    DeltaKind,
    MambaKind,
    MixtureKind,
    ModuleNames,
    ShortConvKind,
    SquaredKind,
)

_NAMES = ModuleNames()


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One kind of layer of a family. The defaults are Llama's. A bias that is None is as the config's own field says.
    Strings but `activation` are names of config fields; an empty one: the kind has no such property."""

    qkv_bias: bool | str | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | str = False
    wide_norm: bool = False
    packed: bool = False
    """Whether the checkpoint has qkv_proj."""
    norms_behind: bool | str = False
    """Whether each half has a norm behind it."""
    norms_before: bool = True
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    num_heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    mlp_size: str = "intermediate_size"
    window: str = ""
    scale: str | float = ""
    """A number whose inverse root scales the scores, or the scale itself; empty: the head size."""
    multiplier: str = ""
    """The scale itself, where it has a field."""
    softcap: str = ""
    v_norm: bool = False
    values_are_keys: str = ""
    """Whether there is no v_proj."""
    out: str = "o_proj"
    head_norm: str = "norm"
    head_gate: str = ""
    sinks: bool = False
    output_gate: bool = False
    mlp_sites: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Empty: the mixer is all that the layer has."""
    mlp_size_of: Callable[[Any], int] | None = None
    """Makes the width of a config; None: `mlp_size` is it."""
    mixer: Callable[[Any], ShortConvKind | DeltaKind | MambaKind | SquaredKind] | None = None
    """Makes the mixer of a config; None: attention."""

    @property
    def config_fields(self) -> set[str]:
        sizes = {self.num_heads, self.kv_heads, self.head_dim, self.mlp_size}
        named = (
            self.activation_field, self.window, self.scale, self.softcap, self.values_are_keys, self.norms_behind,
            self.head_gate, self.multiplier, self.qk_norm, self.qkv_bias,
        )  # fmt: skip
        return sizes | {name for name in named if isinstance(name, str)}


@dataclass(frozen=True, slots=True)
class Family:
    """`layers`: the kinds by their names in `layer_types`. A family of one kind does not read that field; the last kind
    is that of all layers where a config has none."""

    layers: Mapping[str, LayerRow]
    names: ModuleNames = _NAMES
    norm_eps: str = "rms_norm_eps"
    norm_offset: float = 0.0
    """Added to the stored weight of each norm."""
    norm_in_float32: bool = False
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    logits_softcap: str = ""
    partial_rope: bool = False
    rope_by_kind: bool = False
    """Whether rope_parameters hold a set for each kind of layer."""
    rotates: Callable[[Any], bool] | None = None
    """Whether a config's queries and keys are rotated; None: they are."""
    rope_fields: frozenset[str] = frozenset()
    """Fields of rope_parameters that frequencies do not depend on."""
    sizes_by_layer: frozenset[str] = frozenset()
    """Config fields that per_layer_config may set: the same for all layers of a kind."""
    shared_layers: str = ""
    """How many of the last layers read the keys and values of the last layer of their kind before these."""
    wide_where_shared: str = ""
    """Whether the feed-forward of those is twice as wide."""
    own_input: str = ""
    """The size of each layer's own input; 0: layers have none."""
    own_input_vocab: str = ""
    embedding_multiplier: str = ""
    residual_multiplier: str = ""
    logits_divisor: str = ""
    mixture: Callable[[Any, int], MixtureKind | None] | None = None
    """Makes the mixture of a config's layer, None of one that is dense; None: all are."""
    without_experts: Callable[[Any], bool] = lambda config: False
    """Whether all layers of a config are dense, though the family has mixtures."""
    further_layers: str = ""
    """The number of layers behind the model's own, whose tensors are not read: they predict further tokens."""
    is_wrapped: Callable[[Any], bool] = lambda config: False
    """Whether a config's model runs through transformers."""
    scales_layers: bool = False
    """Whether what leaves a layer is multiplied by its `layer_scalar`."""
    check: Callable[[Any, Mapping[str, Any]], None] | None = None
    """Raises ModelUnsupported for a config, with its config.json, that means something else than ours."""
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of config fields that change nothing here; any other is refused."""
    fields: frozenset[str] = frozenset()
    """Config fields that transformers has worked into others, or that mean nothing beside harmless ones."""

    @property
    def config_fields(self) -> set[str]:
        named = {name for row in self.layers.values() for name in row.config_fields}
        own = {
            self.logits_softcap, self.norm_eps, self.shared_layers, self.wide_where_shared, self.own_input,
            self.own_input_vocab, self.embedding_multiplier, self.residual_multiplier, self.logits_divisor,
        }  # fmt: skip
        return {*self.fields, *named, *own}
