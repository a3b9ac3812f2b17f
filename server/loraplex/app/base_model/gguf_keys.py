"""The keys of a GGUF file's metadata: which of them are read, which change nothing, and which refuse the file.

The names are those of llama.cpp's package `gguf` and of its loader. A key behind the architecture's name, or behind
"tokenizer.", that is not in the table refuses the file: it may change what the model computes, or its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol

from loraplex.adapters.store.files import shown

READ: Literal["read"] = "read"
"""Part of what is made of the file."""
UNUSED: Literal["unused"] = "unused"
"""Without effect on an answer, whatever the value."""
Rule = Literal["read", "unused"] | tuple[Any, ...]
"""READ, UNUSED, or the values that change nothing: any other refuses the file."""
_OTHER_KINDS: Rule = ()
"""Keys of other architectures and of other kinds of file."""
ARCHITECTURE = "llama"

MODEL: Mapping[str, Rule] = {
    "vocab_size": READ,
    "context_length": READ,
    "embedding_length": READ,
    "block_count": READ,
    "feed_forward_length": READ,
    "attention.head_count": READ,
    "attention.head_count_kv": READ,
    "attention.key_length": READ,
    "attention.value_length": READ,
    "attention.layer_norm_rms_epsilon": READ,
    "attention.sliding_window": READ,
    "attention.scale": READ,
    "rope.dimension_count": READ,
    "rope.freq_base": READ,
    "rope.scale_linear": READ,
    "rope.scaling.type": READ,
    "rope.scaling.factor": READ,
    "rope.scaling.attn_factor": READ,
    "rope.scaling.original_context_length": READ,
    "rope.scaling.yarn_ext_factor": READ,
    "rope.scaling.yarn_attn_factor": READ,
    "rope.scaling.yarn_beta_fast": READ,
    "rope.scaling.yarn_beta_slow": READ,
    "rope.scaling.finetuned": UNUSED,
    # Llama's norms are RMS norms; the converter writes this one for configs that have both.
    "attention.layer_norm_epsilon": UNUSED,
    # The pooling of embeddings, which a request to /v1/embeddings chooses here.
    "pooling_type": UNUSED,
    "tensor_data_layout": ("Meta AI original pth",),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.freq_base_swa": _OTHER_KINDS,
    "rope.dimension_count_swa": _OTHER_KINDS,
    "rope.dimension_sections": ([0, 0, 0, 0],),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.output_scale": (0.0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window_pattern": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_chunk_feed_forward_length": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_gating_func": (0,),
    "expert_group_scale": (0.0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0.0, 1.0),
    "experts_per_group": (0,),
    "moe_every_n_layers": (0,),
    "moe_latent_size": (0,),
    "interleave_moe_layer_step": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "full_attention_interval": (0, 1),
    "use_parallel_residual": (False,),
    "swin_norm": (False,),
    "rescale_every_n_layers": (0,),
    **dict.fromkeys(
        (
            "embedding_length_out", "embedding_length_per_layer_input", "features_length", "decoder_start_token_id",
            "decoder_block_count", "time_mix_extra_dim", "time_decay_extra_dim", "token_shift_count",
            "activation_sparsity_scale", "swiglu_clamp_exp", "swiglu_clamp_shexp", "*_feat_in", "*_feat_out",
            "altup.*", "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.*_lora_rank",
            "attention.relative_buckets_count", "attention.key_length_mla", "attention.value_length_mla",
            "attention.key_length_swa", "attention.value_length_swa", "attention.indexer.*", "ssm.*", "kda.*",
            "wkv.*", "posnet.*", "convnext.*", "classifier.*", "shortconv.*",
        ),
        _OTHER_KINDS,
    ),
}  # fmt: skip
"""Keys behind "llama.", and behind other architectures' names where `OWN` has no other rule."""

_NO_WINDOW: Mapping[str, Rule] = {"attention.sliding_window": (0,)}
OWN: Mapping[str, Mapping[str, Rule]] = {
    "qwen2": _NO_WINDOW,
    "qwen3": _NO_WINDOW,
    "phi3": {},
    "gemma2": {
        "attn_logit_softcapping": READ,
        "final_logit_softcapping": READ,
        "attention.sliding_window_pattern": (0, 2),
    },
    "gemma3": {
        "final_logit_softcapping": READ,
        "attention.sliding_window_pattern": (0, 6),
        "rope.freq_base_swa": READ,
    },
}
"""The rules of architectures other than Llama's that are not Llama's."""

