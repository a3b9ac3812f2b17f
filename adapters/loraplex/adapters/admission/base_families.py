"""Why families of models are not served, read from config.json alone: the server, its engine, `loraplex doctor` and
`loraplex plan` give one answer, before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraplex.adapters.admission.model_parts import parts_of
from loraplex.adapters.store.files import shown
from loraplex.kernels.lora.site_groups import LAYER_SITES

_RECURRENT = "it has recurrent states, which the KV cache does not hold"
CONVOLUTION = "its layers mix neighbouring positions by convolutions, which the KV cache does not hold"
_LATENT = "its attention keeps compressed keys and values (MLA), for which the KV cache has no layout"
_INDEXED = "its attention reads the keys that an indexer chooses, which the paged attention does not compute"
_CHUNKED = "its attention reads chunks of positions, which the paged attention does not compute"
_OWN_CODE = (
    "transformers computes its attention in the model's own code, which the paged attention cannot replace"
)
_OWN_SIZES = "its config.json counts layers and heads by names of its own, which the KV cache is not sized by"
NO_SITES = f"it has none of the linears that adapters change ({', '.join(LAYER_SITES)})"
_ENCODER = "it is an encoder, which writes no text"

_REASONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        "it stores its linears as [in, out], in an own kind of module",
        {"openai-gpt": "GPT"},
    ),
    (
        _OWN_CODE,
        {"cpmant": "CPM-Ant", "gpt_neox_japanese": "GPT-NeoX Japanese", "xglm": "XGLM"},
    ),
    (_OWN_SIZES, {"ctrl": "CTRL", "dbrx": "DBRX"}),
    ("its attention subtracts one map from another, which the paged attention does not compute",
     {"diffllama": "DiffLlama"}),
    ("its attention masks keys by their values, which the paged attention does not compute", {"doge": "Doge"}),
    ("its queries come from experts, each with heads of its own", {"jetmoe": "JetMoE"}),
    ("its layers run several times for each token", {"hrm_text": "HRM"}),
    ("it reads bytes in patches, through an encoder and a decoder of its own", {"blt": "BLT"}),
    (_CHUNKED, {"llama4_text": "Llama 4"}),
    (
        "its values are narrower than its keys, for which the KV cache has no layout",
        {"mimo_v2_flash": "MiMo-V2-Flash"},
    ),
    (
        _LATENT,
        {
            "axk1": "A.X K1", "deepseek_v2": "DeepSeek-V2", "deepseek_v3": "DeepSeek-V3", "deepseek_v4": "DeepSeek-V4",
            "kimi_k2": "Kimi K2", "longcat_flash": "LongCat-Flash", "minicpm3": "MiniCPM3", "youtu": "Youtu",
        },
    ),
    (
        _RECURRENT,
        {
            "falcon_h1": "Falcon-H1", "falcon_mamba": "Falcon Mamba", "jamba": "Jamba",
            "mamba": "Mamba", "mamba2": "Mamba 2", "minimax": "MiniMax",
            "recurrent_gemma": "RecurrentGemma", "rwkv": "RWKV", "xlstm": "xLSTM",
            "zamba": "Zamba", "zamba2": "Zamba2", "zaya": "ZAYA",
        },
    ),
    (CONVOLUTION, {"lfm2_moe": "LFM2-MoE", "inkling2": "Inkling 2"}),
    (
        _ENCODER,
        {
            "albert": "ALBERT", "bert": "BERT", "deberta": "DeBERTa", "deberta-v2": "DeBERTa-v2",
            "distilbert": "DistilBERT", "electra": "ELECTRA", "modernbert": "ModernBERT", "mpnet": "MPNet",
            "nomic_bert": "Nomic BERT", "roberta": "RoBERTa", "xlm": "XLM", "xlm-roberta": "XLM-RoBERTa",
        },
    ),
    (
        "it is an encoder with a decoder; only decoders are served",
        {
            "bart": "BART", "led": "LED", "m2m_100": "M2M-100", "marian": "Marian", "mbart": "mBART", "mt5": "mT5",
            "pegasus": "PEGASUS", "t5": "T5", "umt5": "UMT5", "whisper": "Whisper",
        },
    ),
)  # fmt: skip
_FAMILIES: Mapping[str, tuple[str, str]] = {
    model_type: (name, reason) for reason, names in _REASONS for model_type, name in names.items()
}
_CLASSES: Mapping[str, str] = {
    model_type.replace("-", "").replace("_", ""): model_type for model_type in _FAMILIES
}
_PATTERN = "hybrid_override_pattern"
"""The kinds of Nemotron-H's layers, a letter each."""
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types", _PATTERN)
_LAYER_KINDS: Mapping[str, frozenset[str]] = {
    _RECURRENT: frozenset({"linear_attention", "mamba", "recurrent", "hybrid", "hybrid_sliding"}),
    CONVOLUTION: frozenset({"conv"}),
    _INDEXED: frozenset(
        {
            "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "compressed_sparse_attention",
            "heavily_compressed_attention", "minimax_m3_sparse",
        }
    ),
    _CHUNKED: frozenset({"chunked_attention"}),
    "its layers have experts, which the fused decoder does not compute": frozenset({"moe", "E"}),
}  # fmt: skip
"""Kinds of layers, of those that transformers knows, by what is in the way: in families that are not listed too."""
_SERVED_KINDS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("lfm2", "lfm3"), frozenset({"conv"})),
    **dict.fromkeys(
        ("olmo_hybrid", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
        frozenset({"linear_attention"}),
    ),
    **dict.fromkeys(("bamba", "granitemoehybrid", "nemotron_h"), frozenset({"mamba", "linear_attention"})),
}
_SIZES: Mapping[str, str] = {
    "kv_lora_rank": _LATENT,
    "index_topk": _INDEXED,
}
"""Fields that are a number above 0, or true, where this is in the way."""
_OTHER_INPUTS = ("vision_config", "audio_config", "vision_tower", "speech_config", "vq_config")
_MULTIMODAL = ("phi4_multimodal",)
"""Types that have no config for what they see or hear where `_OTHER_INPUTS` would find it."""
ROUTED = frozenset(
    {
        "gemma4", "gemma4_text", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "mixtral", "olmoe",
        "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next",
    }
)  # fmt: skip
"""Types of mixtures whose routers, and gates of shared experts, adapters may change."""
EXPERTS_SERVED = frozenset(
    {
        "gemma4", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "mixtral",
        "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next",
    }
)  # fmt: skip
"""Types of mixtures whose routed experts adapters may change: each is compared with PEFT in
`tests/engine/model/layers/test_expert_adapters.py`."""
ANSWER_FILE = "1_LogitScore/config.json"
"""The file in which sentence-transformers names the tokens whose logits a reranker compares."""
_ENDS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "Model")


