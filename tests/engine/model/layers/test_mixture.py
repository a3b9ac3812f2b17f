"""Layers with experts that a router chooses: which decoder serves them, what is refused, routers with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.base_weights.grouped import quantise_int8
from loraplex.engine.devices import kernels_elsewhere
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.lora.site_groups import FLOAT_SITES
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import save_adapters
from support.engine.local_engine import answers_in_one_batch
from support.models.checkpoints import FAMILIES, VOCAB, PagedRun, edit_config, reference_logits, save_tiny
from support.models.loading import load_model, outline_model, plan_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT = [number * 7 % VOCAB for number in range(20)]
QWEN3 = FAMILIES["qwen3_moe"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3_moe") / "base", QWEN3)


def test_experts_are_computed_on_a_cpu_and_by_triton(base: Path, tmp_path: Path) -> None:
    words, device = "8 experts in 2 layers (0.1 MiB), 3 for each token", torch.device("cuda")
    assert plan_model(base).explain().endswith(words)
    assert make_plan(base, ModelSettings(), kernels_elsewhere(device)).explain().endswith(words)
    by_torch = resolve_kernels("torch", device)
    assert make_plan(base, ModelSettings(), by_torch).decoder == "transformers"
    with pytest.raises(ModelUnsupported, match="--quantise: experts in codes are computed on CPUs alone"):
        make_plan(base, ModelSettings(quantise="int8"), kernels_elsewhere(device))
    clipped = save_tiny(tmp_path / "olmoe", FAMILIES["olmoe"])
    assert plan_model(clipped).decoder == "fused"
    edit_config(clipped, clip_qkv=0.5)
    assert plan_model(clipped).decoder == "transformers"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"num_experts": 1 << 20, "num_local_experts": None}, "num_experts 1048576"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"moe_intermediate_size": -3}, "moe_intermediate_size -3"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ({"mlp_only_layers": []}, "model.layers.1.mlp.gate.weight"),
        ({"mlp_only_layers": [0, 1]}, "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_a_config_that_is_no_mixture_of_its_tensors_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = save_tiny(tmp_path / "base", QWEN3)
    edit_config(path, **changes)
    with pytest.raises(ModelUnsupported, match=words):
        load_model(path, "cpu")


def test_a_layer_that_predicts_further_tokens_is_not_read(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "base", FAMILIES["glm4_moe"])
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"model\.layers\.3\.eh_proj"):
        load_model(path, "cpu")
    edit_config(path, num_nextn_predict_layers=1)
    assert load_model(path, "cpu").num_layers == 3


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "gemma4-moe",
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("qwen3_next", "glm4_moe")),
    ],
)
def test_experts_of_codes_compute_what_the_codes_stand_for(family: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES[family] | {"tie_word_embeddings": False})
    dense = tmp_path / "dense"
    dense.mkdir()
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        kept = name.split(".")[-2] in FLOAT_SITES
        if ("_proj" in name and (name.endswith("weight") or weight.dim() == 3) and not kept) or (
            name == "lm_head.weight"
        ):
            rows = weight.reshape(-1, weight.shape[-1]).numpy()
            tensors[name] = torch.from_numpy(quantise_int8(rows).dense()).view_as(weight)
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    (dense / "config.json").write_bytes((base / "config.json").read_bytes())
    model = load_model(base, "cpu", "float32", quantise=True)
    run = PagedRun(model, [PROMPT])
    run.step({0: len(PROMPT)})
    error = (run.result(0) - reference_logits(dense, [PROMPT])[0]).abs().max()
    assert error < 2e-4
    outline = outline_model(base, torch.device("cpu"), "float32", quantise=True)
    # A code and a share of a scale in place of four bytes.
    assert outline.expert_bytes * 3 < outline_model(base, torch.device("cpu"), "float32").expert_bytes
    assert outline.read_bytes(1) < outline.read_bytes(8) < outline.step_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype: str, base: Path) -> None:
    model = load_model(base, "cpu", dtype, kernels="numba", batch_invariant=True)
    prompts = [[(number * step) % VOCAB for number in range(18 + step)] for step in (3, 5, 7, 11)]
    together = PagedRun(model, prompts)
    for counts in ({0: 7, 1: 23, 2: 1}, {3: 29, 0: 14, 2: 24}):
        together.step(counts)
    for index, prompt in enumerate(prompts):
        alone = PagedRun(model, [prompt], seed=index)
        for length in (1, 2, len(prompt) - 3):
            alone.step({0: length})
        assert torch.equal(alone.result(0), together.result(index))


def test_routers_take_adapters_through_transformers_too(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["olmoe"] | {"clip_qkv": 0.7})
    chosen = {"routed": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "gate_proj"]}}
    adapters = save_adapters(base, tmp_path, chosen)
    found = answers_in_one_batch(base, tmp_path, adapters, PROMPT, 20)
    answers, plain = found["routed"], found["base"]
    logits = PeftReference(base, adapters, torch.float32).logits("routed", PROMPT + answers)
    assert answers == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert answers != plain
