"""The families of models that are known not to be served, each with the reason. Read from config.json alone, so that
the server, its engine, `loraplex doctor` and `loraplex plan` give one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REASONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        "it stores its linears as [in, out], in an own kind of module",
        {"gpt2": "GPT-2", "openai-gpt": "GPT"},
    ),
    (
        "its attention is of another kind than the paged attention computes",
        {
            "bloom": "BLOOM", "codegen": "CodeGen", "ctrl": "CTRL", "falcon": "Falcon", "gpt_bigcode": "StarCoder",
            "gpt_neo": "GPT-Neo", "gpt_neox_japanese": "GPT-NeoX Japanese", "gptj": "GPT-J", "mpt": "MPT",
            "jetmoe": "JetMoE", "diffllama": "DiffLlama", "doge": "Doge", "llama4_text": "Llama 4",
        },
    ),
    ("its attention has sinks, which the paged attention does not compute", {"gpt_oss": "gpt-oss"}),
    (
        "its attention keeps compressed keys and values, for which the KV cache has no layout",
        {"deepseek_v2": "DeepSeek-V2", "deepseek_v3": "DeepSeek-V3", "kimi_k2": "Kimi K2", "minicpm3": "MiniCPM3"},
    ),
    (
        "it has recurrent states, which the KV cache does not hold",
        {
            "bamba": "Bamba", "falcon_h1": "Falcon-H1", "falcon_mamba": "Falcon Mamba", "jamba": "Jamba",
            "mamba": "Mamba", "mamba2": "Mamba 2", "recurrent_gemma": "RecurrentGemma", "rwkv": "RWKV",
            "lfm2": "LFM2", "qwen3_next": "Qwen3-Next", "zamba": "Zamba",
            "zamba2": "Zamba2", "xlstm": "xLSTM",
        },
    ),
    (
        "it is an encoder, which writes no text",
        {
            "albert": "ALBERT", "bert": "BERT", "deberta": "DeBERTa", "deberta-v2": "DeBERTa-v2",
            "distilbert": "DistilBERT", "electra": "ELECTRA", "modernbert": "ModernBERT", "mpnet": "MPNet",
            "nomic_bert": "Nomic BERT", "roberta": "RoBERTa", "xlm-roberta": "XLM-RoBERTa",
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
_ENDS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "Model")


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the fields of its text part, where the model also sees or hears, in place of its own."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def obstacle_of(config: Mapping[str, Any]) -> str | None:
    """Why a model of this config.json is not served, in a sentence that begins with its name; None where nothing is
    known against it. `config` is what `text_fields` gives."""
    classes = config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    model_type = config.get("model_type")
    if model_type is None:
        model_type = _type_of_class(named)
    known = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if known is not None:
        return f"{known[0]} is not served: {known[1]}"
    if not isinstance(model_type, str):
        of = f" (of {named[:60]!a})" if named else ""
        return f"config.json{of} has no model_type, by which families are told apart: add the one that transformers has"
    return None


def _type_of_class(name: str) -> str | None:
    """The model type that a class of transformers is of, where it is a family of ours: old configs have only that."""
    for end in _ENDS:
        name = name.removesuffix(end)
    return _CLASSES.get(name.lower())
