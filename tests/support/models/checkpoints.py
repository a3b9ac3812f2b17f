"""Tiny random checkpoints of real architectures, and the flat batches to run them with."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.kv.cache import KVCache
from loraplex.engine.kv.layers import keeping_all
from loraplex.engine.model.base import ForwardBatch, LoraPass, Model
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.torch_attention import TorchAttention, build_attention_batch
from loraplex.kernels.recurrent.types import RecurrentUnit, lay_out_units

VOCAB = 131

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 9,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
_GEMMA4_DENSE: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama-3.1": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1,
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        },
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "llama-dynamic-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama-yarn-mscale": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False,
        },
    },
    "phi3": {"model_type": "phi3", "sliding_window": 13},
    "phi3-partial": {
        "model_type": "phi3", "num_key_value_heads": 4, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "phi3-longrope": {
        "model_type": "phi3", "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7],
            "long_factor": [1.0, 2.0, 5.0, 9.0],
        },
    },
    "gemma2": {
        "model_type": "gemma2", "head_dim": 24, "sliding_window": 9, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma2-no-caps": {
        "model_type": "gemma2", "head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
        },
    },
    # The dense plan of 31B, of 12B, and that of E2B.
    "gemma4": {**_GEMMA4, **_GEMMA4_DENSE, "hidden_size_per_layer_input": 0},
    "gemma4-unified": {**_GEMMA4, **_GEMMA4_DENSE, "model_type": "gemma4_unified_text"},
    "gemma4-e2b": {
        **_GEMMA4, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
    },
    "lfm2": {
        "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [1],
        "block_multiple_of": 16,
    },
    "lfm3": {
        "model_type": "lfm3", "layer_types": ["sliding_attention", "conv", "full_attention"], "head_dim": 16,
        "sliding_window": 9,
    },
    "lfm3-plain": {
        "model_type": "lfm3", "layer_types": ["conv", "full_attention", "conv"], "head_dim": 8, "attention_bias": True,
        "conv_bias": True, "use_sandwich_norm": False, "use_attention_gate": False, "tie_word_embeddings": False,
    },
    "lfm2-biases": {
        "model_type": "lfm2", "layer_types": ["full_attention", "conv", "conv"], "conv_bias": True, "conv_L_cache": 7,
        "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
    },
    # Value heads of each key head: 1, 2 and 3.
    **{
        f"qwen3_5-{values // keys}": {
            "model_type": "qwen3_5_text", "head_dim": 16, "layer_types": types, "num_hidden_layers": len(types),
            "linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        }
        for keys, values, types in (
            (2, 2, ["linear_attention", "full_attention", "linear_attention"]),
            (1, 2, ["linear_attention", "linear_attention", "full_attention"]),
            (1, 3, ["full_attention", "linear_attention", "linear_attention"]),
        )
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64,
        "rope_parameters": None,
    },
    "granite4-h": {
        "model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48, "mamba_n_heads": 2,
        "mamba_d_state": 32, "mamba_d_head": 32, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.7, "attention_multiplier": 0.2, "mamba_proj_bias": True, "tie_word_embeddings": True,
    },
    # Heads of half a strip of a state.
    "qwen3_5-narrow": {
        "model_type": "qwen3_5_text", "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "granite4-h-limits": {
        "model_type": "granitemoehybrid", "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48, "mamba_n_heads": 8,
        "mamba_d_state": 16, "mamba_d_head": 16, "mamba_expand": 4, "mamba_conv_bias": False, "mamba_n_groups": 4,
        "position_embedding_type": "rope", "time_step_limit": [0.4, 0.9],
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "head_dim": 8, "mamba_num_heads": 4,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32, "chunk_size": 16,
    },
    "nemotron_h-biases": {
        "model_type": "nemotron_h", "layers_block_type": ["mlp", "full_attention", "linear_attention"], "head_dim": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 8, "ssm_state_size": 16, "conv_kernel": 3,
        "use_bias": True, "mlp_bias": True, "use_conv_bias": False, "time_step_min": 0.4, "chunk_size": 16,
    },
    "granite4": {
        "model_type": "granitemoehybrid", "layer_types": ["full_attention"] * 3, "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 48, "attention_multiplier": 0.3, "mamba_n_heads": 2,
    },
    # A dense layer between mixtures; weights of experts as they are, divided by their sum, and in float32.
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": [1],
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "use_sliding_window": True,
        "sliding_window": 11, "max_window_layers": 1,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    # Experts beside the feed-forward, which read the residual; a layer that reads another's keys, wider.
    "gemma4-moe": {
        **_GEMMA4, **_GEMMA4_DENSE, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    # A softmax over the chosen experts alone, with multipliers; with a shared feed-forward, and behind Mamba-2.
    "granitemoe": {
        "model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2,
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 24,
        "shared_intermediate_size": 40, "residual_multiplier": 0.7, "attention_multiplier": 0.2,
    },
    "granite4-tiny": {
        "model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "shared_intermediate_size": 40,
        "mamba_n_heads": 2, "mamba_d_state": 32, "mamba_d_head": 32, "embedding_multiplier": 3.0,
        "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2,
    },
    "glm4_moe": {
        "model_type": "glm4_moe", "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0,
    },
    # Sinks, biases everywhere, and windows in every other layer.
    "gpt_oss": {
        "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9,
        "intermediate_size": 24, "swiglu_limit": 0.4,
    },
    "mixtral": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
        "sliding_window": 9,
    },
    # Delta nets, and a shared expert behind a gate in each layer; by key head, with a dense layer.
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text", "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 64, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": False,
    },
    "olmo_hybrid-rope": {
        "model_type": "olmo_hybrid", "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_allow_neg_eigval": False, "num_key_value_heads": 1,
    },
}  # fmt: skip
"""What `FusedDecoder` serves."""

OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 9},
}  # fmt: skip
"""What `TransformersDecoder` serves without a probe at start."""


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
_SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {**_VISION, "image_size": 16}, "mm_tokens_per_image": 1, "image_token_index": 130,
        "boi_token_index": 128, "eoi_token_index": 129,
    },
    "gemma4": {"vision_config": {**_VISION, "num_key_value_heads": 2, "head_dim": 8}},
    "gemma4_unified": {
        "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 8}
    },
}  # fmt: skip


def save_tiny(out: Path, overrides: dict[str, Any], *, seed: int = 0, **save: Any) -> Path:
    """A random model of `overrides["model_type"]` as safetensors in `out`, in float32."""
    from transformers import AutoConfig

    options = {**_COMMON, **overrides}
    return _save(AutoConfig.for_model(**options), out, seed, save)


def save_tiny_gemma3_with_vision(out: Path, overrides: dict[str, Any], *, seed: int = 0, **save: Any) -> Path:
    """The same for a Gemma 3 that also sees; `overrides` are of its text part."""
    return save_tiny_with_vision(out, "gemma3", overrides, seed=seed, **save)


def save_tiny_with_vision(
    out: Path, kind: str, overrides: dict[str, Any], *, seed: int = 0, **save: Any
) -> Path:
    """The same for a model of `_SEEING`; `overrides` are of its text part."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, text_config={**_COMMON, **overrides}, **_SEEING[kind])
    return _save(config, out, seed, save)


