"""What is read of a base checkpoint: its sites, its fingerprint, its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.model_parts import parts_of
from loraplex.adapters.errors import BaseModelInvalid
from support.adapters.drafts import (
    ALL_SITES,
    TinyBase,
    base_tensors,
    site_module,
    write_base,
    write_safetensors,
)
from support.adapters.whole_reads import read_base_weight


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_sites_of_the_families(tmp_path: Path, model_type: str, shards: int) -> None:
    arch = TinyBase(model_type=model_type)
    base = load_base_spec(write_base(tmp_path, arch, shards=shards))
    assert (base.model_type, base.num_layers) == (model_type, 2)
    layers = [(layer, site) for layer in range(2) for site in ALL_SITES]
    assert list(base.sites) == [*layers, (0, "lm_head"), (0, "embed_tokens")]
    for (layer, site), shape in base.sites.items():
        assert shape.module_path == site_module(layer, site)
        assert (shape.out_features, shape.in_features) == arch.out_in(site)


def test_base_weights_read_as_they_are(tmp_path: Path) -> None:
    base = load_base_spec(write_base(tmp_path, shards=2))
    tensors = base_tensors(TinyBase())
    for layer, site in base.sites:
        weight = read_base_weight(base, layer, site)
        assert weight.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(weight, tensors[f"{site_module(layer, site)}.weight"])
    with pytest.raises(BaseModelInvalid):
        read_base_weight(base, 5, "q_proj")


def test_ambiguous_sites_and_layers_beyond_the_model_are_left_out(tmp_path: Path) -> None:
    write_base(tmp_path)
    tensors = base_tensors(TinyBase())
    expert = np.zeros((48, 32), ml_dtypes.bfloat16)
    for i in range(2):
        tensors[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"] = expert  # a routed expert's is no site
    tensors["model.layers.1.mlp.other.gate_proj.weight"] = expert
    tensors["model.layers.2.mlp.up_proj.weight"] = expert
    write_safetensors(tmp_path / "model.safetensors", tensors)
    sites = load_base_spec(tmp_path).sites
    assert len(sites) == 2 * len(ALL_SITES) + 1  # and the head and the embedding
    assert sites[0, "gate_proj"].module_path == "model.layers.0.mlp.gate_proj"
    assert (1, "gate_proj") not in sites


def test_layers_beside_those_of_the_model_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints of EXAONE 4.5, EXAONE MoE and Mellum have some, which transformers does not read."""
    plain = load_base_spec(write_base(tmp_path)).sites
    tensors = base_tensors(TinyBase())
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    tensors |= {name.replace("model.", "mtp."): tensor for name, tensor in first.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert load_base_spec(tmp_path).sites == plain


def test_layers_that_read_the_keys_of_others_have_no_sites_for_them(tmp_path: Path) -> None:
    write_base(tmp_path, TinyBase())
    plain = load_base_spec(tmp_path).sites
    # As published checkpoints of Gemma 4 have them: with tensors that no module is made of.
    change_config(tmp_path, num_kv_shared_layers=1)
    assert set(plain) - set(load_base_spec(tmp_path).sites) == {(1, "k_proj"), (1, "v_proj")}


def test_the_fingerprint_is_of_the_weights_and_what_they_compute(tmp_path: Path) -> None:
    plain = load_base_spec(write_base(tmp_path / "a")).fingerprint
    assert len(plain) == 64
    # How the model is cut into files, named and annotated does not matter.
    write_base(tmp_path / "same", shards=3)
    change_config(
        tmp_path / "same", _name_or_path="x", transformers_version="9", eos_token_id=7, use_cache=False
    )
    assert load_base_spec(tmp_path / "same").fingerprint == plain
    # Older tools wrote the rotary base elsewhere.
    change_config(tmp_path / "same", rope_parameters=..., rope_theta=10000.0)
    assert load_base_spec(tmp_path / "same").fingerprint == plain
    change_config(tmp_path / "same", rope_theta=500000.0)
    others = {load_base_spec(tmp_path / "same").fingerprint}
    others.add(load_base_spec(write_base(tmp_path / "seed", seed=1)).fingerprint)
    others.add(load_base_spec(write_base(tmp_path / "dtype", dtype="F16")).fingerprint)
    change_config(write_base(tmp_path / "heads"), num_attention_heads=2)
    others.add(load_base_spec(tmp_path / "heads").fingerprint)
    path = write_base(tmp_path / "bit") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    others.add(load_base_spec(tmp_path / "bit").fingerprint)
    assert len(others - {plain}) == 5


def test_the_fingerprint_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    model, cache = write_base(tmp_path / "model"), tmp_path / "cache"
    first = load_base_spec(model, cache_dir=cache).fingerprint
    [entry] = cache.iterdir()
    assert entry.read_text().strip() == first
    entry.write_text("f" * 64)  # proof that it is read
    assert load_base_spec(model, cache_dir=cache).fingerprint == "f" * 64
    entry.write_text("damaged")
    assert load_base_spec(model, cache_dir=cache).fingerprint == first
    entry.write_text("f" * 64)
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert load_base_spec(model, cache_dir=cache).fingerprint == first
    assert load_base_spec(model).fingerprint == first


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    model = write_base(tmp_path / "model")
    assert load_base_spec(model, cache_dir=blocked / "x").fingerprint == load_base_spec(model).fingerprint


def test_a_model_behind_links_is_read(tmp_path: Path) -> None:
    """Model caches keep links to content-addressed files."""
    real, linked = write_base(tmp_path / "real", shards=2), tmp_path / "linked"
    linked.mkdir()
    for path in real.iterdir():
        (linked / path.name).symlink_to(path)
    assert load_base_spec(linked).fingerprint == load_base_spec(real).fingerprint


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"{", "config.json"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"{}", "model_type"),
        ("config.json", b'{"model_type": "llama", "num_hidden_layers": "2"}', "num_hidden_layers"),
        ("model.safetensors", None, "neither"),
        ("model.safetensors", b"torn", "not valid safetensors"),
    ],
)
def test_invalid_checkpoint_names_the_file(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    path = write_base(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(BaseModelInvalid, match=says):
        load_base_spec(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "weight_map"),
        ({"weight_map": {"a": "../outside.safetensors"}}, "outside"),
        ({"weight_map": {"a": "absent.safetensors"}}, "absent"),
    ],
)
def test_a_broken_index_says_so(tmp_path: Path, index: dict[str, Any], says: str) -> None:
    write_base(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BaseModelInvalid, match=says):
        load_base_spec(tmp_path)


