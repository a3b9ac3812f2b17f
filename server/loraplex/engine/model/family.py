"""The decoder families of `FusedDecoder` as tables of layer kinds, and what a config must say to be one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.config_fields import check_fields
from loraplex.engine.model.layer_kinds import (
    Activation,
    AttentionKind,
    GatedKind,
    LayerKind,
    NormKind,
)
from loraplex.engine.model.rope import RopePlan, plan_rope


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One kind of layer of a family. The defaults are Llama's. A bias that is None is as the config's own field says.
    Strings but `activation` are names of config fields; an empty one: the kind has no such property."""

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    packed: bool = False
    """Whether the checkpoint has qkv_proj and gate_up_proj."""
    norms_behind: bool = False
    """Whether each half has a norm behind it too."""
    activation: Activation = "silu"
    activation_field: str = "hidden_act"
    num_heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    mlp_size: str = "intermediate_size"
    window: str = ""
    scale: str = ""
    """A number whose inverse root scales the scores; empty: the head size."""
    softcap: str = ""

    @property
    def config_fields(self) -> set[str]:
        sizes = {self.num_heads, self.kv_heads, self.head_dim, self.mlp_size}
        return sizes | {self.activation_field, self.window, self.scale, self.softcap}


@dataclass(frozen=True, slots=True)
class Family:
    """`layers`: the kinds by their names in `layer_types`. A family of one kind does not read that field; the last kind
    is that of all layers where a config has none."""

    layers: Mapping[str, LayerRow]
    norm_offset: float = 0.0
    """Added to the stored weight of each norm."""
    norm_in_float32: bool = False
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    logits_softcap: str = ""
    partial_rope: bool = False
    rope_by_kind: bool = False
    """Whether rope_parameters hold a set for each kind of layer."""
    fields: frozenset[str] = frozenset()
    """Config fields that transformers has worked into others."""


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _some_sliding(full: LayerRow) -> Mapping[str, LayerRow]:
    return {_FULL: full, _SLIDING: replace(full, window="sliding_window")}