def whole_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json without what stands around the model that writes text: of Qwen's Omni models, which speak too, that
    is one of their parts."""
    thinker = config.get("thinker_config")
    return (
        {"model_type": f"{config.get('model_type')}_thinker", **thinker}
        if isinstance(thinker, dict)
        else config
    )


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the fields of its text part, where the model also sees or hears, in place of its own. The head
    is the whole's: so is whether it is tied. None: where there is no tensor of it, as in files from before transformers
    5, which said so in the text part, and in those that leave it to the whole's default."""
    config = whole_fields(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        return _with_count(config)
    fields, tied = {**config, **text}, "tie_word_embeddings"
    whole, part = config.get(tied), text.get(tied)
    if tied in fields:
        says_nothing = part is True if whole is False else whole is None and part is False
        fields[tied] = None if says_nothing else part if whole is None else whole
    return fields


def _with_count(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with the number of layers that Nemotron-H's kinds of layers are."""
    fields = dict(config)
    kinds = fields.get("layers_block_type") or fields.get(_PATTERN)
    if fields.get("model_type") == "nemotron_h" and isinstance(kinds, list | str):
        fields["num_hidden_layers"] = len(kinds)
    return fields


def obstacle_of(config: Mapping[str, Any]) -> str | None:
    """Why a model of this config.json is not served, in a sentence that begins with its name; None where nothing is
    known against it."""
    if (obstacle := _obstacle_of_text(text_fields(config))) is not None:
        return obstacle
    model_type = config.get("model_type")
    name = shown(model_type).strip("'")
    if config.get("is_encoder_decoder") is True:
        return f"{name} is an encoder with a decoder; only decoders are served"
    whole = whole_fields(config)
    sees = model_type in _MULTIMODAL or any(whole.get(part) is not None for part in _OTHER_INPUTS)
    if sees and not parts_of(model_type).others:
        return f"{name} is multimodal, and its text part is not served; docs/models.md lists those that are"
    return None


def _obstacle_of_text(config: Mapping[str, Any]) -> str | None:
    named = class_of(config)
    model_type = config.get("model_type")
    if model_type is None:
        model_type = _type_of_class(named)
    if not isinstance(model_type, str):
        of = f" (of {named[:60]!a})" if named else ""
        return f"config.json{of} has no model_type, by which families are told apart: add the one that transformers has"
    known = _FAMILIES.get(model_type)
    name, reason = known if known is not None else (shown(model_type)[1:-1], _property_of(config))
    return None if reason is None else not_served(name, reason)


def class_of(config: Mapping[str, Any]) -> str:
    """The class of transformers that a config.json names; empty where it names none."""
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""


def not_served(name: str, reason: str) -> str:
    """The sentence about a family that cannot be served at all."""
    return f"{name} is not served: {reason}; docs/models.md lists the families that are"


def _property_of(config: Mapping[str, Any]) -> str | None:
    """The reason, and the field that tells of it."""
    for field in _KINDS_OF_LAYERS:
        found = config.get(field)
        listed = found if isinstance(found, list) or (field == _PATTERN and isinstance(found, str)) else ()
        kinds = {kind for kind in listed if isinstance(kind, str)}
        kinds -= _SERVED_KINDS.get(str(config.get("model_type")), frozenset())
        for reason, names in _LAYER_KINDS.items():
            if told := sorted(kinds & names):
                return f"{reason} ({field}: {told[0]})"
    for field, reason in _SIZES.items():
        size = config.get(field)
        if isinstance(size, int) and size > 0:
            return f"{reason} ({field}: {size})"
    return None


def _type_of_class(name: str) -> str | None:
    """The model type that a class of transformers is of, where it is a family of ours: old configs have only that."""
    for end in _ENDS:
        name = name.removesuffix(end)
    return _CLASSES.get(name.lower())
