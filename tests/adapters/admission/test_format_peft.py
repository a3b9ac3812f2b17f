"""What we read out of a saved adapter is what PEFT computes with after loading it: ranks, scaling and modules of
its live layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.tensors import read_tensor
from support.adapters.drafts import ALL_SITES, TinyBase, write_base

ARCH = TinyBase(layers=4)

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all sites": {"r": 8, "lora_alpha": 8, "target_modules": list(ALL_SITES)},
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 32, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "rank pattern": {
        "r": 4,
        "lora_alpha": 6,
        "rank_pattern": {"k_proj": 1, "layers.2.mlp.up_proj": 12, "up_proj": 3},
        "target_modules": ["k_proj", "up_proj", "gate_proj"],
    },
    "alpha pattern": {
        "r": 4,
        "lora_alpha": 6,
        "alpha_pattern": {"layers.1.self_attn.q_proj": 5, "q_proj": 7, "1.self_attn.q_proj": 9},
        "target_modules": ["q_proj", "o_proj"],
    },
    "both patterns, rslora": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 9, "mlp.down_proj": 2},
        "alpha_pattern": {"mlp.down_proj": 11, "down_proj": 4},
        "target_modules": ["q_proj", "down_proj"],
    },
    "layers": {"r": 3, "layers_to_transform": [0, 3], "target_modules": ["q_proj", "gate_proj"]},
    "one layer": {"r": 3, "layers_to_transform": 2, "layers_pattern": "layers", "target_modules": ["v_proj"]},
    "whole paths": {
        "r": 3,
        "target_modules": ["model.layers.1.self_attn.k_proj", "3.mlp.up_proj"],
        "init_lora_weights": "orthogonal",
        "rank_pattern": {"model.layers.1.self_attn.k_proj": 4, "up_proj": 6},
    },
}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), ARCH, dtype="F32")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> BaseSpec:
    return load_base_spec(base_dir)


@pytest.fixture
def model(base_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)


def save_trained(model: Any, directory: Path, **config: Any) -> Any:
    """A PEFT model with random weights in place of training, saved."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    peft_model.save_pretrained(str(directory))
    return peft_model


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_scalings_and_values_equal_those_of_live_peft_layers(
    tmp_path: Path, base: BaseSpec, model: Any, name: str
) -> None:
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    # Loaded again, because saving sorts the keys of the patterns, and the first one that fits counts.
    base_model = save_trained(model, tmp_path, **CONFIGS[name]).unload()
    peft_model = PeftModel.from_pretrained(base_model, str(tmp_path))
    tensors_path = tmp_path / "adapter_model.safetensors"
    spec = inspect_adapter(tmp_path / "adapter_config.json", tensors_path, base, max_rank=16)
    sites = {base.sites[site.layer, site.site].module_path: site for site in spec.sites}
    layers = {
        path.removeprefix("base_model.model."): module
        for path, module in peft_model.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert sites.keys() == layers.keys()
    total = 0.0
    for path, layer in layers.items():
        site = sites[path]
        assert (site.rank, site.scaling) == (layer.r["default"], layer.scaling["default"]), path
        a, b = read_tensor(tensors_path, site.a), read_tensor(tensors_path, site.b)
        np.testing.assert_array_equal(a, layer.lora_A["default"].weight.detach().numpy())
        np.testing.assert_array_equal(b, layer.lora_B["default"].weight.detach().numpy())
        total += float(torch.linalg.norm(layer.get_delta_weight("default").detach().double())) ** 2
    assert spec.report["norm"]["total"] == pytest.approx(total**0.5, rel=1e-5)
    assert spec.report["modules_matched"] == len(layers)
    overlapping = name in ("alpha pattern", "both patterns, rslora")
    assert overlapping == any(c["name"] == "alpha_pattern" and not c["ok"] for c in spec.report["checks"])
    assert spec.rank == max(layer.r["default"] for layer in layers.values())


def test_an_embedding_saved_along_by_peft_is_dropped_when_it_is_the_base_s(
    tmp_path: Path, base: BaseSpec, model: Any
) -> None:
    peft_model = save_trained(model, tmp_path, r=2, target_modules=["q_proj"])
    peft_model.save_pretrained(str(tmp_path), save_embedding_layers=True)
    spec = inspect_adapter(
        tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors", base, max_rank=16
    )
    assert spec.report["modules_ignored"] == 2
    assert len(spec.sites) == ARCH.layers
