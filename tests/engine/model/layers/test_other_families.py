"""Families whose attention transformers computes in the model's own code, those that name layers and linears as GPT-2
does, attention with sinks, and Bamba."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModel

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.engine.model.base import ModelUnsupported
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import answers_in_one_batch
from support.models.checkpoints import VOCAB
from support.models.loading import plan_model
from support.models.tiny_families import save_family

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = [number * 7 % VOCAB for number in range(40)]
_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS = {
    "bamba": [*_LLAMA, "in_proj", "out_proj"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "codegen": ["qkv_proj", "out_proj", "fc_in", "fc_out"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "flint": _LLAMA,
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_bigcode": ["c_attn", "c_proj", "c_fc"],
    "gpt_neo": ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"],
    "granite_swa": _LLAMA,
    "granitemoe_swa": ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"],
    "mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"],
}
SIZES: dict[str, dict[str, Any]] = {
    "bamba": {
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    # Heads that are no power of two have other slopes.
    "bloom": {"n_head": 8, "hidden_size": 96, "n_layer": 2},
    "codegen": {"rotary_dim": 8},
    "falcon": {"num_kv_heads": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
}
MEMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, SIZES.get(family, {})) for family in LINEARS},
    "falcon 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, heads of their own": (
        "falcon",
        {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False},
    ),
    "bloom, other heads": ("bloom", {"n_head": 12, "hidden_size": 96, "n_layer": 2}),
    "gpt_bigcode, heads of their own": ("gpt_bigcode", {"multi_query": False}),
}
SHORT = ("bamba", "granite_swa", "bloom, other heads", "gpt_neo", "gpt2", "falcon 40b")


@pytest.mark.parametrize(
    "member", [pytest.param(m, marks=() if m in SHORT else pytest.mark.soak) for m in MEMBERS]
)
def test_base_and_adapters_in_one_batch_answer_as_in_peft(member: str, tmp_path: Path) -> None:
    family, sizes = MEMBERS[member]
    base = save_family(family, tmp_path / "base", **sizes)
    chosen = {
        "all": {"r": 8, "lora_alpha": 16, "target_modules": LINEARS[family]},
        "one": {"r": 3, "lora_alpha": 6, "target_modules": LINEARS[family][:1], "use_dora": True},
    }
    adapters = save_adapters(base, tmp_path, chosen)
    sizes = {"max_model_len": 96, "max_num_batched_tokens": 48}
    answers = answers_in_one_batch(base, tmp_path, adapters, PROMPT, 20, **sizes)
    reference = PeftReference(base, adapters, torch.float32)
    for name, answer in answers.items():
        logits = reference.logits(None if name == "base" else name, PROMPT + answer)
        assert answer == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist(), name
    assert len({tuple(answer) for answer in answers.values()}) == 3


@pytest.mark.parametrize("family", ["bloom", "gpt2", "gpt_neo", "gptj", "mpt"])
def test_an_adapter_on_all_linears_is_taken_from_the_headers(family: str, tmp_path: Path) -> None:
    base = save_family(family, tmp_path / "base", **SIZES.get(family, {}))
    adapter = save_adapters(base, tmp_path, {"all": {"r": 2, "target_modules": LINEARS[family]}})["all"]
    spec = load_base_spec(base)
    found = inspect_adapter(
        adapter / "adapter_config.json", adapter / "adapter_model.safetensors", spec, max_rank=8
    )
    # Each linear of each layer is a site of its own, c_proj of the attention and of the feed-forward too.
    assert len(found.sites) == spec.num_layers * (4 if "c_attn" in LINEARS[family] else len(LINEARS[family]))


@pytest.mark.parametrize(
    ("family", "changes", "settings", "words"),
    [
        ("falcon", {"alibi": True}, {}, "the config's alibi is true; falcon is served with false"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, {}, "alibi_bias_max is 16; transformers computes 8"),
        ("mpt", {"no_bias": False}, {}, "no_bias is false; transformers computes true"),
        ("bloom", {}, {"kv_codes": True}, "--kv-cache-dtype int8: bloom adds the positions of keys"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, changes: dict[str, Any], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = save_family(family, tmp_path, **changes)
    with pytest.raises(ModelUnsupported, match=words):
        plan_model(base, **settings)


@pytest.mark.parametrize(("said", "longest"), [({}, 2048), ({"seq_length": 512}, 512)])
def test_blooms_longest_sequence_is_the_configs_or_what_it_was_trained_with(
    said: dict[str, int], longest: int, tmp_path: Path
) -> None:
    assert plan_model(save_family("bloom", tmp_path, **said)).shape.max_positions == longest


def test_alibi_ends_where_two_digits_hold_no_more_positions(tmp_path: Path) -> None:
    assert plan_model(save_family("mpt", tmp_path, max_seq_len=1 << 20)).shape.max_positions == 256**2


@pytest.mark.parametrize("family", ["bloom", "gpt2"])
def test_files_of_the_decoder_alone_have_the_same_sites(family: str, tmp_path: Path) -> None:
    """The hub has BLOOM and GPT-2 so: h.0 in place of transformer.h.0."""
    whole = load_base_spec(save_family(family, tmp_path / "whole"))
    alone = AutoModel.from_pretrained(tmp_path / "whole")
    alone.save_pretrained(tmp_path / "alone")
    assert "h.0.ln_1.weight" in alone.state_dict() or family == "bloom"
    found = load_base_spec(tmp_path / "alone")
    assert found.sites.items() <= whole.sites.items()
    assert len(found.sites) >= 4 * found.num_layers


def test_gpt2s_weights_are_read_as_linears_have_them(tmp_path: Path) -> None:
    base = load_base_spec(save_family("gpt2", tmp_path))
    stored, weights = load_file(tmp_path / "model.safetensors"), BaseWeights(base)
    for site, name in (("attn_c_proj", "attn.c_proj"), ("c_fc", "mlp.c_fc")):
        weight = stored[f"transformer.h.1.{name}.weight"]
        np.testing.assert_array_equal(
            np.concatenate([*weights.rows(1, site, np.dtype(np.float32))]), weight.T
        )