FILE: Mapping[str, Rule] = {
    "general.architecture": READ,
    "general.name": READ,
    "general.type": ("model",),
    # Named as those of a generation_config.json are.
    "general.sampling.*": READ,
    "general.*": UNUSED,
    "split.count": (0, 1),
    "split.*": UNUSED,
    "quantize.*": UNUSED,
    "imatrix.*": UNUSED,
    **dict.fromkeys(("adapter.*", "clip.*", "diffusion.*", "xielu.*"), _OTHER_KINDS),
}
"""Keys of the file. Others, of tools that keep notes of their own, change nothing."""

TOKENIZER: Mapping[str, Rule] = {
    "ggml.model": READ,
    "ggml.pre": READ,
    "ggml.tokens": READ,
    "ggml.token_type": READ,
    "ggml.merges": READ,
    "ggml.bos_token_id": READ,
    "ggml.eos_token_id": READ,
    "ggml.eot_token_id": READ,
    "ggml.eom_token_id": READ,
    "ggml.unknown_token_id": READ,
    "ggml.padding_token_id": READ,
    "ggml.seperator_token_id": READ,
    "ggml.cls_token_id": READ,
    "ggml.mask_token_id": READ,
    "ggml.fim_pad_token_id": READ,
    "ggml.fim_rep_token_id": READ,
    "ggml.fim_sep_token_id": READ,
    "ggml.add_bos_token": READ,
    "chat_template": READ,
    "chat_template.*": READ,
    "chat_templates": UNUSED,
    # Of byte-level BPE: merges alone decide.
    "ggml.scores": UNUSED,
    "ggml.token_type_count": UNUSED,
    # Infill is not served.
    "ggml.prefix_token_id": UNUSED,
    "ggml.suffix_token_id": UNUSED,
    "ggml.middle_token_id": UNUSED,
    "ggml.fim_pre_token_id": UNUSED,
    "ggml.fim_suf_token_id": UNUSED,
    "ggml.fim_mid_token_id": UNUSED,
    # The tokenizer's own file, which llama.cpp does not read either.
    "huggingface.json": UNUSED,
    "ggml.add_eos_token": (False,),
    "ggml.add_space_prefix": (False,),
    "ggml.add_sep_token": (False,),
    "ggml.remove_extra_whitespaces": (False,),
    "ggml.precompiled_charsmap": _OTHER_KINDS,
    "rwkv.world": _OTHER_KINDS,
}
"""Keys behind "tokenizer."."""


_OF_SENTENCEPIECE: Mapping[str, Rule] = {"ggml.scores": READ, "ggml.add_space_prefix": READ}


def rule_of(key: str, architecture: str = ARCHITECTURE, *, sentencepiece: bool = False) -> Rule | None:
    """The rule of a key of a file of `architecture`; None where no table has it. A table's longer pattern goes before a
    shorter one."""
    head, _, rest = key.partition(".")
    model = {**MODEL, **OWN.get(architecture, {})}
    words = {**TOKENIZER, **(_OF_SENTENCEPIECE if sentencepiece else {})}
    table, name = {architecture: (model, rest), "tokenizer": (words, rest)}.get(head, (FILE, key))
    if name in table:
        return table[name]
    found = [pattern for pattern in table if "*" in pattern and fnmatchcase(name, pattern)]
    if found:
        return table[max(found, key=len)]
    return UNUSED if table is FILE else None


class Pairs(Protocol):
    """The key-value pairs of a file."""

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, key: str) -> Any: ...


def obstacle(metadata: Pairs, *, tokenizer: bool, model: bool) -> str | None:
    """Why a file with these metadata is refused; None where nothing is in the way. `model`, `tokenizer`: that part is
    made of the metadata, and not of files beside the GGUF."""
    architecture = metadata["general.architecture"]
    sentencepiece = "tokenizer.ggml.model" in iter(metadata) and metadata["tokenizer.ggml.model"] == "llama"
    for key in metadata:
        if (key.startswith(f"{architecture}.") and not model) or (
            key.startswith("tokenizer.") and not tokenizer
        ):
            continue
        rule = rule_of(key, architecture, sentencepiece=sentencepiece)
        if rule is None:
            return f"its metadata have {key}, which is not known here and may change what is computed"
        if isinstance(rule, tuple) and not any(_is_equal(metadata[key], harmless) for harmless in rule):
            served = f"; served is {' or '.join(map(shown, rule))}" if rule else ""
            return f"its metadata's {key} is {shown(metadata[key])}, which is not served{served}"
    return None


def _is_equal(value: Any, harmless: Any) -> bool:
    return isinstance(value, bool) == isinstance(harmless, bool) and value == harmless
