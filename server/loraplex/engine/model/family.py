"""The decoder families of `FusedDecoder`, and what a config must say to be one of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.model.base import ModelUnsupported

_log = logging.getLogger(__name__)

_NO_EFFECT = frozenset(
    {
        "_name_or_path", "_model_name_or_path",
        "architectures", "transformers_version", "torch_dtype", "dtype", "model_type",
        "use_cache", "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id",
        "problem_type", "initializer_range", "attention_dropout", "pad_token_id", "bos_token_id", "eos_token_id",
        "unk_token_id", "sep_token_id", "decoder_start_token_id", "chunk_size_feed_forward", "pretraining_tp",
        "rope_interleaved", "is_llama_config", "_attn_implementation_autoset", "max_length", "min_length",
        "do_sample", "temperature", "top_k", "top_p", "task_specific_params", "finetuning_task",
        "tokenizer_class", "prefix", "torchscript", "use_bfloat16", "_attn_implementation",
        "attn_implementation", "bias_init", "max_window_layers", "resid_pdrop", "embd_pdrop", "auto_map",
    }
)  # fmt: skip
"""Config fields that do not change what an inference step computes."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "is_causal": (True,),
    "tie_encoder_decoder": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "clip_qkv": (None,),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "no_rope_layers": (None,),
    "full_attn_mod": (None, 1),
    "interpolate_factor": (None, 1),
    "lm_head_bias": (False,),
}
"""Fields that would change the computation in a way that `FusedDecoder` does not know, and their harmless values."""

_HANDLED = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias",
        "sliding_window", "use_sliding_window", "layer_types", "original_max_position_embeddings",
    }
)  # fmt: skip

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of RoPE whose frequencies do not depend on the length of the batch."""

_ROPE_FIELDS = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
    "yarn": {
        "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family does beside Llama's plan. None for a bias: the config's own field decides."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    sliding: bool = False
    packed: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(None, None, None),  # SmolLM and SmolLM2 are of this model type too
    "mistral": _Family(False, False, False, sliding=True),
    "qwen2": _Family(True, False, False, sliding=True),
    "qwen3": _Family(None, None, False, qk_norm=True, sliding=True),
    "phi3": _Family(False, False, False, sliding=True, packed=True),
}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A member of a family, with every number that its forward pass needs. `windows[i]` is layer i's sliding
    window (None: it sees everything). `packed` says that the checkpoint has qkv_proj and gate_up_proj, in the order
    of our own packed weights; adapters then have them as one site each."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    packed: bool
    tied: bool
    windows: tuple[int | None, ...]
    inv_freq: torch.Tensor
    """[head_dim/2] float32."""
    rope_attention_factor: float


def is_fused(model_type: str) -> bool:
    return model_type in _FAMILIES


def decoder_spec(config: Any, raw: Mapping[str, Any]) -> DecoderSpec:
    """Read a transformers config. `raw` is its config.json: there a field that neither we nor transformers know is
    seen. Raises ModelUnsupported for anything that would make the computation another one than ours."""
    family = _FAMILIES[config.model_type]
    _check_fields(config, raw)
    if config.hidden_act not in ("silu", "swish"):
        raise ModelUnsupported(
            f"hidden_act is {config.hidden_act!r}; {config.model_type} is served with 'silu'"
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
    inv_freq, factor = _rope(config)
    return DecoderSpec(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        packed=family.packed,
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config, family),
        inv_freq=inv_freq,
        rope_attention_factor=factor,
    )


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """Raises ModelUnsupported."""
    path = model_dir / "config.json"
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{path} is not a JSON object")
    return value


def _check_fields(config: Any, raw: Mapping[str, Any]) -> None:
    declared = {name for cls in type(config).__mro__ for name in getattr(cls, "__annotations__", {})}
    for name, value in raw.items():
        if name in _NO_EFFECT or name in _HANDLED:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ModelUnsupported(f"the config's {name} is {value!r}, which is not supported")
        elif name in declared:
            raise ModelUnsupported(
                f"the config's {name} is not known here, though transformers defines it for {config.model_type}"
            )
        else:
            # transformers, which defines the architecture, has no such field either.
            _log.warning("config.json has %s, which %s does not define: ignored", name, config.model_type)


def _rope(config: Any) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        raise ModelUnsupported(
            f"rope_type {rope_type!r} is not supported; supported are {', '.join(sorted(STATIC_ROPE_TYPES))}"
        )
    unknown = {
        name
        for name, value in parameters.items()
        if value is not None
        and name not in _ROPE_FIELDS[rope_type]
        and name not in ("rope_type", "type")
        and not (name == "partial_rotary_factor" and value == 1)
        # A leftover of a scaling that the type does not ask for.
        and not (name == "original_max_position_embeddings" and rope_type in ("default", "linear"))
    }
    if unknown:
        raise ModelUnsupported(
            f"the RoPE parameters {', '.join(sorted(unknown))} are not known for {rope_type!r}"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    try:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelUnsupported(f"the RoPE parameters of {rope_type!r} are not valid: {error!r}") from error
    return inv_freq.float(), float(factor)


def _windows(config: Any, family: _Family) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if not family.sliding:
        if window is not None:
            raise ModelUnsupported(f"sliding_window {window} is not known for {config.model_type}")
        return (None,) * layers
    types = getattr(config, "layer_types", None)
    if types is None or config.model_type in ("mistral", "phi3"):
        return (window,) * layers
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if len(types) != layers or not set(types) <= known.keys():
        raise ModelUnsupported(
            f"layer_types of {config.model_type} must name full_attention or sliding_attention {layers} times"
        )
    return tuple(known[kind] for kind in types)
