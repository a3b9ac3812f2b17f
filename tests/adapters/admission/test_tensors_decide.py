"""Tensors say what was trained. What the config names beside them only warns, unless the base has it and tensors for it
are missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.numerics.upload import Upload
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from support.adapters.admission import ARCH, admit, halves
from support.adapters.drafts import TinyBase, base_tensors, draft_adapter, write_base, write_safetensors
from support.models.expert_adapters import write
from support.models.tiny_families import save_family

MIXTURE = ["model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert.up_proj"]
TOWER = [
    "model.vision_tower.encoder.layers.0.self_attn.q_proj",
    "model.vision_tower.encoder.layers.0.mlp.fc9",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    """The first layer has experts, a shared one and a router, the second is dense. Beside it, a vision tower."""
    directory = write_base(tmp_path_factory.mktemp("mixture"), ARCH)
    tensors = base_tensors(ARCH)
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        weight = tensors.pop(f"model.layers.0.mlp.{leaf}.weight")
        for expert in range(2):
            tensors[f"model.layers.0.mlp.experts.{expert}.{leaf}.weight"] = weight
        tensors[f"model.layers.0.mlp.shared_expert.{leaf}.weight"] = weight
    for module in (MIXTURE[0], *TOWER):
        tensors[f"{module}.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"]
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": text}))
    return load_base_spec(directory)


def push(base: BaseSpec, directory: Path, modules: tuple[str, ...] = (), **fields: Any) -> AdapterSpec:
    """LoRA on q_proj and v_proj, or what `fields` say, and on these whole paths beside."""
    draft = draft_adapter(ARCH, **fields)
    for module in modules:
        for kind in "AB":
            draft.tensors[f"base_model.model.{module}.lora_{kind}.weight"] = halves(4, 4)
    return admit(draft.write(directory), base, refuse_towers=True)


def refused(*args: Any, **fields: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        push(*args, **fields)
    return caught.value


def warnings(spec: AdapterSpec) -> str:
    return "\n".join(c["detail"] for c in spec.report["checks"] if not c["ok"] and c["name"] != "base_name")


SAME_AS_PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "names that the base lacks": ({"target_modules": ["q_proj", "v_proj", "query_key_value"]}, "query_key_value"),
    "layers beyond the base": ({"layers_to_transform": [0, 1, 31]}, "31"),
    "layers for an expression": ({"target_modules": "(q|v)_proj", "layers_to_transform": [0]}, "layers_to_transform"),
    "an expression for the list of layers": ({"layers_to_transform": [0, 1], "layers_pattern": "lay.*"}, "lay.*"),
    "a list of layers without layers": ({"layers_pattern": "h"}, "layers_pattern"),
    "a task of another class": ({"task_type": "SEQ_2_SEQ_LM"}, ""),
    "embeddings": ({"task_type": "FEATURE_EXTRACTION"}, ""),
    "questions, as PEFT writes it": ({"task_type": "QUESTION_ANS", "modules_to_save": ["qa_outputs"]}, "qa_outputs"),
    "tying where nothing is tied": ({"ensure_weight_tying": True}, "ensure_weight_tying"),
    "fields without effect, of strange types": (
        {"peft_version": 18, "lora_dropout": "0.1", "eva_config": "x", "inference_mode": "no", "revision": 3},
        "peft_version",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME_AS_PLAIN)
def test_what_changes_nothing_is_accepted_as_the_plain_adapter(
    tmp_path: Path, base: BaseSpec, case: str
) -> None:
    fields, word = SAME_AS_PLAIN[case]
    plain, found = push(base, tmp_path / "plain"), push(base, tmp_path / "found", **fields)
    assert found.sites == plain.sites
    assert word in warnings(found)
    assert bool(warnings(found)) == bool(word)


@pytest.mark.parametrize("name", ["k_proj", "embed_tokens", "self_attn.k_proj", "model.norm"])
def test_a_name_that_the_base_has_and_no_tensors_came_for_is_refused(
    tmp_path: Path, base: BaseSpec, name: str
) -> None:
    error = refused(base, tmp_path, target_modules=["q_proj", "v_proj", name, "c_attn"])
    assert error.code == "missing_tensor"
    assert name in error.message


def test_names_of_other_towers_and_of_experts_warn(tmp_path: Path, mixture: BaseSpec) -> None:
    found = push(mixture, tmp_path, target_modules=["q_proj", "v_proj", "fc9"])
    assert "fc9" in warnings(found)
    error = refused(mixture, tmp_path, target_modules=["q_proj", "v_proj", "gate"])
    assert error.code == "missing_tensor"


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_task_with_a_head_is_refused_without_it(tmp_path: Path, base: BaseSpec, task: str) -> None:
    for more in ({}, {"modules_to_save": ["classifier", "score"]}):
        error = refused(base, tmp_path, task_type=task, **more)
        assert [fault.feature for fault in error.faults] == ["task_type"]
    error = refused(base, tmp_path, modules_to_save=["score"])
    assert (error.code, error.feature) == ("missing_tensor", None)


@pytest.mark.parametrize(
    "head", ["score.weight", "classifier.dense.bias", "qa_outputs.modules_to_save.weight"]
)
def test_a_head_is_refused_whatever_the_config_says(tmp_path: Path, base: BaseSpec, head: str) -> None:
    draft = draft_adapter(ARCH, task_type="QUESTION_ANS", modules_to_save=["qa_outputs"])
    draft.tensors[f"base_model.model.{head}"] = halves(2, 32)
    with pytest.raises(AdapterRefused) as caught:
        admit(draft.write(tmp_path), base)
    assert (caught.value.code, caught.value.feature) == ("unsupported_feature", "modules_to_save")
    assert head.partition(".")[0] in caught.value.message


@pytest.mark.parametrize("tied", [False, True])
def test_tying_is_refused_where_the_head_is_trained_and_tied(tmp_path: Path, tied: bool) -> None:
    arch = TinyBase(tied=tied)
    base = load_base_spec(write_base(tmp_path / "base", arch))
    draft = draft_adapter(arch, targets=["lm_head"], ensure_weight_tying=True)
    files = draft.write(tmp_path / "adapter")
    if not tied:
        assert "ensure_weight_tying" in warnings(admit(files, base))
        return
    with pytest.raises(AdapterRefused) as caught:
        admit(files, base)
    assert (caught.value.code, caught.value.feature) == ("unsupported_feature", "ensure_weight_tying")


EXPERTS: dict[str, tuple[str, ...]] = {
    "one pair an expert": tuple(f"model.layers.0.mlp.experts.{i}.down_proj" for i in range(2)),
    "stacked": ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_are_refused_by_name_with_what_is_served_instead(
    tmp_path: Path, mixture: BaseSpec, case: str
) -> None:
    fields = {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "target_parameters": ["mlp.experts.down_proj"],
    }
    error = refused(mixture, tmp_path, EXPERTS[case], **fields)
    assert (error.code, error.feature, len(error.faults)) == ("unsupported_feature", "experts", 1)
    assert "experts of a mixture" in error.message
    assert "q_proj, k_proj, v_proj, o_proj" in error.message
    # How to train without them.
    assert 'target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]' in error.message
    assert ("and 1 more" in error.message) == (len(EXPERTS[case]) > 1)
    assert push(mixture, tmp_path).targets == ("q_proj", "v_proj")


def test_the_shared_expert_of_a_mixture_is_served(tmp_path: Path, mixture: BaseSpec) -> None:
    """All tokens go through it: its linears are those of the layer."""
    fields = {"targets": ["q_proj", "v_proj", "up_proj"], "layers_to_transform": [0, 1]}
    draft = draft_adapter(ARCH, **fields)
    draft.tensors = {
        name.replace(".0.mlp.up_proj", ".0.mlp.shared_expert.up_proj"): t for name, t in draft.tensors.items()
    }
    files = draft.write(tmp_path)
    spec = admit(files, mixture)
    assert spec.targets == ("q_proj", "v_proj", "up_proj")
    assert set(Upload(files.config, files.tensors, mixture).sites.values()) >= {
        MIXTURE[1], "model.layers.1.mlp.up_proj",
    }  # fmt: skip
    error = refused(mixture, tmp_path / "lacking", target_modules=["q_proj", "v_proj", "up_proj"])
    assert error.code == "missing_tensor"


def test_experts_on_a_base_without_any_are_for_another_model(tmp_path: Path, base: BaseSpec) -> None:
    error = refused(base, tmp_path, EXPERTS["one pair an expert"])
    assert (error.code, error.feature) == ("base_mismatch", None)


def test_an_adapter_of_a_model_that_sees_is_told_so_by_a_language_model(
    tmp_path: Path, base: BaseSpec
) -> None:
    """ "all-linear" over the whole checkpoint, uploaded to a server of its text part."""
    towers = ("model.visual.blocks.0.attn.qkv", "model.visual.merger.linear_fc1")
    for modules in (towers, ("vision_tower.encoder.layers.0.fc1",)):
        error = refused(base, tmp_path, modules)
        assert (error.code, error.feature) == ("base_mismatch", None)
        assert f"the base has no module '{modules[0]}'" in error.message
        assert "trained on a model that also sees or hears" in error.message
        assert "Serve the whole checkpoint that it was trained on" in error.message
    other = refused(base, tmp_path, (*towers, "model.layers.0.self_attn.other"))
    assert "for another model" in other.message
    assert "Serve the whole" not in other.message


def test_no_sentence_contradicts_itself(tmp_path: Path, mixture: BaseSpec) -> None:
    """A module that is not served is not of a name that the same sentence calls served."""
    for module in (MIXTURE[0], *TOWER, "model.norm"):
        error = refused(mixture, tmp_path, (module,))
        assert error.code == "unsupported_feature"
        which, _, served = error.message.partition("is not served")
        assert module in which
        leaf = module.rpartition(".")[2]
        assert leaf not in re.findall(r"\w+", served.partition("language model")[0]), error.message


def test_both_kinds_of_foreign_modules_are_told(tmp_path: Path, mixture: BaseSpec) -> None:
    error = refused(mixture, tmp_path, (MIXTURE[0], TOWER[0], "transformer.h.0.attn.c_attn"))
    assert [fault.feature for fault in error.faults] == ["gate", "other_towers", None]
    assert [fault.code for fault in error.faults][-1] == "base_mismatch"
    json.dumps(error.report, allow_nan=False)


def test_layers_without_lora_of_a_hybrid_are_told(tmp_path: Path) -> None:
    """Names of an attention's linears fit one layer in four of Qwen3.5; the report says so, as PEFT does not."""
    hybrid = load_base_spec(save_family("qwen3_5_text", tmp_path / "base"))

    def told(name: str, *sites: str, **fields: Any) -> str:
        tensors = {
            f"{shape.module_path}.lora_{side}.weight": np.ones(size, np.float32)
            for shape in hybrid.sites.values()
            if shape.site in sites
            for side, size in (("A", (4, shape.in_features)), ("B", (shape.out_features, 4)))
        }
        folder = write(tmp_path / name, tensors, **({"target_modules": list(sites)} | fields))
        files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        return warnings(inspect_adapter(*files, hybrid, max_rank=16))

    attention = told("attention", "q_proj", "v_proj")
    assert "3 of 4 layers have no LoRA (0, 1, 2): target_modules names none of their linears" in attention
    assert "in_proj_qkv" in attention
    assert "have no LoRA" not in told("all", "q_proj", "out_proj")
    assert "have no LoRA" not in told("head", "lm_head")
    # The config chose these layers itself.
    others = [f"model.layers.{layer}.linear_attn.out_proj" for layer in range(3)]
    assert "have no LoRA" not in told(
        "excluded", "q_proj", target_modules=["q_proj", "out_proj"], exclude_modules=others
    )
    assert "have no LoRA" not in told("layers", "q_proj", layers_to_transform=[3])
    assert "have no LoRA" not in told("path", "q_proj", target_modules=["model.layers.3.self_attn.q_proj"])
