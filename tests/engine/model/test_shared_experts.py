"""LoRA on the expert of a mixture that all tokens go through, and on dense layers of other sizes, beside routed
experts, which have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.engine.model.wrapped import find_sites
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import answers_in_one_batch
from support.models.checkpoints import VOCAB
from support.models.tiny_families import save_family

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LEAVES = ("gate_proj", "up_proj", "down_proj")
PROMPT = [number * 7 % VOCAB for number in range(20)]
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("shared_expert", {"num_experts": 4, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}),
    "glm4_moe": (
        "shared_experts",
        {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
}  # fmt: skip
"""The name of the shared expert, and the fields of a mixture whose first layer is dense and wider."""


ROUTERS: dict[str, dict[tuple[int, str], str]] = {
    "qwen2_moe": {
        (layer, leaf): f"model.layers.{layer}.mlp.{leaf}"
        for layer in (1, 2)
        for leaf in ("gate", "shared_expert_gate")
    },
    "glm4_moe": {},
}
"""The linears that choose experts and weigh the shared one, where they take adapters."""


def save_mixture(family: str, directory: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **MIXTURES[family][1]))
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.data.normal_(0, 0.25)
    model.float().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", MIXTURES)
def test_admission_and_engine_find_the_linears_of_a_shared_expert(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = load_base_spec(save_mixture(family, tmp_path / "base"))
    in_mlp = {key: shape.module_path for key, shape in spec.sites.items() if ".mlp." in shape.module_path}
    # The first layer's own linears are wider than the shared expert's.
    parts = {0: "", 1: f".{MIXTURES[family][0]}", 2: f".{MIXTURES[family][0]}"}
    assert (
        in_mlp
        == {
            (layer, leaf): f"model.layers.{layer}.mlp{part}.{leaf}"
            for layer, part in parts.items()
            for leaf in LEAVES
        }
        | ROUTERS[family]
    )
    modules, groups = find_sites(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), spec.num_layers)
    assert modules.keys() == {key for key in spec.sites if key[1] not in ("lm_head", "embed_tokens")}
    sizes = {g.layers: (g.in_features, *g.out_features) for g in groups if g.sites == ("up_proj",)}
    assert sizes.keys() == {(0,), (1, 2)}
    assert sizes[0,] == (32, 96)


def test_a_dense_layer_and_shared_experts_take_lora_and_answer_as_in_peft(tmp_path: Path) -> None:
    base = save_mixture("qwen2_moe", tmp_path / "base")
    targets = ["q_proj", *(f"{part}.{leaf}" for part in ("shared_expert", "0.mlp") for leaf in LEAVES)]
    adapter = save_adapters(base, tmp_path, {"shared": {"r": 4, "lora_alpha": 8, "target_modules": targets}})
    found = answers_in_one_batch(base, tmp_path, adapter, PROMPT, 6)
    answers, plain = found["shared"], found["base"]
    logits = PeftReference(base, adapter, torch.float32).logits("shared", PROMPT + answers)
    assert answers == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert answers != plain


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXED_SIZES = ("afmoe", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hy_v3", "laguna")
"""Families whose dense layers and shared experts have other sizes."""
ORDINARY: dict[str, list[str]] = {
    **dict.fromkeys(MIXED_SIZES, ATTENTION),
    # PEFT trains dense layers and shared experts too, which the file calls otherwise.
    "hy_v3": [*ATTENTION, *LEAVES],
    # PEFT does not load the shared experts' LoRA that it has saved.
    "laguna": [*ATTENTION, "g_proj"],
    # Packed linears of Granite 4.
    "granitemoehybrid": [*ATTENTION, "input_linear", "output_linear"],
    "granitemoeshared": [*ATTENTION, "input_linear", "output_linear"],
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "granitemoehybrid" else pytest.mark.soak) for f in ORDINARY],
)
def test_ordinary_adapters_in_one_batch_answer_as_in_peft(family: str, tmp_path: Path) -> None:
    base = save_family(family, tmp_path / "base")
    chosen = {
        "two": {"r": 8, "lora_alpha": 16, "target_modules": ORDINARY[family]},
        "one": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"]},
    }
    adapters = save_adapters(base, tmp_path, chosen)
    answers = answers_in_one_batch(base, tmp_path, adapters, PROMPT, 20)
    reference = PeftReference(base, adapters, torch.float32)
    for name, answer in answers.items():
        logits = reference.logits(None if name == "base" else name, PROMPT + answer)
        assert answer == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist(), name
    assert len({tuple(answer) for answer in answers.values()}) == 3
