"""The decoder families of `FusedDecoder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loraplex.engine.model.families import lfm2, mamba, mixtures, qwen3_5
from loraplex.engine.model.families.rows import Family, LayerRow
from loraplex.engine.model.layer_kinds import ModuleNames
from loraplex.engine.model.rope import SCALE_FIELD

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
_GEMMA4_LAYER = replace(_GEMMA, qk_norm=True, v_norm=True, scale=1.0)
_GEMMA4 = Family(
    {
        _FULL: replace(_GEMMA4_LAYER, values_are_keys="attention_k_eq_v"),
        _SLIDING: replace(_GEMMA4_LAYER, window="sliding_window"),
    },
    norm_in_float32=True,
    scales_embedding=True,
    logits_softcap="final_logit_softcapping",
    rope_by_kind=True,
    sizes_by_layer=frozenset({"head_dim", "num_key_value_heads"}),
    shared_layers="num_kv_shared_layers",
    wide_where_shared="use_double_wide_mlp",
    own_input="hidden_size_per_layer_input",
    own_input_vocab="vocab_size_per_layer_input",
    scales_layers=True,
    # "vision": rows of one image see each other.
    harmless={"use_bidirectional_attention": (None, False, "vision")},
    mixture=mixtures.gemma4_mixture,
    without_experts=lambda config: not config.enable_moe_block,
    fields=frozenset(
        {
            "per_layer_config", "global_head_dim", "num_global_key_value_heads", "num_experts", "top_k_experts",
            "moe_intermediate_size", "expert_intermediate_size", "enable_moe_block",
        }
    ),
)  # fmt: skip
_LLAMA = Family({_FULL: LayerRow()})
_MISTRAL = Family({_SLIDING: _PLAIN})
_QWEN2 = Family(_some_sliding(LayerRow(qkv_bias=True, o_bias=False, mlp_bias=False)))
_QWEN3 = Family(_some_sliding(LayerRow(mlp_bias=False, qk_norm=True)))
# Which of three positions a token's frequencies take. Those of text are equal.
_SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
_QWEN2_VL = replace(_QWEN2, rope_fields=_SECTIONS)
_LFM2_FULL = replace(
    _PLAIN, window="", qk_norm=True, activation_field="", out="out_proj", head_norm="layernorm",
    mlp_sites=("w1", "w3", "w2"), mlp_size_of=lfm2.feed_forward_size,
)  # fmt: skip
_LFM2_LAYERS = {_FULL: _LFM2_FULL, "conv": replace(_LFM2_FULL, mixer=lfm2.short_conv_kind)}
_LFM2 = Family(_LFM2_LAYERS, lfm2.NAMES, "norm_eps", fields=lfm2.FIELDS)
_LFM3_FULL = replace(
    _LFM2_FULL, qkv_bias=None, o_bias=None, out="o_proj", head_norm="norm", mlp_size_of=None,
    norms_behind="use_sandwich_norm", head_gate="use_attention_gate",
)  # fmt: skip
_LFM3 = replace(
    _LFM2,
    layers={**_some_sliding(_LFM3_FULL), "conv": replace(_LFM3_FULL, mixer=lfm2.short_conv_kind)},
    rope_by_kind=True,
)
_QWEN3_5_FULL = LayerRow(mlp_bias=False, qk_norm=True, output_gate=True)
_QWEN3_5 = Family(
    {_FULL: _QWEN3_5_FULL, "linear_attention": replace(_QWEN3_5_FULL, mixer=qwen3_5.delta_kind)},
    norm_offset=1.0,
    norm_in_float32=True,
    partial_rope=True,
    rope_fields=_SECTIONS,
    harmless=qwen3_5.HARMLESS,
    fields=qwen3_5.FIELDS,
)
_QWEN3_5_MOE_FULL = replace(_QWEN3_5_FULL, mlp_size="moe_intermediate_size")
_OLMO_FULL = LayerRow(mlp_bias=False, qk_norm=True, wide_norm=True, norms_behind=True, norms_before=False)
_OLMO_DELTA = LayerRow(mlp_bias=False, mixer=qwen3_5.olmo_delta_kind)
_GRANITE = LayerRow(
    mlp_bias=False,
    multiplier="attention_multiplier",
    mlp_size="shared_intermediate_size",
    mlp_sites=("input_linear", "output_linear"),
)
_GRANITE_MOE = Family(
    {_FULL: _GRANITE},
    ModuleNames(feed_forward="shared_mlp"),
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logits_divisor="logits_scaling",
    mixture=mixtures.granite_mixture,
    fields=mixtures.FIELDS,
)
# Each layer is a mixer, attention or a feed-forward alone, and nothing is rotated.
_NEMOTRON = LayerRow(qkv_bias=False, o_bias=False, activation_field="", mlp_sites=())
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,  # SmolLM and SmolLM2 are of this model type too
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "phi3": Family(
        {_SLIDING: replace(_PLAIN, packed=True, mlp_sites=("gate_up_proj", "down_proj"))},
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
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(_GEMMA4, own_input="", own_input_vocab="", mixture=None),
    # The same plans by other names.
    "cwm": Family(_some_sliding(LayerRow(qkv_bias=False, o_bias=False))),
    "internlm3": replace(_LLAMA, fields=frozenset({"qkv_bias", "bias"})),
    "iquestcoder": _LLAMA,
    "ministral": Family(_some_sliding(replace(_PLAIN, window=""))),
    "ministral3": replace(_MISTRAL, rope_fields=frozenset({SCALE_FIELD, "max_position_embeddings"})),
    "seed_oss": Family({_FULL: LayerRow(o_bias=False)}),
    # Text parts of multimodal models, where they have a type of their own.
    "paddleocr_vl_text": Family({_FULL: replace(_PLAIN, window="")}, rope_fields=_SECTIONS),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": _QWEN2_VL,
    "qwen3_vl_text": replace(_QWEN3, rope_fields=_SECTIONS),
    "lfm2": _LFM2,
    "lfm3": _LFM3,
    "qwen3_5_text": _QWEN3_5,
    # Each layer has experts, and a config no width of one that has none.
    "qwen3_5_moe_text": replace(
        _QWEN3_5,
        layers={
            _FULL: _QWEN3_5_MOE_FULL,
            "linear_attention": replace(_QWEN3_5_MOE_FULL, mixer=qwen3_5.delta_kind),
        },
        mixture=mixtures.qwen3_5_mixture,
        harmless=qwen3_5.HARMLESS | mixtures.QWEN3_5_HARMLESS,
        fields=qwen3_5.FIELDS | mixtures.QWEN3_5_FIELDS,
    ),
    "qwen3_next": replace(
        _QWEN3_5,
        layers={
            _FULL: _QWEN3_5_FULL,
            "linear_attention": replace(_QWEN3_5_FULL, mixer=qwen3_5.next_delta_kind),
        },
        rope_fields=frozenset(),
        mixture=mixtures.qwen3_next_mixture,
        fields=qwen3_5.FIELDS | mixtures.QWEN3_5_FIELDS | mixtures.QWEN3_5_HARMLESS.keys(),
    ),
    "olmo_hybrid": Family(
        {_FULL: _OLMO_FULL, "linear_attention": _OLMO_DELTA},
        rotates=qwen3_5.olmo_rotates,
        fields=qwen3_5.OLMO_FIELDS,
    ),
    "bamba": Family(
        {
            _FULL: LayerRow(mlp_bias=False),
            "linear_attention": LayerRow(mlp_bias=False, mixer=mamba.granite_kind),
        },
        ModuleNames(
            feed_forward="feed_forward", feed_forward_norm="pre_ff_layernorm", final_norm="final_layernorm"
        ),
        partial_rope=True,
        fields=mamba.FIELDS | mamba.BAMBA_FIELDS,
    ),
    "granitemoe": replace(
        _GRANITE_MOE, layers={_FULL: replace(_GRANITE, mlp_size="intermediate_size", mlp_sites=())}
    ),
    "granitemoeshared": _GRANITE_MOE,
    "granitemoehybrid": replace(
        _GRANITE_MOE,
        layers={_FULL: _GRANITE, "linear_attention": replace(_GRANITE, mixer=mamba.granite_kind)},
        rotates=mamba.rotates,
        without_experts=lambda config: config.num_local_experts == 0,
        mixture=mixtures.granite_hybrid_mixture,
        fields=mamba.FIELDS | mixtures.FIELDS,
    ),
    "nemotron_h": Family(
        {
            _FULL: _NEMOTRON,
            "linear_attention": replace(_NEMOTRON, mixer=mamba.nemotron_kind),
            "mlp": replace(_NEMOTRON, mixer=mamba.squared_kind),
        },
        mamba.NEMOTRON_NAMES,
        "layer_norm_epsilon",
        norm_in_float32=True,
        rotates=lambda config: False,
        check=mamba.check_nemotron,
        harmless=mamba.NEMOTRON_HARMLESS,
        fields=mamba.NEMOTRON_FIELDS,
    ),
    "qwen3_moe": Family(
        {_FULL: LayerRow(mlp_bias=False, qk_norm=True, window="sliding_window")},
        mixture=mixtures.qwen3_mixture,
        fields=mixtures.FIELDS,
    ),
    "qwen2_moe": Family(
        _some_sliding(LayerRow(qkv_bias="qkv_bias", o_bias=False, mlp_bias=False)),
        mixture=mixtures.qwen3_next_mixture,
        fields=mixtures.FIELDS | mixtures.SHARED_FIELDS,
    ),
    "olmoe": Family(
        {_FULL: LayerRow(mlp_bias=False, qk_norm=True, wide_norm=True)},
        mixture=mixtures.olmoe_mixture,
        is_wrapped=lambda config: config.clip_qkv is not None,
        fields=mixtures.FIELDS,
    ),
    "gpt_oss": Family(
        _some_sliding(LayerRow(mlp_bias=False, sinks=True)),
        norm_in_float32=True,
        mixture=mixtures.gpt_oss_mixture,
        fields=mixtures.GPT_OSS_FIELDS,
    ),
    "glm4_moe": Family(
        {_FULL: LayerRow(o_bias=False, mlp_bias=False, qk_norm="use_qk_norm")},
        partial_rope=True,
        mixture=mixtures.glm4_mixture,
        further_layers="num_nextn_predict_layers",
        fields=mixtures.GLM4_FIELDS,
    ),
    "mixtral": Family({_SLIDING: _PLAIN}, mixture=mixtures.mixtral_mixture, fields=mixtures.FIELDS),
}


def is_fused(model_type: str) -> bool:
    return model_type in FAMILIES


def is_wrapped(config: Any, *, computes_experts: bool) -> bool:
    """Whether a model of a family runs through transformers all the same. One with states, or with heads of several
    sizes, cannot."""
    family = FAMILIES[config.model_type]
    computes_all = computes_experts or family.mixture is None or family.without_experts(config)
    kinds = getattr(config, "layer_types", None) or family.layers
    has_states = any(row.mixer is not None for name, row in family.layers.items() if name in kinds)
    return family.is_wrapped(config) or not (computes_all or has_states or family.sizes_by_layer)
