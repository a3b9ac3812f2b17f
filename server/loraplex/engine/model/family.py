"""A member of a decoder family: what its config makes of the family's row, and what it must say for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.config_fields import check_fields, check_sizes
from loraplex.engine.model.families.rows import Family, LayerRow
from loraplex.engine.model.families.table import FAMILIES
from loraplex.engine.model.layer_kinds import (
    Activation,
    AttentionKind,
    FeedForwardKind,
    GatedKind,
    InputKind,
    LayerKind,
    MixtureKind,
    ModuleNames,
    Multipliers,
    NormKind,
    SquaredKind,
)
from loraplex.engine.model.rope import RopePlan, plan_rope

_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A member of a family, with every number that its forward pass needs."""

    model_type: str
    layers: tuple[LayerKind, ...]
    """All of them have an input of their own, of one kind, or none has."""
    hidden_size: int
    vocab_size: int
    names: ModuleNames
    norm: NormKind
    tied: bool
    """Whether the head is the embedding."""
    embed_scale: float
    multipliers: Multipliers
    logits_softcap: float | None
    rope: RopePlan
    trained_positions: int
    """The longest sequence that the model can have."""
    further_layers: int
    """Layers of the checkpoint behind these, which are not read."""
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
        parts = (part for kind in self.layers for part in (kind.feed_forward, kind.mixer))
        return max(
            (part.width for part in parts if isinstance(part, FeedForwardKind | SquaredKind)),
            default=self.hidden_size,
        )

    @property
    def mixtures(self) -> tuple[MixtureKind, ...]:
        """Those of the layers that have one."""
        return tuple(kind.feed_forward for kind in self.layers if isinstance(kind.feed_forward, MixtureKind))

    @property
    def expert_weights(self) -> int:
        """Weights of all experts."""
        return sum(3 * self.hidden_size * kind.size * kind.router.num_experts for kind in self.mixtures)

    @property
    def chosen_weights(self) -> int:
        """Weights of the experts that a row goes through."""
        return sum(3 * self.hidden_size * kind.size * kind.router.top_k for kind in self.mixtures)


