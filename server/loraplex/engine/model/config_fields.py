"""Which fields of a config.json are understood: a field that would change the computation must not be overlooked."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.files import shown
from loraplex.engine.model.base import ModelUnsupported

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
        "cache_implementation", "residual_dropout",
    }
)  # fmt: skip
"""Config fields that do not change what an inference step computes."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "is_causal": (True,),
    "tie_encoder_decoder": (False,),
    "use_bidirectional_attention": (None, False),
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
    "attention_out_bias": (False,),
    "use_bias": (None, False),
}
"""Fields that would change the computation in a way that `FusedDecoder` does not know, and their harmless values."""

_HANDLED = frozenset(
    {
        "quantization_config",
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias",
        "sliding_window", "use_sliding_window", "layer_types",
    }
)  # fmt: skip


_MOST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "block_ff_dim": 1 << 24,
    "block_multiple_of": 1 << 24,
    "vocab_size": 1 << 26,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size_per_layer_input": 1 << 16,
    "vocab_size_per_layer_input": 1 << 26,
    "max_position_embeddings": 1 << 40,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
    "linear_conv_kernel_dim": 1 << 16,
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), 10_000),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 10_000),
    **dict.fromkeys(("n_embd", "d_model"), 1 << 20),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_kv_heads"), 1 << 16),
    **dict.fromkeys(("n_positions", "max_seq_len", "seq_length"), 1 << 24),
    "n_inner": 1 << 24,
}


_MAY_BE_ZERO = frozenset({"hidden_size_per_layer_input", "num_nextn_predict_layers", "num_mtp_layers"})


def read_config_json(model_dir: Path) -> tuple[bytes, dict[str, Any]]:
    """The file, and the object in it. Raises ModelUnsupported."""
    path = model_dir / "config.json"
    try:
        content = path.read_bytes()
        value = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnsupported(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnsupported(f"{path} is not a JSON object")
    return content, value


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raises ModelUnsupported, `what` and the reason in one line, for an error of any kind that transformers raises: by
    the validators of configs, by fields that have another value in each layer, by a model's own code."""
    try:
        yield
    except LoraplexError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if isinstance(error, LookupError | AttributeError | TypeError) or not reason:
            reason = f"{type(error).__name__}: {reason}"
        raise ModelUnsupported(f"{what}: {reason[:300]}") from error


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported for sizes of no model, before anything is made of as many parts."""
    for name, most in _MOST.items():
        value = fields.get(name)
        if value is None or isinstance(value, list) or (value == 0 and name in _MAY_BE_ZERO):
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise ModelUnsupported(f"the config's {name} is {shown(value)}, not a number from 1 to {most}")


def check_fields(
    config: Any, raw: Mapping[str, Any], handled: Collection[str], harmless: Mapping[str, tuple[Any, ...]]
) -> tuple[str, ...]:
    """The fields that mean nothing: transformers, which defines the architecture, has none of that name either.
    `handled` are those that the family itself adds to those that all have, `harmless` values that change nothing in
    it. Raises ModelUnsupported for a field that means something to transformers and not to us."""
    unknown: list[str] = []
    neutral = {**_NEUTRAL, **harmless}
    declared = {name for cls in type(config).__mro__ for name in getattr(cls, "__annotations__", {})}
    for name, value in raw.items():
        if name in _NO_EFFECT or name in _HANDLED or name in handled:
            continue
        if name in neutral:
            if value not in neutral[name]:
                raise ModelUnsupported(f"the config's {name} is {shown(value)}, which is not supported")
        elif name in declared:
            raise ModelUnsupported(
                f"the config's {name} is not known here, though transformers defines it for {config.model_type}"
            )
        else:
            unknown.append(name)
    return tuple(unknown)