def _save(config: Any, out: Path, seed: int, save: dict[str, Any]) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        # Larger than usual, so that attention is sharp and an error anywhere shows in the logits.
        # Gemma before the fourth adds 1 to them.
        centered = (
            not config.model_type.startswith(("gemma", "qwen3_5", "qwen3_next"))
            or "gemma4" in config.model_type
        )
        center = 1.0 if "norm" in name and name.endswith("weight") and centered else 0.0
        center = 1.0 if name.endswith("linear_attn.norm.weight") else center
        weight.data.normal_(center, 0.25, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3, generator=generator)
    model.save_pretrained(out, **save)
    return out


def edit_config(model_dir: Path, **changes: Any) -> None:
    """Change fields of config.json; a value of None removes the field."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def experts_in(dtype: torch.dtype) -> dict[str, str]:
    """The way in which transformers computes experts: torch has no product of groups in float64."""
    return {"experts_implementation": "eager"} if dtype is torch.float64 else {}


def reference_logits(
    model_dir: Path, prompts: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """[L, V] float32 a prompt, by transformers with its eager attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, attn_implementation="eager", **experts_in(dtype)
    ).eval()
    with torch.no_grad():
        return [model(torch.tensor([p]), use_cache=False).logits[0].float() for p in prompts]


class PagedRun:
    """Sequences on a model, in any slices one likes, each with blocks scattered over a dirty cache."""

    def __init__(
        self,
        model: Model,
        prompts: list[list[int]],
        *,
        seed: int = 0,
        gather_blocks: int = 1024,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-len(p) // BLOCK_SIZE) for p in prompts]
        shuffled = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        self.tables = [[shuffled.pop() for _ in range(n)] for n in needed]
        self.model = model
        self.prompts = prompts
        self.gather_blocks = gather_blocks
        self.done = [0] * len(prompts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.kv = KVCache(
            keeping_all(model.shape.caches),
            sum(needed) + 3,
            kv_dtype or model.dtype,
            model.device,
            num_states=len(prompts),
            num_windows=len(prompts),
        )
        self.kv.states.fill_(0xFF)  # NaN too
        # Scales of codes are NaN then too.
        self.kv.tensor.fill_(127 if kv_dtype is torch.int8 else float("nan"))

    @torch.inference_mode()
    def step(
        self, counts: dict[int, int], lora: LoraPass | None = None, head_lora: LoraPass | None = None
    ) -> None:
        """Compute the next counts[i] positions of each sequence i, in the dict's order, in one forward pass. All rows
        give logits."""
        rows, positions, fresh, units = [], [], [], []
        for i, count in counts.items():
            first, start = len(rows), self.done[i]
            folds = (start + count) // BLOCK_SIZE - start // BLOCK_SIZE
            units.append(RecurrentUnit(range(first, first + count), start, i, i, [i] * folds))
            span = range(self.done[i], self.done[i] + count)
            rows += [self.prompts[i][p] for p in span]
            positions += span
            fresh += [self.tables[i][p // BLOCK_SIZE] for p in span if p % BLOCK_SIZE == 0]
            self.done[i] += count
        lay_out = self.model.attention.lay_out
        if isinstance(self.model.attention, TorchAttention):
            lay_out = partial(
                build_attention_batch,
                block_size=BLOCK_SIZE,
                max_gather_blocks=self.gather_blocks,
                device=self.model.device,
            )
        batch = ForwardBatch(
            token_ids=torch.tensor(rows),
            positions=torch.tensor(positions),
            attention=(
                lay_out(
                    list(counts.values()), [self.done[i] for i in counts], [self.tables[i] for i in counts]
                ),
            ),
            fresh_blocks=torch.tensor(fresh, dtype=torch.int64),
            logits_rows=torch.arange(len(rows)),
            kv=self.kv,
            lora=lora,
            head_lora=head_lora,
            recurrent=lay_out_units(units),
        )
        logits = self.model.forward(batch)
        assert logits.dtype is torch.float32
        for (i, _), part in zip(counts.items(), logits.split(list(counts.values())), strict=True):
            self.logits[i].append(part)

    def result(self, i: int) -> torch.Tensor:
        """[positions computed so far, V]."""
        return torch.cat(self.logits[i])