def decoder_spec(config: Any, raw: Mapping[str, Any], max_model_len: int = 0) -> DecoderSpec:
    """Read a transformers config. `raw` is its config.json: there a field that neither we nor transformers know is
    seen. `max_model_len` is the length that was asked for, 0 if none was: RoPE's frequencies may depend on it.
    Raises ModelUnsupported for anything that would make the computation another one than ours."""
    family = FAMILIES[config.model_type]
    named = family.config_fields
    ignored = check_fields(config, raw, named, family.harmless)
    if family.check is not None:
        family.check(config, raw)
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_window" not in named:
        raise ModelUnsupported(f"sliding_window {window} is not known for {config.model_type}")
    names = _layer_names(config, family)
    rows = {name: family.layers[name] for name in names}
    if all(row.mixer is not None for row in rows.values()):
        raise ModelUnsupported(f"none of its layers has attention ({config.model_type})")
    configs = {name: _config_of(config, family, name) for name in rows}
    rope, rope_of = plan_rope(
        configs,
        {name: _head_dim(configs[name], row) for name, row in rows.items() if row.mixer is None},
        max_model_len,
        partial=family.partial_rope,
        others=family.rope_fields,
        by_kind=family.layers if family.rope_by_kind else (),
        rotates=family.rotates is None or family.rotates(config),
    )
    kinds = {
        name: _layer_kind(configs[name], raw, row, rope_of.get(name, 0), rope.max_positions)
        for name, row in rows.items()
    }
    kinds = {name: _with_family(kind, config, family) for name, kind in kinds.items()}
    return DecoderSpec(
        model_type=config.model_type,
        layers=_with_mixtures(
            _with_sharing([kinds[name] for name in names], names, config, family), config, family
        ),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        names=family.names,
        norm=NormKind(getattr(config, family.norm_eps), _norm_offset(raw, family), family.norm_in_float32),
        tied=bool(config.tie_word_embeddings),
        embed_scale=config.hidden_size**0.5 if family.scales_embedding else 1.0,
        multipliers=Multipliers(
            _multiplier(config, family.embedding_multiplier),
            _multiplier(config, family.residual_multiplier),
            _multiplier(config, family.logits_divisor),
        ),
        logits_softcap=_softcap(config, family.logits_softcap),
        rope=rope,
        trained_positions=config.max_position_embeddings,
        further_layers=getattr(config, family.further_layers) if family.further_layers else 0,
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


def _config_of(config: Any, family: Family, name: str) -> Any:
    """The config with the sizes of one kind of layer."""
    if not getattr(config, "is_heterogeneous", False):
        return config
    by_layer = config.per_layer_attributes
    if stray := sorted(by_layer - family.sizes_by_layer):
        raise ModelUnsupported(
            f"per_layer_config sets {', '.join(stray)}, which {config.model_type} has not by layer"
        )
    try:
        found = config.per_layer_config[name]
    except ValueError as error:
        raise ModelUnsupported(f"per_layer_config of {config.model_type}: {error}") from error
    check_sizes({field_name: getattr(found, field_name) for field_name in by_layer})
    if found.skip:
        raise ModelUnsupported(f"per_layer_config of {config.model_type} skips {shown(found.skip)}")
    return found


def _with_family(kind: LayerKind, config: Any, family: Family) -> LayerKind:
    size = getattr(config, family.own_input) if family.own_input else 0
    own_input = None
    if size:
        check_sizes({family.own_input: size, family.own_input_vocab: getattr(config, family.own_input_vocab)})
        vocab_size = _positive(config, family.own_input_vocab)
        if vocab_size < config.vocab_size:
            raise ModelUnsupported(
                f"{family.own_input_vocab} is {vocab_size:.0f}, fewer than the {config.vocab_size} tokens there are"
            )
        assert kind.feed_forward is not None
        own_input = InputKind(size, int(vocab_size), kind.feed_forward.activation)
    return replace(kind, own_input=own_input, is_scaled=family.scales_layers)


def _with_sharing(
    kinds: list[LayerKind], names: Sequence[str], config: Any, family: Family
) -> tuple[LayerKind, ...]:
    """The last layers with the caches that they read, and the width that they have."""
    shared = getattr(config, family.shared_layers) if family.shared_layers else 0
    if not shared:
        return tuple(kinds)
    first = len(kinds) - shared
    sources = {name: index for index, name in enumerate(names[: max(first, 0)])}
    if not 0 <= first <= len(kinds) or set(names) != set(sources):
        raise ModelUnsupported(
            f"{family.shared_layers} is {shown(shared)}: a kind of layer has none before these to share with"
        )
    times = 2 if family.wide_where_shared and getattr(config, family.wide_where_shared) else 1
    for index in range(first, len(kinds)):
        kind, source = kinds[index], sources[names[index]]
        mixer = msgspec.structs.replace(
            kind.mixer, values_are_keys=False, cache=replace(kind.mixer.cache, shares=source)
        )
        assert kind.feed_forward is not None
        wide = msgspec.structs.replace(kind.feed_forward, size=times * kind.feed_forward.size)
        kinds[index] = replace(kind, mixer=mixer, feed_forward=wide)
    return tuple(kinds)


def _with_mixtures(kinds: tuple[LayerKind, ...], config: Any, family: Family) -> tuple[LayerKind, ...]:
    if family.mixture is None:
        return kinds
    return tuple(
        replace(kind, feed_forward=_beside(family.mixture(config, layer), kind.feed_forward))
        for layer, kind in enumerate(kinds)
    )


def _beside(
    mixture: MixtureKind | None, own: GatedKind | MixtureKind | None
) -> GatedKind | MixtureKind | None:
    """A layer's mixture, with the layer's own feed-forward where that stands beside it."""
    if mixture is None:
        return own
    shared = own if mixture.routed is not None and isinstance(own, GatedKind) and own.size else mixture.shared
    return msgspec.structs.replace(mixture, shared=shared)


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
    allowed = _ACTIVATIONS[row.activation]
    activation = getattr(config, row.activation_field) if row.activation_field else allowed[0]
    if activation not in allowed:
        raise ModelUnsupported(
            f"{row.activation_field} is {shown(activation)}; {config.model_type} is served with '{allowed[0]}'"
        )
    attention_bias = bool(getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    qkv_bias = attention_bias if row.qkv_bias is None else _is_set(config, row.qkv_bias)
    if "attention_bias" in raw and row.qkv_bias is not None and attention_bias != qkv_bias:
        raise ModelUnsupported(f"attention_bias {attention_bias} is not known for {config.model_type}")
    if row.mlp_bias is not None and mlp_bias != row.mlp_bias:
        raise ModelUnsupported(f"mlp_bias {mlp_bias} is not known for {config.model_type}")
    head_dim = _head_dim(config, row)
    mixer = AttentionKind(
        num_heads=getattr(config, row.num_heads),
        cache=CacheKind(getattr(config, row.kv_heads), head_dim, _window(config, row, max_positions)),
        rope=rope,
        scale=_scale(config, row, head_dim),
        softcap=_softcap(config, row.softcap),
        qkv_bias=qkv_bias,
        o_bias=attention_bias if row.o_bias is None else row.o_bias,
        qk_norm=_is_set(config, row.qk_norm),
        packed=row.packed,
        v_norm=row.v_norm,
        values_are_keys=_is_set(config, row.values_are_keys),
        out=row.out,
        head_norm=row.head_norm,
        head_gate=_is_set(config, row.head_gate),
        wide_norm=row.wide_norm,
        sinks=row.sinks,
        output_gate=row.output_gate,
    )
    gated = None
    if row.mlp_sites:
        size = getattr(config, row.mlp_size) if row.mlp_size_of is None else row.mlp_size_of(config)
        gated = GatedKind(size, row.activation, mlp_bias, row.mlp_sites)
    return LayerKind(
        mixer if row.mixer is None else row.mixer(config),
        gated,
        _is_set(config, row.norms_behind),
        row.norms_before,
    )


def _is_set(config: Any, said: bool | str) -> bool:
    return bool(getattr(config, said) if isinstance(said, str) and said else said)


def _scale(config: Any, row: LayerRow, head_dim: int) -> float:
    if row.multiplier:
        return _positive(config, row.multiplier)
    if isinstance(row.scale, float):
        return row.scale
    scale: float = (_positive(config, row.scale) if row.scale else head_dim) ** -0.5
    return scale


def _multiplier(config: Any, name: str) -> float:
    return _positive(config, name) if name else 1.0


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