_PLAIN = LayerRow(qkv_bias=False, o_bias=False, mlp_bias=False, window="sliding_window")
_GEMMA = LayerRow(
    mlp_bias=False,
    norms_behind=True,
    activation="gelu_tanh",
    activation_field="hidden_activation",
    scale="query_pre_attn_scalar",
)
_GEMMA2 = Family(
    _some_sliding(replace(_GEMMA, softcap="attn_logit_softcapping")),
    norm_offset=1.0,
    norm_in_float32=True,
    scales_embedding=True,
    logits_softcap="final_logit_softcapping",
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family({_FULL: LayerRow()}),  # SmolLM and SmolLM2 are of this model type too
    "mistral": Family({_SLIDING: _PLAIN}),
    "qwen2": Family(_some_sliding(LayerRow(qkv_bias=True, o_bias=False, mlp_bias=False))),
    "qwen3": Family(_some_sliding(LayerRow(mlp_bias=False, qk_norm=True))),
    "phi3": Family(
        {_SLIDING: replace(_PLAIN, packed=True)},
        partial_rope=True,
        fields=frozenset({"original_max_position_embeddings", "partial_rotary_factor"}),
    ),
    "gemma2": _GEMMA2,
    # transformers' Gemma 3 reads no attn_logit_softcapping, so ours must not either.
    "gemma3_text": replace(
        _GEMMA2,
        layers=_some_sliding(replace(_GEMMA, qk_norm=True)),
        rope_by_kind=True,
        fields=frozenset({"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}),
    ),
}
_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A member of a family, with every number that its forward pass needs."""

    model_type: str
    layers: tuple[LayerKind, ...]
    hidden_size: int
    vocab_size: int
    norm: NormKind
    tied: bool
    """Whether the head is the embedding."""
    embed_scale: float
    logits_softcap: float | None
    rope: RopePlan
    trained_positions: int
    """The longest sequence that the model can have."""
    ignored: tuple[str, ...]
    """Fields of its config.json that are not defined anywhere."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def caches(self) -> tuple[CacheKind, ...]:
        """Each layer's."""
        return tuple(kind.mixer.cache for kind in self.layers)

    @property
    def intermediate_size(self) -> int:
        """The widest layer's."""
        return max(kind.feed_forward.size for kind in self.layers)


def is_fused(model_type: str) -> bool:
    return model_type in FAMILIES


def decoder_spec(config: Any, raw: Mapping[str, Any], max_model_len: int = 0) -> DecoderSpec:
    """Read a transformers config. `raw` is its config.json: there a field that neither we nor transformers know is
    seen. `max_model_len` is the length that was asked for, 0 if none was: RoPE's frequencies may depend on it.
    Raises ModelUnsupported for anything that would make the computation another one than ours."""
    family = FAMILIES[config.model_type]
    named = {name for row in family.layers.values() for name in row.config_fields}
    ignored = check_fields(config, raw, family.fields | named | {family.logits_softcap})
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_window" not in named:
        raise ModelUnsupported(f"sliding_window {window} is not known for {config.model_type}")
    names = _layer_names(config, family)
    rows = {name: family.layers[name] for name in names}
    rope, rope_of = plan_rope(
        config,
        {name: _head_dim(config, row) for name, row in rows.items()},
        max_model_len,
        partial=family.partial_rope,
        by_kind=family.layers if family.rope_by_kind else (),
    )
    kinds = {
        name: _layer_kind(config, raw, row, rope_of[name], rope.max_positions) for name, row in rows.items()
    }
    return DecoderSpec(
        model_type=config.model_type,
        layers=tuple(kinds[name] for name in names),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        norm=NormKind(config.rms_norm_eps, _norm_offset(raw, family), family.norm_in_float32),
        tied=bool(config.tie_word_embeddings),
        embed_scale=config.hidden_size**0.5 if family.scales_embedding else 1.0,
        logits_softcap=_softcap(config, family.logits_softcap),
        rope=rope,
        trained_positions=config.max_position_embeddings,
        ignored=ignored,
    )


def _norm_offset(raw: Mapping[str, Any], family: Family) -> float:
    """A GGUF file's norms are stored with the offset added."""
    stored = raw.get("quantization_config") or {}
    return 0.0 if stored.get("quant_method") == "gguf" else family.norm_offset


def _layer_names(config: Any, family: Family) -> tuple[str, ...]:
    """The kind of each layer."""
    count: int = config.num_hidden_layers
    known, types = [*family.layers], getattr(config, "layer_types", None)
    if types is None or len(known) == 1:
        return (known[-1],) * count
    if len(types) != count or not set(types) <= set(known):
        raise ModelUnsupported(
            f"layer_types of {config.model_type} must name {' or '.join(known)} {count} times"
        )
    return tuple(types)


def _head_dim(config: Any, row: LayerRow) -> int:
    num_heads, kv_heads = getattr(config, row.num_heads), getattr(config, row.kv_heads)
    head_dim: int = getattr(config, row.head_dim, None) or config.hidden_size // num_heads
    if num_heads % kv_heads or head_dim % 2:
        raise ModelUnsupported(
            f"{num_heads} heads of size {head_dim} over {kv_heads} key-value heads do not divide"
        )
    return head_dim


def _layer_kind(
    config: Any, raw: Mapping[str, Any], row: LayerRow, rope: int, max_positions: int
) -> LayerKind:
    allowed, activation = _ACTIVATIONS[row.activation], getattr(config, row.activation_field)
    if activation not in allowed:
        raise ModelUnsupported(
            f"{row.activation_field} is {shown(activation)}; {config.model_type} is served with '{allowed[0]}'"
        )
    attention_bias = bool(getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    qkv_bias = attention_bias if row.qkv_bias is None else row.qkv_bias
    if "attention_bias" in raw and row.qkv_bias is not None and attention_bias != qkv_bias:
        raise ModelUnsupported(f"attention_bias {attention_bias} is not known for {config.model_type}")
    if row.mlp_bias is not None and mlp_bias != row.mlp_bias:
        raise ModelUnsupported(f"mlp_bias {mlp_bias} is not known for {config.model_type}")
    head_dim = _head_dim(config, row)
    mixer = AttentionKind(
        num_heads=getattr(config, row.num_heads),
        cache=CacheKind(getattr(config, row.kv_heads), head_dim, _window(config, row, max_positions)),
        rope=rope,
        scale=(_positive(config, row.scale) if row.scale else head_dim) ** -0.5,
        softcap=_softcap(config, row.softcap),
        qkv_bias=qkv_bias,
        o_bias=attention_bias if row.o_bias is None else row.o_bias,
        qk_norm=row.qk_norm,
        packed=row.packed,
    )
    gated = GatedKind(getattr(config, row.mlp_size), row.activation, mlp_bias, row.packed)
    return LayerKind(mixer, gated, row.norms_behind)


def _softcap(config: Any, name: str) -> float | None:
    return _positive(config, name) if name and getattr(config, name) is not None else None


def _positive(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    if not isinstance(value, int | float) or not value > 0:
        raise ModelUnsupported(f"the config's {name} is {shown(value)}; it must be a number above 0")
    return float(value)


def _window(config: Any, row: LayerRow, max_positions: int) -> int | None:
    window = getattr(config, row.window, None) if row.window else None
    if window is None:
        return None
    if type(window) is not int or window < 1:
        raise ModelUnsupported(f"the config's {row.window} is {shown(window)}; it must be a number above 0")
    # A longer one leaves nothing outside of it.
    return window if window < max_positions else None
