"""A tiny random checkpoint of any multimodal type of the installed transformers: the type's default config with the
fields below made small, in its parts too, and adapters that PEFT makes on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.model_parts import MULTIMODAL
from support.models.tiny_families import read_field

VOCAB = 512
_THINKER = "thinker"
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "embed_dim", "dim", "projection_dim", "out_hidden_size", "output_dim"), 64
    ),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "patch_size"), 2),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "mm_tokens_per_image"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size", "moe_num_shared_experts", "bos_token_id"), 1),
    **dict.fromkeys(("num_position_embeddings", "image_size", "head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 8),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), VOCAB),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    "linear_num_key_heads": 1, "linear_num_value_heads": 3,
    "pad_token_id": 0, "eos_token_id": 2, "image_seq_length": 16,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "patch_size": 4, "image_size": 16, "model_args": {"embed_dim": 64},
}  # fmt: skip
_CHANGES: Mapping[str, dict[str, Any]] = {
    **{
        name: {"rope_parameters": _MROPE}
        for name in (
            "cosmos3_edge_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text",
        )
    },
    **{
        name: {"rope_parameters": _MROPE | {"mrope_interleaved": True}}
        for name in ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text")
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _MROPE, "full_attention": None},
    },
    # Their own towers are timm's.
    "fast_vlm": {"vision_config": _SIGLIP},
    "perception_lm": {"vision_config": _SIGLIP},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/2", "spatial_target_layers": [1],
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": _MROPE | {"mrope_section": [3, 3, 2]}},
    **{
        name: {
            "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        }
        for name in ("gemma4_text", "gemma4_unified_text")
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "siglip2_vision_model": {"num_patches": 16},
    "emu3": {
        "vocabulary_map": {
            "<image>": 500, "<|extra_200|>": 501, **{f"<|visual token {n:06d}|>": 400 + n for n in range(8)},
        },
    },
    "emu3_vqgan": {
        "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [2],
        "hidden_size": 32, "embed_dim": 16, "codebook_size": 8, "z_channels": 16, "latent_channels": 4,
    },
    "glm_ocr_text": {"rope_parameters": _MROPE},
    **{
        name: {"rope_parameters": _MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
        for name in ("glm4v_text", "glm4v_moe_text")
    },
    "hunyuan_vl_text": {"rope_parameters": _MROPE | {"mrope_section": [2, 2, 2, 2]}},
}  # fmt: skip
"""What the fields' names don't tell, by the type of a model or of a part."""


def _shrunk(config_class: Any) -> dict[str, Any]:
    default, fields = config_class(), config_class.__dataclass_fields__
    values = {
        name: value
        for name, value in _SMALL.items()
        # A list in the default, or nothing, means something else than a number.
        if name in fields and not isinstance(read_field(default, name), list | tuple)
    }
    kinds = getattr(default, "layer_types", None) if "num_hidden_layers" in values else None
    if kinds:
        values["layer_types"] = [kinds[0], kinds[-1]]
    ids = sorted(
        name for name in fields if name.endswith(("_token_id", "_token_index")) and name not in values
    )
    values |= {name: VOCAB - 1 - number for number, name in enumerate(ids)}
    parts = getattr(config_class, "sub_configs_defaults", None) or config_class.sub_configs
    for name in parts:
        part = getattr(default, name)
        if part is not None:
            values[name] = {"model_type": part.model_type, **_shrunk(type(part))}
    return values | _CHANGES.get(config_class.model_type, {})


def save_multimodal(model_type: str, out: Path, *, text: str = "", **whole: Any) -> Path:
    """Safetensors and config.json in float32. `text`: another type of text part than the default's, `whole`: fields on
    top. Weights are larger than usual, so that an error anywhere shows."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    if model_type in ("qwen2_5_omni", "qwen3_omni_moe"):
        return _save_speaking(model_type, out)
    values = _shrunk(CONFIG_MAPPING[model_type])
    if text:
        values["text_config"] = {"model_type": text, **_shrunk(CONFIG_MAPPING[text])}
    config = CONFIG_MAPPING[model_type](**(values | whole))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data.copy_(weight.data + 0.1 * noise if weight.dim() < 2 else 0.15 * noise)
    model.save_pretrained(out)
    return out


def _save_speaking(model_type: str, out: Path) -> Path:
    """The part that writes text is saved by itself too, as transformers loads it alone."""
    from safetensors.torch import load_file, save_file

    thinker = save_multimodal(f"{model_type}_thinker", out / _THINKER)
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(thinker / "model.safetensors").items()}
    tensors["talker.model.layers.0.self_attn.q_proj.weight"] = torch.zeros(8, 8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((thinker / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({"model_type": model_type, "thinker_config": config}))
    return out


def load_plain(base: Path) -> Any:
    """transformers' model of a checkpoint, multimodal or of text."""
    import transformers

    if (base / _THINKER).is_dir():
        base /= _THINKER
    is_multimodal = json.loads((base / "config.json").read_text())["model_type"] in MULTIMODAL
    name = "AutoModelForImageTextToText" if is_multimodal else "AutoModelForCausalLM"
    return getattr(transformers, name).from_pretrained(base, attn_implementation="eager").eval()


def make_adapter(base: Path, out: Path, **options: Any) -> Any:
    """PEFT's model with an adapter that is random in all that it trains, saved in `out`."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        load_plain(base), LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options)
    )
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data.copy_(0.15 * torch.randn(weight.shape, generator=generator))
    model.eval().save_pretrained(out)
    config = out / "adapter_config.json"
    # PEFT keeps sets, and writes them in another order each time.
    config.write_text(json.dumps(json.loads(config.read_text()), sort_keys=True))
    return model
