"""The kinds of adapters that docs/peft-support.md names: each is made by PEFT, and refused as it says, or equal to the
layers that PEFT loads from the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.numerics.upload import Upload
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.adapters.store.tensors import read_tensor
from support.adapters.drafts import ALL_SITES, TinyBase, base_tensors, write_base, write_safetensors
from tools.support_page import ADAPTER_KINDS, AdapterKind

ARCH = TinyBase(layers=3)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """What PEFT is given, and what differs in the files afterwards: fields of the config, tensors."""

    lora: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors
    convert: bool = False


def _head(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {f"base_model.model.{name}.weight": torch.ones(2, ARCH.hidden)}


def _experts(*paths: str) -> Callable[[Tensors], Tensors]:
    def add(tensors: Tensors) -> Tensors:
        pairs = {
            f"base_model.model.model.layers.0.mlp.{path}.lora_{k}.weight" for path in paths for k in "AB"
        }
        return tensors | {name: torch.ones(4, 4) for name in pairs}

    return add


TWO = ["o_proj", "down_proj"]
RECIPES: dict[str, Recipe] = {
    "a list of names": Recipe({"target_modules": TWO}),
    "`all-linear`": Recipe({"target_modules": "all-linear"}),
    "an expression in `target_modules`": Recipe({"target_modules": r"model\.layers\.[02]\..*(q|up)_proj"}),
    "some layers": Recipe({"target_modules": TWO, "layers_to_transform": [0, 2]}),
    "rsLoRA": Recipe({"target_modules": TWO, "use_rslora": True}),
    "DoRA": Recipe({"target_modules": TWO, "use_dora": True}),
    "aLoRA": Recipe({"target_modules": TWO, "alora_invocation_tokens": [5, 6]}),
    "LoRA on `lm_head`": Recipe({"target_modules": ["lm_head", "q_proj"]}),
    "LoRA on `embed_tokens`": Recipe({"target_modules": ["embed_tokens", "q_proj"]}),
    "`trainable_token_indices`": Recipe({"target_modules": TWO, "trainable_token_indices": [7, 3]}),
    "ranks and alphas by names of modules": Recipe(
        {"target_modules": TWO, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 5}}
    ),
    "alphas by expressions": Recipe(
        {
            "target_modules": list(ALL_SITES),
            "alpha_pattern": {r".*\.[12]\.self_attn\.(q|k)_proj": 5, "[gu].*": 3},
        }
    ),
    "a list of names made for many models": Recipe({"target_modules": [*TWO, "query_key_value", "c_attn"]}),
    "layers beyond the base's": Recipe({"target_modules": TWO, "layers_to_transform": [0, 2, 40]}),
    "`task_type` of embeddings": Recipe({"target_modules": TWO}, {"task_type": "FEATURE_EXTRACTION"}),
    "`task_type` of an encoder and decoder": Recipe({"target_modules": TWO}, {"task_type": "SEQ_2_SEQ_LM"}),
    "`task_type` of questions, with a head's name but no head": Recipe(
        {"target_modules": TWO}, {"task_type": "QUESTION_ANS", "modules_to_save": ["qa_outputs"]}
    ),
    "`ensure_weight_tying` where nothing is tied": Recipe(
        {"target_modules": TWO, "ensure_weight_tying": True}
    ),
    "VeLoRA": Recipe({"target_modules": TWO, "velora_config": {"num_groups": 8}}),
    "MonteCLoRA": Recipe({"target_modules": TWO, "monteclora_config": {"num_samples": 2}}),
    "PiSSA, converted by PEFT": Recipe({"target_modules": TWO, "init_lora_weights": "pissa"}, convert=True),
    "PiSSA, not converted": Recipe({"target_modules": TWO, "init_lora_weights": "pissa"}),
    "a classifier with its head": Recipe(
        {"target_modules": TWO},
        {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
        _head("score"),
    ),
    "a classifier without its head": Recipe({"target_modules": TWO}, {"task_type": "SEQ_CLS"}),
    "`lm_head` as a whole": Recipe({"target_modules": TWO, "modules_to_save": ["lm_head"]}),
    "trained biases": Recipe({"target_modules": TWO, "bias": "all"}),
    "a bias beside lora_B": Recipe({"target_modules": TWO, "lora_bias": True}),
    "repeated layers": Recipe({"target_modules": TWO, "layer_replication": [[0, 2], [1, 3]]}),
    "the experts of a mixture that takes none, a pair each": Recipe(
        {"target_modules": ["q_proj"]}, {}, _experts("experts.0.up_proj", "experts.1.up_proj")
    ),
    "the experts of a mixture that takes none, stacked": Recipe(
        {"target_modules": ["q_proj"]},
        {"target_parameters": ["experts.down_proj"]},
        _experts("experts", "experts.base_layer"),
    ),
    "LoHa, VeRA and other methods": Recipe({"target_modules": TWO}, {"peft_type": "LOHA"}),
}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), ARCH, dtype="F32")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> BaseSpec:
    return load_base_spec(base_dir)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    directory = write_base(tmp_path_factory.mktemp("mixture"), ARCH, dtype="F32")
    tensors = base_tensors(ARCH, dtype="F32")
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        for layer in range(ARCH.layers):
            weight = tensors.pop(f"model.layers.{layer}.mlp.{leaf}.weight")
            tensors |= {f"model.layers.{layer}.mlp.experts.{i}.{leaf}.weight": weight for i in range(2)}
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    return load_base_spec(directory)


def plain_model(base_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)


def make(recipe: Recipe, base_dir: Path, out: Path) -> None:
    """Trained by noise, saved by PEFT, and changed as the recipe says."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", **({"r": 4, "lora_alpha": 6} | recipe.lora))
    model = get_peft_model(plain_model(base_dir), config)
    options = {}
    if recipe.convert:
        model.save_pretrained(str(out / "initial"))
        options["path_initial_model_for_weight_conversion"] = str(out / "initial")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(str(out), **options)
    config_path, tensors_path = out / "adapter_config.json", out / "adapter_model.safetensors"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | recipe.config))
    save_file(recipe.tensors(load_file(tensors_path)), tensors_path, metadata={"format": "pt"})


