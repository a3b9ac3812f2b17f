"""The decoder families of `FusedDecoder`, and what a config must say to be one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.store.files import shown
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.config_fields import check_fields
from loraplex.engine.model.rope import RopePlan, plan_rope


@dataclass(frozen=True, slots=True)
class _Family:
    """The differences of a family from Llama's plan. None for a bias: the config's own field decides. `sliding`: the
    config may name a window; "all" means that it is every layer's, else layer_types decide. `fields`: config fields
    that only some families have."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    sliding: bool | str = False
    packed: bool = False
    partial_rope: bool = False
    rope_by_layer_type: bool = False
    gemma: bool = False
    fields: frozenset[str] = frozenset()


_GEMMA_FIELDS = frozenset(
    {"hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
)
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(None, None, None),  # SmolLM and SmolLM2 are of this model type too
    "mistral": _Family(False, False, False, sliding="all"),
    "qwen2": _Family(True, False, False, sliding=True),
    "qwen3": _Family(None, None, False, qk_norm=True, sliding=True),
    "phi3": _Family(
        False, False, False, sliding="all", packed=True, partial_rope=True,
        fields=frozenset({"original_max_position_embeddings", "partial_rotary_factor"}),
    ),
    "gemma2": _Family(None, None, False, sliding=True, gemma=True, fields=_GEMMA_FIELDS),
    "gemma3_text": _Family(
        None, None, False, qk_norm=True, sliding=True, rope_by_layer_type=True, gemma=True,
        # transformers' Gemma 3 reads no attn_logit_softcapping, so ours must not either.
        fields=_GEMMA_FIELDS - {"attn_logit_softcapping"}
        | {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"},
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A member of a family, with every number that its forward pass needs.

    `windows[i]` is layer i's sliding window (None: it sees everything). `packed` says that the checkpoint has
    qkv_proj and gate_up_proj, in the order of our own packed weights; adapters then have them as one site each.
    `gemma`: norm weights are offsets from 1 and applied in float32, each half of a layer has a norm behind it too,
    the activation is GELU's tanh approximation, and embeddings are scaled by sqrt(hidden_size). Softcaps are None
    where the model has none. `trained_positions` is the longest sequence that the model can have; `ignored` are fields
    of its config.json that are not defined anywhere.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    packed: bool
    tied: bool
    gemma: bool
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    windows: tuple[int | None, ...]
    rope: RopePlan
    trained_positions: int
    ignored: tuple[str, ...]


def is_fused(model_type: str) -> bool:
    return model_type in _FAMILIES


def decoder_spec(config: Any, raw: Mapping[str, Any], max_model_len: int = 0) -> DecoderSpec:
    """Read a transformers config. `raw` is its config.json: there a field that neither we nor transformers know is
    seen. `max_model_len` is the length that was asked for, 0 if none was: RoPE's frequencies may depend on it.
    Raises ModelUnsupported for anything that would make the computation another one than ours."""
    family = _FAMILIES[config.model_type]
    ignored = check_fields(config, raw, family.fields)
    field, allowed = (
        ("hidden_activation", ("gelu_pytorch_tanh",)) if family.gemma else ("hidden_act", ("silu", "swish"))
    )
    activation = getattr(config, field)
    if activation not in allowed:
        raise ModelUnsupported(
            f"{field} is {shown(activation)}; {config.model_type} is served with '{allowed[0]}'"
        )
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelUnsupported(
            f"{num_heads} heads of size {head_dim} over {num_kv_heads} key-value heads do not divide"
        )
    attention_bias = bool(getattr(config, "attention_bias", False))
    mlp_bias = bool(getattr(config, "mlp_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    if family.qkv_bias is not None and "attention_bias" in raw and attention_bias != qkv_bias:
        raise ModelUnsupported(f"attention_bias {attention_bias} is not known for {config.model_type}")
    if family.mlp_bias is not None and mlp_bias != family.mlp_bias:
        raise ModelUnsupported(f"mlp_bias {mlp_bias} is not known for {config.model_type}")
    rope = plan_rope(
        config,
        head_dim,
        max_model_len,
        partial=family.partial_rope,
        by_layer_type=family.rope_by_layer_type,
    )
    return DecoderSpec(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        packed=family.packed,
        tied=bool(config.tie_word_embeddings),
        gemma=family.gemma,
        attention_scale=_positive(config, "query_pre_attn_scalar") ** -0.5
        if family.gemma
        else head_dim**-0.5,
        attention_softcap=_softcap(config, family, "attn_logit_softcapping"),
        logits_softcap=_softcap(config, family, "final_logit_softcapping"),
        windows=_windows(config, family, rope.max_positions),
        rope=rope,
        trained_positions=config.max_position_embeddings,
        ignored=ignored,
    )


def _softcap(config: Any, family: _Family, name: str) -> float | None:
    if name not in family.fields or getattr(config, name) is None:
        return None
    return _positive(config, name)


def _positive(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    if not isinstance(value, int | float) or not value > 0:
        raise ModelUnsupported(f"the config's {name} is {shown(value)}; it must be a number above 0")
    return float(value)


def _windows(config: Any, family: _Family, max_positions: int) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if not family.sliding:
        if window is not None:
            raise ModelUnsupported(f"sliding_window {window} is not known for {config.model_type}")
        return (None,) * layers
    if window is not None:
        if type(window) is not int or window < 1:
            raise ModelUnsupported(
                f"the config's sliding_window is {shown(window)}; it must be a number above 0"
            )
        if window >= max_positions:
            window = None  # nothing is ever outside of it
    types = getattr(config, "layer_types", None)
    if types is None or family.sliding == "all":
        return (window,) * layers
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if len(types) != layers or not set(types) <= known.keys():
        raise ModelUnsupported(
            f"layer_types of {config.model_type} must name full_attention or sliding_attention {layers} times"
        )
    return tuple(known[kind] for kind in types)