@pytest.mark.slow
def test_the_real_model(real_model_dir: Path, tmp_path: Path) -> None:
    base = load_base_spec(real_model_dir, cache_dir=tmp_path)
    assert (base.model_type, base.num_layers, len(base.sites)) == (
        "llama",
        30,
        212,
    )  # seven a layer, lm_head and embed_tokens
    assert read_base_weight(base, 29, "k_proj").shape == (192, 576)


@pytest.mark.parametrize(
    ("model_type", "field", "value", "is_of_it"),
    [
        ("gemma4_text", "num_kv_shared_layers", 1, True),
        ("lfm2", "norm_eps", 0.01, True),
        ("nemotron", "norm_eps", 0.01, False),  # served before that field counted
        ("qwen3_next", "num_experts_per_tok", 4, True),
        ("qwen3_5_moe_text", "norm_topk_prob", True, True),
        ("qwen3_moe", "num_experts_per_tok", 4, False),
        ("granitemoe", "num_experts_per_tok", 4, False),
        ("granitemoehybrid", "num_experts_per_tok", 4, False),  # without experts
        ("gemma4_text", "top_k_experts", 4, False),
    ],
)
def test_fields_that_newer_families_compute_by_are_of_the_fingerprint(
    tmp_path: Path, model_type: str, field: str, value: Any, is_of_it: bool
) -> None:
    change_config(write_base(tmp_path), model_type=model_type)
    plain = load_base_spec(tmp_path).fingerprint
    change_config(tmp_path, **{field: value})
    assert (load_base_spec(tmp_path).fingerprint != plain) is is_of_it


@pytest.mark.parametrize("tied", [True, False])
def test_lfm2_says_by_a_name_of_its_own_whether_the_head_is_tied(tmp_path: Path, tied: bool) -> None:
    change_config(write_base(tmp_path), model_type="lfm2", tie_word_embeddings=..., tie_embedding=tied)
    assert load_base_spec(tmp_path).tied_head is tied


def test_hunyuans_tower_is_one_under_both_of_its_names() -> None:
    parts = parts_of("hunyuan_vl")
    for name in ("vit.layers.0.mlp.fc1", "model.vit.layers.0.mlp.fc1"):
        assert parts.part_of(parts.module_name(name)) == "vision_tower"