def loaded_by_peft(base_dir: Path, directory: Path) -> dict[str, LoraLayer]:
    """PEFT's layers by path. The class that `task_type` chooses wants another model, and computes LoRA the same."""
    config = LoraConfig.from_pretrained(str(directory))
    config.task_type, config.modules_to_save = None, None
    model = PeftModel.from_pretrained(plain_model(base_dir), str(directory), config=config)
    return {
        path.removeprefix("base_model.model."): module
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def check_equal(spec: AdapterSpec, base: BaseSpec, directory: Path, layers: dict[str, LoraLayer]) -> None:
    tensors_path = directory / "adapter_model.safetensors"
    sites = {base.sites[site.layer, site.site].module_path: site for site in spec.sites}
    second = Upload(directory / "adapter_config.json", tensors_path, base)
    replaced = {table.module_path for table in spec.tokens}
    assert sites.keys() == layers.keys() == set(second.sites.values()) - replaced
    assert replaced == {module for (_, site), module in second.sites.items() if site.endswith(".rows")}
    for path, layer in layers.items():
        site = sites[path]
        uploaded = second.read(site.layer, site.site)
        assert site.scaling == uploaded.scaling == layer.scaling["default"], path
        looked_up = "default" in layer.lora_embedding_A
        if looked_up:
            a, b = (m["default"].detach().numpy() for m in (layer.lora_embedding_A, layer.lora_embedding_B))
        else:
            a, b = (m["default"].weight.detach().numpy() for m in (layer.lora_A, layer.lora_B))
        np.testing.assert_array_equal(read_tensor(tensors_path, site.a), a)
        np.testing.assert_array_equal(read_tensor(tensors_path, site.b), b)
        magnitudes = getattr(layer, "lora_magnitude_vector", {})
        assert (site.magnitude is not None) == ("default" in magnitudes)
        if site.magnitude is not None:
            expected = magnitudes["default"].weight.detach().numpy()
            np.testing.assert_array_equal(read_tensor(tensors_path, site.magnitude), expected)
            continue
        x = torch.randn(3, a.shape[1], generator=torch.Generator().manual_seed(0))
        given = x
        if looked_up:
            given = torch.tensor([5, 0, 7])
            x = torch.nn.functional.one_hot(given, a.shape[1]).float()
        activated: dict[str, Any] = {"alora_offsets": [1] * len(x)} if spec.invocation else {}
        with torch.no_grad():
            change = (layer.eval()(given, **activated) - layer.base_layer(given)).numpy()
        np.testing.assert_allclose(site.scaling * (x.numpy() @ a.T) @ b.T, change, atol=2e-5, rtol=1e-4)


def test_each_kind_of_the_page_is_built() -> None:
    assert [kind.name for kind in ADAPTER_KINDS] == list(RECIPES)


@pytest.mark.parametrize("kind", ADAPTER_KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_equal_to_peft_or_refused_as_the_page_says(
    kind: AdapterKind, base_dir: Path, base: BaseSpec, mixture: BaseSpec, tmp_path: Path
) -> None:
    make(RECIPES[kind.name], base_dir, tmp_path)
    files = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    of = mixture if "experts" in kind.name else base
    if kind.refused is not None:
        with pytest.raises(AdapterRefused) as caught:
            inspect_adapter(*files, of, max_rank=16)
        assert (caught.value.code, caught.value.feature) == ("unsupported_feature", kind.refused)
        return
    spec = inspect_adapter(*files, of, max_rank=16)
    check_equal(spec, of, tmp_path, loaded_by_peft(base_dir, tmp_path))
    warned = [c for c in spec.report["checks"] if not c["ok"] and c["name"] != "base_name"]
    assert bool(warned) == kind.warns, warned
