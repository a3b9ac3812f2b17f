"""The families of models in GGUF files: names of tensors, and keys that stand for fields of config.json.

The names are those of llama.cpp's package `gguf`; what a key means, and what stands where a file has none, is what
llama.cpp's converter writes and its loader takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.app.base_model.gguf_file import Metadata

_ALL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_down": "mlp.down_proj",
}
_SEPARATE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_PERIODS = {"gemma2": 2, "gemma3": 6}
"""The distance between two layers that see all positions; those between them see a window."""
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B, whose scores are scaled by another number than the size of a head."""


class ModelKeys:
    """The keys of one file behind its architecture's name, such as "block_count"."""

    def __init__(self, metadata: Metadata) -> None:
        """Raises GgufUnsupported where the file names no architecture."""
        self._metadata = metadata
        self.architecture: str = metadata["general.architecture"]

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def __getitem__(self, name: str) -> Any:
        """Raises GgufUnsupported as `Metadata` does."""
        return self._metadata[self.key(name)]

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(self.key(name), default)

    @property
    def window(self) -> int | None:
        """The positions that a window has; None where it leaves none out."""
        window: int = self.get("attention.sliding_window", 0)
        return window if 0 < window < self["context_length"] else None


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture. `model_types` are those of transformers that it may be."""

    title: str
    model_types: tuple[str, ...]
    names: Mapping[str, str]
    """Tensors by llama.cpp's names, without layer and kind."""
    fields: Callable[[ModelKeys, dict[str, Any]], dict[str, Any]]
    """The fields of config.json that are not every family's, of the keys and of the rope's parameters."""
    biases: frozenset[str] = field(default=frozenset())
    """Tensors that have a bias."""
    is_interleaved: bool = False
    """Whether the rows of q and k are interleaved by heads."""
    norm_shift: float = 0.0
    """A number that the converter added to the weights of norms."""
    rotates_part: bool = False
    """Whether a part of each head may be rotated alone."""


def _llama(keys: ModelKeys, rope: dict[str, Any]) -> dict[str, Any]:
    """Llama, or Mistral where positions see a window: llama.cpp has one architecture for both."""
    if keys.window is not None:
        return {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": keys.window,
            "hidden_act": "silu",
        }  # fmt: skip
    biases = {"attention_bias": False, "mlp_bias": False}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **biases,
    }


def _qwen2(keys: ModelKeys, rope: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}


def _qwen3(keys: ModelKeys, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
    }


def _phi3(keys: ModelKeys, rope: dict[str, Any]) -> dict[str, Any]:
    context = keys["context_length"]
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": keys.window,
        "original_max_position_embeddings": int(keys.get("rope.scaling.original_context_length", context)),
        "pad_token_id": None,
    }


def _gemma(keys: ModelKeys) -> dict[str, Any]:
    name, layers = keys.architecture, keys["block_count"]
    share = keys["embedding_length"] // keys["attention.head_count"]
    scaled_by = share if layers == _LARGEST_GEMMAS[name] else keys.get("attention.key_length", share)
    window, period = (
        keys.get("attention.sliding_window", 4096 if name == "gemma2" else 0),
        _GEMMA_PERIODS[name],
    )
    return {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": window or 4096,
        "layer_types": [
            "sliding_attention" if window and (layer + 1) % period else "full_attention"
            for layer in range(layers)
        ],
    }


def _gemma2(keys: ModelKeys, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(keys),
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(keys: ModelKeys, rope: dict[str, Any]) -> dict[str, Any]:
    """The rope's scaling is that of layers that see all positions."""
    own = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    return {
        **_gemma(keys),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "final_logit_softcapping": keys.get("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {"full_attention": rope, "sliding_attention": own},
    }


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("Llama", ("llama", "mistral"), _ALL | _SEPARATE, _llama, is_interleaved=True),
    "qwen2": GgufFamily(
        "Qwen2", ("qwen2",), _ALL | _SEPARATE, _qwen2, biases=frozenset({"attn_q", "attn_k", "attn_v"})
    ),
    "qwen3": GgufFamily("Qwen3", ("qwen3",), _ALL | _SEPARATE | _QK_NORMS, _qwen3),
    "phi3": GgufFamily(
        "Phi-3",
        ("phi3",),
        _ALL | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        _phi3,
        rotates_part=True,
    ),
    "gemma2": GgufFamily("Gemma 2", ("gemma2",), _ALL | _SEPARATE | _NORMS_BEHIND, _gemma2, norm_shift=1.0),
    "gemma3": GgufFamily(
        "Gemma 3", ("gemma3_text",), _ALL | _SEPARATE | _NORMS_BEHIND | _QK_NORMS, _gemma3, norm_shift=1.0
    ),
}
"""The families by llama.cpp's names of architectures."""
