"""What a refusal says: all that is wrong, what each field means for the trained weights, and no advice that makes wrong
numbers look right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.peft_support import CONFIG_FIELDS, TENSOR_KINDS, UNKNOWN_FIELD, ConfigField
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, admit, halves
from support.adapters.drafts import draft_adapter, write_base
from support.adapters.edits import advised_edits

REFUSED_VALUES = [
    (field, value)
    for field in CONFIG_FIELDS
    if "unsupported_feature" in field.codes and field.accepts is not None
    for value in field.refused
]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), ARCH, dtype="F32")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> BaseSpec:
    return load_base_spec(base_dir)


def refused(
    base: BaseSpec, directory: Path, tensors: dict[str, np.ndarray] | None = None, **fields: Any
) -> AdapterRefused:
    draft = draft_adapter(ARCH, **fields)
    draft.tensors |= tensors or {}
    with pytest.raises(AdapterRefused) as caught:
        admit(draft.write(directory), base)
    return caught.value


@pytest.mark.parametrize(("field", "value"), REFUSED_VALUES, ids=lambda x: getattr(x, "name", str(x)))
def test_a_refused_field_says_what_it_means_for_the_trained_weights(
    tmp_path: Path, base: BaseSpec, field: ConfigField, value: Any
) -> None:
    error = refused(base, tmp_path, **{field.name: value})
    assert (error.code, error.feature) == ("unsupported_feature", field.name)
    about = field.explain(value)
    assert len(about.split()) >= 8, about
    assert about in error.message
    assert advised_edits(error.message) == []
    others = {other.explain(v) for other, v in REFUSED_VALUES if other is not field}
    assert about not in others, "each field has a sentence of its own"


def test_an_unknown_field_says_so_and_gives_no_advice(tmp_path: Path, base: BaseSpec) -> None:
    error = refused(base, tmp_path, a_field_of_next_year="x")
    assert error.message == f'adapter_config.json: a_field_of_next_year = "x" is not served: {UNKNOWN_FIELD}'
    assert advised_edits(error.message) == []


@pytest.mark.parametrize("kind", [kind for kind in TENSOR_KINDS if kind.feature], ids=lambda kind: kind.part)
def test_refused_tensors_say_what_they_belong_to(tmp_path: Path, base: BaseSpec, kind: Any) -> None:
    error = refused(base, tmp_path, {f"base_model.model.x.{kind.part}.weight": halves(4, 4)})
    assert (error.code, error.feature) == ("unsupported_feature", kind.feature)
    assert len(kind.explain().split()) >= 8
    assert kind.explain() in error.message
    assert advised_edits(error.message) == []


def test_what_the_advice_is_tested_by_finds_the_advice_of_old() -> None:
    old = "leave it out, or give it the value that turns it off (null, false, [] or {})"
    assert advised_edits(old)
    assert advised_edits("take the name out of the list")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_conversion_that_is_proposed_makes_an_adapter_that_equals_peft(
    tmp_path: Path, base_dir: Path, base: BaseSpec, init: str
) -> None:
    """The one remedy that a message names: PEFT makes another file of the trained model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32),
        LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=init
        ),
    )
    model.save_pretrained(str(tmp_path / "initial"))
    before = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(str(tmp_path / "raw"))
    files = tmp_path / "raw" / "adapter_config.json", tmp_path / "raw" / "adapter_model.safetensors"
    with pytest.raises(AdapterRefused, match="path_initial_model_for_weight_conversion"):
        inspect_adapter(*files, base, max_rank=16)
    model.save_pretrained(
        str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    plain = tmp_path / "plain" / "adapter_config.json", tmp_path / "plain" / "adapter_model.safetensors"
    spec = inspect_adapter(*plain, base, max_rank=16)
    merged = model.merge_and_unload().state_dict()
    from loraplex.adapters.store.tensors import read_tensor

    for site in spec.sites:
        path = f"{base.sites[site.layer, site.site].module_path}.weight"
        a, b = read_tensor(plain[1], site.a), read_tensor(plain[1], site.b)
        change = (merged[path] - before[path]).numpy()
        np.testing.assert_allclose(site.scaling * (b @ a), change, atol=2e-5)


def test_all_faults_are_told_at_once_with_the_code_and_feature_of_the_first(
    tmp_path: Path, base: BaseSpec
) -> None:
    extra = {
        "base_model.model.score.weight": halves(2, 32),
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": halves(4, 32),
        "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": halves(32, 4),
    }
    error = refused(base, tmp_path, extra, bias="all", lora_bias=True, r=0, use_dora="yes", lora_alpha="16")
    assert (error.code, error.feature) == ("unsupported_feature", "bias")
    assert [(fault.code, fault.feature) for fault in error.faults] == [
        ("unsupported_feature", "bias"),
        ("unsupported_feature", "lora_bias"),
        ("config_invalid", None),
        ("config_invalid", None),
        ("config_invalid", None),
        ("unsupported_feature", "modules_to_save"),
    ]
    for word in ("bias", "lora_bias", "r must be", "use_dora", "lora_alpha", "score.weight"):
        assert word in error.message
    assert error.report is not None
    told = [check["detail"] for check in error.report["checks"] if not check["ok"]]
    assert told == [fault.message for fault in error.faults]
    json.dumps(error.report, allow_nan=False)


def test_a_feature_of_config_and_tensors_is_told_once(tmp_path: Path, base: BaseSpec) -> None:
    saved = {f"base_model.model.lm_head.modules_to_save.{i}.weight": halves(64, 32) for i in range(9)}
    error = refused(base, tmp_path, saved, modules_to_save=["lm_head"])
    assert [fault.feature for fault in error.faults] == ["modules_to_save"]
    assert not error.message.startswith("(1)")


def test_very_many_faults_make_a_message_of_bounded_length(tmp_path: Path, base: BaseSpec) -> None:
    error = refused(base, tmp_path, **{f"field_{i}": "x" * 999 for i in range(999)})
    assert len(error.faults) < 20
    assert error.message.endswith("; and others")
    assert len(error.message) < 16 * 400


def test_what_the_tensors_lack_is_told_beside_what_the_config_asks_for(
    tmp_path: Path, base: BaseSpec
) -> None:
    error = refused(
        base, tmp_path, trainable_token_indices={"embed_tokens": [1]}, lora_bias=True,
        target_modules=["q_proj", "v_proj", "k_proj"],
    )  # fmt: skip
    assert [(fault.code, fault.feature) for fault in error.faults] == [
        ("unsupported_feature", "lora_bias"),
        ("missing_tensor", None),
        ("missing_tensor", None),
    ]
    assert "trainable_token_indices" in error.message
    assert "k_proj" in error.message
