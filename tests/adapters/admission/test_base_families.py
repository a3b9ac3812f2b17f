"""What is read of the bases whose linears, towers or names are not Llama's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import BaseModelInvalid
from support.adapters.whole_reads import read_base_weight
from support.models.checkpoints import FAMILIES, edit_config, save_tiny, save_tiny_gemma3_with_vision


def of_layer(base: Any, layer: int) -> dict[str, tuple[int, int]]:
    return {
        s.site: (s.out_features, s.in_features)
        for (i, _), s in base.sites.items()
        if i == layer and s.site not in ("lm_head", "embed_tokens")
    }


def test_packed_linears_are_one_site_each(tmp_path: Path) -> None:
    base = load_base_spec(save_tiny(tmp_path, FAMILIES["phi3"], max_shard_size="20KB"))
    for layer in range(3):
        assert of_layer(base, layer) == {
            "qkv_proj": (64, 32), "o_proj": (32, 32), "gate_up_proj": (96, 32), "down_proj": (32, 48),
        }  # fmt: skip
    assert base.sites[1, "qkv_proj"].module_path == "model.layers.1.self_attn.qkv_proj"


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        ({"model_type": "phi"}, {"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"}),
        ({"model_type": "opt", "ffn_dim": 48}, {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}),
        ({"model_type": "starcoder2"}, {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"}),
        ({"model_type": "gpt_neox"}, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
    ],
)
def test_linears_by_the_family_s_own_names(options: dict[str, Any], sites: set[str], tmp_path: Path) -> None:
    path = save_tiny(tmp_path, options)
    base = load_base_spec(path)
    assert set(of_layer(base, 2)) == sites
    stored = load_file(path / "model.safetensors")
    head = stored.get("lm_head.weight", stored.get("embed_out.weight"))
    if head is not None:  # OPT ties it
        np.testing.assert_array_equal(read_base_weight(base, 0, "lm_head"), head)
    assert (0, "lm_head") in base.sites


def test_a_vision_tower_takes_no_site_from_the_text(tmp_path: Path) -> None:
    """Its layers have q_proj and the like of their own, with the same numbers."""
    path = save_tiny_gemma3_with_vision(tmp_path, FAMILIES["gemma3"])
    stored = load_file(path / "model.safetensors")
    assert any("vision_tower" in name and "layers.0.self_attn.q_proj" in name for name in stored)
    base = load_base_spec(path)
    assert base.model_type == "gemma3_text"
    for layer in range(3):
        assert set(of_layer(base, layer)) == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
    # Modules are called as adapters call them, whatever the file says.
    assert base.sites[0, "q_proj"].module_path == "model.language_model.layers.0.self_attn.q_proj"
    weight = stored["language_model.model.layers.2.mlp.up_proj.weight"]
    np.testing.assert_array_equal(read_base_weight(base, 2, "up_proj"), weight)


def test_both_names_of_a_tensor_are_one(tmp_path: Path) -> None:
    path = save_tiny_gemma3_with_vision(tmp_path, FAMILIES["gemma3"])
    before = load_base_spec(path)
    stored = load_file(path / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model.language_model."): t for name, t in stored.items()
    }
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    after = load_base_spec(path)
    assert (after.sites, after.fingerprint) == (before.sites, before.fingerprint)
    name = "language_model.model.norm.weight"
    save_file(renamed | {name: stored[name]}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelInvalid, match=r"both hold model\.language_model\.norm"):
        load_base_spec(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["OpenAIGPTLMHeadModel"], "n_layer": 12}, "GPT is not served: it stores its linears as"),
        ({"model_type": "openai-gpt", "n_layer": 12}, "GPT is not served: it stores its linears as"),
        ({"architectures": ["GPT2LMHeadModel"], "n_layer": 12}, "config.json (of 'GPT2LMHeadModel') has no model_type"),
        ({"model_type": "mimo_v2_flash", "num_hidden_layers": 24}, "MiMo-V2-Flash is not served: its values are"),
        ({"architectures": ["BertForMaskedLM"]}, "BERT is not served: it is an encoder"),
        ({"model_type": "t5", "num_layers": 6}, "T5 is not served: it is an encoder with a decoder"),
        ({"model_type": "falcon_mamba", "num_hidden_layers": 2}, "Falcon Mamba is not served: it has recurrent"),
        ({"architectures": ["LlamaForCausalLM"]}, "config.json (of 'LlamaForCausalLM') has no model_type"),
        ({"architectures": [None], "model_type": None}, "config.json has no model_type"),
        ({"model_type": ["gpt2"]}, "config.json has no model_type"),
        ({"model_type": "novel", "n_layer": 2}, "novel is not served: num_hidden_layers in "),
    ],
)  # fmt: skip
def test_a_family_that_is_not_served_is_named(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelInvalid) as caught:
        load_base_spec(tmp_path)
    assert caught.value.message.startswith(words), caught.value.message


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"query_pre_attn_scalar": 21}),
        ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"final_logit_softcapping": 3.5}),
        ("gemma2", {"sliding_window": 10}),
        ("gemma3", {"layer_types": ["full_attention"] * 3}),
        ("gemma3", {"rope_local_base_freq": 9.0}),
        ("gemma3", {"sliding_window_pattern": 5}),
        ("phi3-longrope", {"original_max_position_embeddings": 64}),
        ("qwen2-window", {"max_window_layers": 2}),
        ("qwen2-window", {"use_sliding_window": False}),
    ],
)
def test_fingerprint_changes_with_the_computation(
    family: str, change: dict[str, Any], tmp_path: Path
) -> None:
    path = save_tiny(tmp_path, FAMILIES[family])
    before = load_base_spec(path).fingerprint
    edit_config(path, **change)
    assert load_base_spec(path).fingerprint != before


def test_a_window_that_is_not_used_does_not(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, FAMILIES["qwen2"])
    before = load_base_spec(path).fingerprint
    assert "max_window_layers" in json.loads((path / "config.json").read_text())
    edit_config(path, max_window_layers=1)
    assert load_base_spec(path).fingerprint == before
