"""What an upload for a mixture is told about its experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.safetensors_header import ADAPTER_LIMITS, adapter_limits
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import AdapterSpec, BaseSpec, ExpertShape
from support.models import expert_adapters as made
from support.models.expert_adapters import Arrays, pairs, stacks, write
from support.models.tiny_families import save_family

BOTH = {"target_parameters": ["gate_up_proj", "down_proj"], "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(save_family("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe")))


@pytest.fixture(scope="module")
def with_shared(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    """Its first layer is dense, and each of the others has a shared expert."""
    return load_base_spec(save_family("glm4_moe", tmp_path_factory.mktemp("glm4_moe")))


def attention(base: BaseSpec, site: str = "q_proj") -> Arrays:
    found: Arrays = {}
    for (_, name), shape in base.sites.items():
        if name == site:
            found[f"{shape.module_path}.lora_A.weight"] = np.ones((4, shape.in_features), np.float32)
            found[f"{shape.module_path}.lora_B.weight"] = np.ones((shape.out_features, 4), np.float32)
    return found


def admit(base: BaseSpec, folder: Path, tensors: Arrays, **fields: Any) -> AdapterSpec:
    write(folder, tensors, **fields)
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    return inspect_adapter(*files, base, max_rank=16)


def refused(*args: Any, **fields: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        admit(*args, **fields)
    assert caught.value.message.isascii()
    json.dumps(caught.value.report, allow_nan=False)
    return caught.value


def warnings(spec: AdapterSpec) -> str:
    return "\n".join(check["detail"] for check in spec.report["checks"] if not check["ok"])


def test_checkpoints_tell_the_experts(mixture: BaseSpec, with_shared: BaseSpec) -> None:
    assert mixture.experts == {
        layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 4, 64, 32) for layer in range(4)
    }
    assert set(with_shared.experts) == {1, 2, 3}


def test_the_refusal_says_which_form_was_found(tmp_path: Path, mixture: BaseSpec) -> None:
    tensors = attention(mixture)
    whole = refused(mixture, tmp_path / "pairs", tensors | pairs(mixture.experts))
    assert (whole.code, whole.feature, len(whole.faults)) == ("unsupported_feature", "experts", 1)
    assert "has a pair an expert: gate, up, down of 4 layers, rank 4 an expert" in whole.message
    stacked = refused(mixture, tmp_path / "stacks", tensors | stacks(mixture.experts), **BOTH)
    assert (stacked.feature, len(stacked.faults)) == ("experts", 1)
    assert "has stacks of all experts of a layer: gate_up, down of 4 layers" in stacked.message
    turned = refused(mixture, tmp_path / "turned", tensors | stacks(mixture.experts, turned=True), **BOTH)
    assert "turned as PEFT before 0.19.1" in turned.message
    trained = refused(mixture, tmp_path / "rs", tensors | pairs(mixture.experts), use_rslora=True)
    assert "1.41 times too strong" in trained.message


def test_a_fault_of_the_file_is_told_beside_it(tmp_path: Path, mixture: BaseSpec) -> None:
    tensors = attention(mixture) | pairs(mixture.experts)
    lacking = {name: array for name, array in tensors.items() if "layers.3.mlp.experts.2.up_proj" not in name}
    error = refused(mixture, tmp_path / "lacking", lacking)
    assert (error.code, error.feature) == ("unsupported_feature", "experts")
    assert "the config names model.layers.3.mlp.experts.2.up_proj, but no tensors came" in error.message
    error = refused(mixture, tmp_path / "dora", tensors, use_dora=True)
    assert (error.code, error.feature) == ("unsupported_feature", "experts_dora")
    # A module that is not served either is told too.
    gate = {name.replace("self_attn.q_proj", "self_attn.q_norm"): array for name, array in tensors.items()}
    error = refused(mixture, tmp_path / "norm", gate)
    assert [fault.feature for fault in error.faults] == ["experts", "q_norm"]
    error = refused(mixture, tmp_path / "bias", tensors, lora_bias=True)
    assert {fault.feature for fault in error.faults} == {"lora_bias", "experts"}


def test_what_the_experts_recipe_left_out_is_told(tmp_path: Path, with_shared: BaseSpec) -> None:
    """PEFT moves the three names to parameters of the experts; nothing else of these names is trained then."""
    tensors = attention(with_shared) | stacks(with_shared.experts)
    error = refused(with_shared, tmp_path, tensors, **BOTH)
    assert "PEFT left the shared experts and dense layers out of the training" in error.message
    assert "model.layers.0.mlp.gate_proj and 11 more" in error.message


def test_attention_alone_warns_where_the_config_names_experts(tmp_path: Path, mixture: BaseSpec) -> None:
    """What PEFT 0.18 saves of the seven names over stacked experts."""
    plain = admit(mixture, tmp_path / "plain", attention(mixture), target_modules=["q_proj"])
    assert "experts" not in warnings(plain)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    spec = admit(mixture, tmp_path / "names", attention(mixture), target_modules=names)
    assert spec.sites == plain.sites
    told = [line for line in warnings(spec).splitlines() if "experts" in line]
    assert len(told) == 1
    assert "the experts were not trained: target_modules names gate_proj, up_proj, down_proj" in told[0]
    error = refused(mixture, tmp_path / "parameters", attention(mixture), **BOTH)
    assert (error.code, error.feature) == ("missing_tensor", None)
    assert "target_parameters names 'down_proj', but no tensors came" in error.message


def test_target_parameters_are_read_where_the_base_has_experts(tmp_path: Path, mixture: BaseSpec) -> None:
    for value, code in (
        (["x"] * 5000, "config_invalid"),
        ("gate_up_proj", "config_invalid"),
        ([1], "config_invalid"),
    ):
        error = refused(
            mixture, tmp_path, attention(mixture), target_modules=["q_proj"], target_parameters=value
        )
        assert error.code == code
        assert "target_parameters" in error.message


def test_limits_of_a_file_follow_from_the_base(tmp_path: Path) -> None:
    """An adapter with a pair for each expert of Qwen3-30B-A3B: 36,864 tensors."""
    wide = {
        layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 128, 2048, 768) for layer in range(48)
    }
    limits = adapter_limits(made.plain_base(wide))
    assert limits.max_tensors == 6 * 48 * 128 + 4096
    assert limits.max_bytes == 256 * limits.max_tensors
    assert adapter_limits(made.plain_base({0: wide[0]})) == ADAPTER_LIMITS
    few = {0: ExpertShape(0, "model.layers.0.mlp.experts", 2000, 2, 1)}
    folder = write(tmp_path, pairs(few, 1))
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for experts, feature, code in (
        (few, "experts", "unsupported_feature"),
        ({0: wide[0]}, None, "too_large"),
    ):
        with pytest.raises(AdapterRefused) as caught:
            inspect_adapter(*files, made.plain_base(experts), max_rank=16)
        assert (caught.value.feature, caught.value.code) == (feature, code)


def test_a_router_that_was_trained_as_a_parameter_is_served(tmp_path: Path, mixture: BaseSpec) -> None:
    """PEFT's all-linear and `gate` train it so."""
    fields = {"target_modules": [], "target_parameters": ["gate.weight"]}
    router = attention(mixture, "gate")
    spec = admit(mixture, tmp_path / "alone", router, **fields)
    assert (spec.targets, len(spec.sites)) == (("gate",), mixture.num_layers)
    assert "experts" not in warnings(spec)
    fields["target_modules"] = ["q_proj"]
    both = admit(mixture, tmp_path / "both", router | attention(mixture), **fields)
    assert both.targets == ("q_proj", "gate")
    assert refused(mixture, tmp_path / "lacking", attention(mixture), **fields).code == "missing_tensor"
    fields["target_parameters"] = []
    assert refused(mixture, tmp_path / "unnamed", router, **fields).code == "unexpected_tensor"
