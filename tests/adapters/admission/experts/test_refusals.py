"""Refusals and warnings of uploads for a mixture, about its experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.experts.places import expert_paths
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.inspection_cache import InspectionCache
from loraplex.adapters.admission.module_names import names_of
from loraplex.adapters.admission.safetensors_header import ADAPTER_LIMITS, adapter_limits, largest_upload
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.numerics.upload import Upload, UploadedSite
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
    """A base whose first layer is dense; each of the others has a shared expert."""
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


@pytest.fixture(scope="module")
def not_served(mixture: BaseSpec) -> BaseSpec:
    """The same of a family whose experts take no adapters."""
    return replace(mixture, model_type="phimoe")


def test_what_lies_on_experts_is_admitted_and_reported(tmp_path: Path, mixture: BaseSpec) -> None:
    tensors = attention(mixture) | pairs(mixture.experts)
    for name in tensors:
        if ".experts.2." in name and ".lora_B." in name:
            tensors[name] = np.zeros_like(tensors[name])
    spec = admit(mixture, tmp_path / "pairs", tensors, use_rslora=True)
    assert len(spec.experts) == 3 * 4 * 4
    assert spec.targets == ("q_proj", "experts.gate", "experts.up", "experts.down")
    assert spec.report["parameters"] == sum(array.size for array in tensors.values())
    assert spec.report["modules_matched"] == 4 + 3 * 4 * 4
    ranks = spec.report["rank_by_module"]
    assert ranks["model.layers.3.mlp.experts.up"] == ranks["model.layers.0.self_attn.q_proj"] == 4
    told = warnings(spec)
    assert "1.41 times too strong" in told
    assert "4 of 16 experts with LoRA have a product of zero" in told
    details = [check["detail"] for check in spec.report["checks"]]
    assert "a pair an expert: gate, up, down of 4 layers, rank 4 an expert" in details


def test_a_file_of_many_experts_is_read_again_at_a_load(tmp_path: Path, mixture: BaseSpec) -> None:
    many = {0: replace(mixture.experts[0], count=3000)}
    names = ["gate_proj", "up_proj", "down_proj"]
    base = replace(mixture, experts=many)
    admitted = admit(base, tmp_path, pairs(many, 1), r=1, target_modules=names)
    files = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    assert int.from_bytes(files[1].read_bytes()[:8], "little") > ADAPTER_LIMITS.max_bytes
    assert InspectionCache(base, 16).inspect(*files, admitted.digest).experts == admitted.experts


def test_experts_alone_are_admitted(tmp_path: Path, mixture: BaseSpec) -> None:
    alone = BOTH | {"target_modules": [], "r": 16, "rank_pattern": {r".*\.gate_up_proj": 32}}
    deep, top = stacks(mixture.experts, 32), stacks(mixture.experts, 16)
    tensors = {name: (deep if ".base_layer." in name else top)[name] for name in top}
    spec = admit(mixture, tmp_path / "stacks", tensors, **alone)
    assert (spec.rank, spec.sites, spec.targets) == (32, (), ("experts.gate_up", "experts.down"))
    zero = {name: np.zeros_like(array) for name, array in tensors.items()}
    assert refused(mixture, tmp_path / "zero", zero, **alone).code == "no_effect"
    tensors["model.layers.1.mlp.experts.lora_B.weight"][3, 5] = np.nan
    broken = refused(mixture, tmp_path / "nan", tensors, **alone)
    assert broken.code == "non_finite"
    assert "model.layers.1.mlp.experts.down" in broken.message


def test_the_refusal_of_another_family_says_which_form_was_found(
    tmp_path: Path, mixture: BaseSpec, not_served: BaseSpec
) -> None:
    tensors = attention(mixture)
    whole = refused(not_served, tmp_path / "pairs", tensors | pairs(mixture.experts))
    assert (whole.code, whole.feature, len(whole.faults)) == ("unsupported_feature", "experts", 1)
    assert "has a pair an expert: gate, up, down of 4 layers, rank 4 an expert" in whole.message
    stacked = refused(not_served, tmp_path / "stacks", tensors | stacks(mixture.experts), **BOTH)
    assert (stacked.feature, len(stacked.faults)) == ("experts", 1)
    assert "has stacks of all experts of a layer: gate_up, down of 4 layers" in stacked.message
    turned = refused(not_served, tmp_path / "turned", tensors | stacks(mixture.experts, turned=True), **BOTH)
    assert "turned as PEFT before 0.19.1" in turned.message
    trained = refused(not_served, tmp_path / "rs", tensors | pairs(mixture.experts), use_rslora=True)
    assert "1.41 times too strong" in trained.message


def test_granites_stacks_by_their_names_of_transformers_4_are_refused_by_name(tmp_path: Path) -> None:
    base = load_base_spec(save_family("granitemoe", tmp_path / "base"))
    for linear, k, n in (("input_linear", 64, 64), ("output_linear", 32, 64)):
        path = f"model.layers.0.block_sparse_moe.{linear}"
        tensors = attention(base) | {
            f"{path}.lora_A.weight": np.ones((16, k), np.float32),
            f"{path}.lora_B.weight": np.ones((n, 16), np.float32),
        }
        fields = {"target_modules": ["q_proj"], "target_parameters": [f"{linear}.weight"]}
        error = refused(base, tmp_path / linear, tensors, **fields)
        assert (error.code, error.feature) == ("unsupported_feature", "experts_layout")
        assert path in error.message
        told = warnings(admit(base, tmp_path / linear, attention(base), **fields))
        assert f"target_parameters names '{linear}.weight', which the base's language model has no" in told
        assert "target_modules names" not in told


def test_a_fault_of_the_file_is_told(tmp_path: Path, mixture: BaseSpec, not_served: BaseSpec) -> None:
    tensors = attention(mixture) | pairs(mixture.experts)
    lacking = {name: array for name, array in tensors.items() if "layers.3.mlp.experts.2.up_proj" not in name}
    told = "the config names 'model.layers.3.mlp.experts.2.up_proj', but no tensors came"
    error = refused(mixture, tmp_path / "lacking", lacking)
    assert (error.code, error.feature) == ("missing_tensor", None)
    assert told in error.message
    error = refused(not_served, tmp_path / "lacking", lacking)
    assert (error.code, error.feature) == ("unsupported_feature", "experts")
    assert told in error.message
    error = refused(mixture, tmp_path / "dora", tensors, use_dora=True)
    assert (error.code, error.feature) == ("unsupported_feature", "experts_dora")
    # A module that is not served either is told too.
    gate = {name.replace("self_attn.q_proj", "self_attn.q_norm"): array for name, array in tensors.items()}
    error = refused(not_served, tmp_path / "norm", gate)
    assert [fault.feature for fault in error.faults] == ["experts", "q_norm"]
    error = refused(not_served, tmp_path / "bias", tensors, lora_bias=True)
    assert {fault.feature for fault in error.faults} == {"lora_bias", "experts"}
    assert refused(mixture, tmp_path / "bias", tensors, lora_bias=True).feature == "lora_bias"


def test_an_adapter_for_more_experts_is_told_as_such(tmp_path: Path, mixture: BaseSpec) -> None:
    """8 experts at rank 4 have the rows of 4 at rank 8."""
    more = {layer: replace(shape, count=8) for layer, shape in mixture.experts.items()}
    error = refused(mixture, tmp_path / "more", attention(mixture) | stacks(more), **BOTH)
    assert error.code == "shape_mismatch"
    assert (
        "stacks of 8 experts at the config's rank 4, and of rank 8 for the 4 experts of the base"
        in error.message
    )
    many = {layer: replace(shape, count=128) for layer, shape in mixture.experts.items()}
    assert "stacks of 128 experts" in refused(mixture, tmp_path / "many", stacks(many), **BOTH).message


def test_a_number_that_no_expert_has_is_no_experts_that_are_not_served(
    tmp_path: Path, mixture: BaseSpec
) -> None:
    tensors = attention(mixture) | pairs(mixture.experts)
    tensors |= {name.replace(".experts.0.", ".experts.-1."): array for name, array in tensors.items()}
    message = refused(mixture, tmp_path, tensors).message
    assert "experts.-1.down_proj' and 11 more) is not served by this name" in message
    assert "read are a pair for each expert (experts.0.gate_proj" in message
    assert "outside of the experts" not in message


def test_what_the_experts_recipe_left_out_is_told(tmp_path: Path, with_shared: BaseSpec) -> None:
    """PEFT moves the three names to parameters of the experts; nothing else of these names is trained then."""
    tensors = attention(with_shared) | stacks(with_shared.experts)
    told = warnings(admit(with_shared, tmp_path, tensors, **BOTH))
    assert "PEFT left the shared experts and dense layers out of the training" in told
    assert "model.layers.0.mlp.gate_proj and 11 more" in told


def test_attention_alone_warns_where_the_config_names_experts(
    tmp_path: Path, mixture: BaseSpec, not_served: BaseSpec
) -> None:
    """PEFT 0.18 saves this of the seven names over stacked experts."""
    plain = admit(mixture, tmp_path / "plain", attention(mixture), target_modules=["q_proj"])
    assert "experts" not in warnings(plain)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    spec = admit(mixture, tmp_path / "names", attention(mixture), target_modules=names)
    assert spec.sites == plain.sites
    told = [line for line in warnings(spec).splitlines() if "experts" in line]
    assert len(told) == 1
    assert "the experts were not trained: target_modules names gate_proj, up_proj, down_proj" in told[0]
    assert 'target_parameters=["experts.gate_up_proj", "experts.down_proj"] trains them' in told[0]
    other = warnings(admit(not_served, tmp_path / "other", attention(mixture), target_modules=names))
    assert "LoRA on the experts of a phimoe would be refused: it is not served" in other
    assert "target_parameters" not in other
    error = refused(mixture, tmp_path / "parameters", attention(mixture), **BOTH)
    assert (error.code, error.feature) == ("missing_tensor", None)
    assert "target_parameters names 'down_proj', but no tensors came" in error.message


def test_every_linear_but_the_experts_warns_as_all_linear_leaves_them_out(tmp_path: Path) -> None:
    """PEFT saves names of linears for "all-linear", and the experts of gpt-oss and Granite are none."""
    for family in ("gpt_oss", "granitemoe"):
        base = load_base_spec(save_family(family, tmp_path / family))
        tensors: Arrays = {}
        for site in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors |= attention(base, site)
            names = [name.partition(".lora_")[0] for name in tensors]
            told = warnings(admit(base, tmp_path / site, tensors, target_modules=names))
            assert ("the experts have no LoRA" in told) == (site == "o_proj")
        assert 'target_parameters=["experts.gate_up_proj", "experts.down_proj"] does so' in told
        served = replace(base, model_type="phimoe")
        assert "experts" not in warnings(admit(served, tmp_path / "o_proj", tensors, target_modules=names))
        both = {"target_modules": names, "target_parameters": BOTH["target_parameters"]}
        with_experts = admit(base, tmp_path / "experts", tensors | stacks(base.experts), **both)
        assert "the experts have no LoRA" not in warnings(with_experts)


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
        assert error.message.count("target_parameters") == 1


def test_the_largest_upload_follows_from_the_base() -> None:
    """48 layers of 128 experts, as Qwen3-30B-A3B has: rank 8 takes 830 MB in 16 bits."""
    wide = {at: ExpertShape(at, f"model.layers.{at}.mlp.experts", 128, 2048, 768) for at in range(48)}
    assert largest_upload("auto", made.plain_base(wide)) == 4 * 48 * 128 * 3 * 8 * (2048 + 768) * 2
    assert largest_upload("auto", made.plain_base({0: wide[0]})) == 1 << 30
    assert largest_upload(10_000, made.plain_base(wide)) == 10_000


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


def scalings(folder: Path, base: BaseSpec, tensors: Arrays, **fields: Any) -> set[float]:
    """Those of the router. The second reading has found the same."""
    spec = admit(base, folder, tensors, **fields)
    second = Upload(folder / "adapter_config.json", folder / "adapter_model.safetensors", base)
    for site in spec.sites:
        read = second.read(site.layer, site.site)
        assert isinstance(read, UploadedSite)
        assert read.scaling == site.scaling
    return {site.scaling for site in spec.sites if site.site == "gate"}


@pytest.mark.parametrize(
    ("key", "scaling"),
    [
        ("gate.weight", 8.0),
        ("mlp.gate", 2.0),
        ("gate", 2.0),
        (r".*\.gate", 2.0),
        (r"mlp\.(gate|x)\.weight", 8.0),
        ("model.layers.0.mlp.gate.weight", 8.0),
    ],
)
def test_patterns_are_matched_with_the_weight_that_is_a_parameter(
    key: str, scaling: float, tmp_path: Path, mixture: BaseSpec
) -> None:
    """PEFT 0.21.2 scales so."""
    fields = {"r": 8, "lora_alpha": 16, "target_modules": [], "target_parameters": ["gate.weight"]}
    router = {
        name: np.repeat(array, 2, axis=name.count("lora_B"))
        for name, array in attention(mixture, "gate").items()
    }
    found = scalings(tmp_path / "alpha", mixture, router, alpha_pattern={key: 64}, **fields)
    assert found == ({8.0, 2.0} if ".0." in key else {scaling})
    # A rank of the router's own.
    ranks = {"rank_pattern": {"gate.weight": 4}}
    assert scalings(tmp_path / "rank", mixture, attention(mixture, "gate"), **fields, **ranks) == {4.0}
    error = refused(
        mixture, tmp_path / "module", attention(mixture, "gate"), **fields, rank_pattern={"gate": 4}
    )
    assert error.code == "shape_mismatch"


def test_names_of_mixtral_in_transformers_4(tmp_path: Path) -> None:
    base = load_base_spec(save_family("mixtral", tmp_path / "base"))
    router = attention(base, "gate")
    old = {name.replace(".mlp.", ".block_sparse_moe."): array for name, array in router.items()}
    assert set(old) != set(router)
    for number, (tensors, word) in enumerate(((router, "mlp"), (old, "block_sparse_moe"), (old, "mlp"))):
        fields = {
            "target_modules": [f"model.layers.{layer}.{word}.gate" for layer in range(base.num_layers)],
            "alpha_pattern": {f"{word}.gate": 12},
        }
        assert scalings(tmp_path / f"{number}", base, tensors, **fields) == {3.0}
    expression = {"target_modules": ["gate"], "alpha_pattern": {r".*block_sparse_moe\.gate": 12}}
    assert scalings(tmp_path / "expression", base, old, **expression) == {3.0}
    mixed = {name: array for name, array in router.items() if ".0." in name}
    mixed |= {name: array for name, array in old.items() if ".0." not in name}
    assert refused(base, tmp_path / "mixed", mixed, target_modules=["gate"]).code == "unexpected_tensor"
    # The experts are found under either name.
    trained = pairs(base.experts, 4, ("w1", "w3", "w2"))
    trained = {name.replace(".mlp.", ".block_sparse_moe."): array for name, array in trained.items()}
    spec = admit(base, tmp_path / "experts", trained, target_modules=["w1", "w2", "w3"])
    assert spec.targets == ("experts.gate", "experts.up", "experts.down")


def test_what_lies_outside_of_experts_is_held_to_the_limits_of_all(tmp_path: Path) -> None:
    wide = made.plain_base({0: ExpertShape(0, "model.layers.0.mlp.experts", 20000, 2, 1)})
    assert adapter_limits(wide).max_tensors > 100_000
    other = {f"model.layers.{n}.x.lora_A.weight": np.ones(1, np.float32) for n in range(8193)}
    error = refused(wide, tmp_path / "many", other)
    assert (error.code, error.message) == (
        "too_large", "the file names 8193 tensors; at most 8192 are accepted",
    )  # fmt: skip
    few = pairs({0: ExpertShape(0, "model.layers.0.mlp.experts", 1, 2, 1)})
    assert refused(wide, tmp_path / "beside", other | few).code == "too_large"
    long = {f"{n:05}{'x' * 400}.lora_A.weight": np.ones(1, np.float32) for n in range(5000)}
    error = refused(wide, tmp_path / "long", long)
    assert (error.code, "safetensors header has" in error.message) == ("too_large", True)


def test_names_that_only_look_like_experts_are_no_paths(mixture: BaseSpec) -> None:
    begin = "model.layers.0.mlp.experts"
    deep = [f"{begin}{'.a' * 200}.n{n}.lora_velora_embed" for n in range(1000)]
    deep += [f"model.layers.0.{'m' * 65}.experts.1.w1.lora_A", "model.layers.00.mlp.experts.1.w1.lora_A"]
    real = [f"{begin}.1.up_proj.lora_A.weight", f"{begin}.w1.lora_A.weight"]
    names = names_of(deep + real, mixture)
    own = set(expert_paths((), mixture, names))
    assert set(expert_paths(deep + real, mixture, names)) - own == {f"{begin}.1.up_proj", f"{begin}.w1"}
