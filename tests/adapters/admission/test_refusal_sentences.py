"""What a refusal says: all that is wrong, what each field means for the trained weights, and no advice that makes wrong
numbers look right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.config.token_indices import MAX_TOKEN_ROWS
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.peft_support import CONFIG_FIELDS, TENSOR_KINDS, UNKNOWN_FIELD, ConfigField
from loraplex.adapters.admission.safetensors_header import read_header
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


def trained(base_dir: Path, init: Any, **options: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": init,
    } | options
    return get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **config))


def saved(model: Any, directory: Path, **options: Any) -> tuple[Path, Path]:
    model.save_pretrained(str(directory), **options)
    return directory / "adapter_config.json", directory / "adapter_model.safetensors"


CONVERTED: dict[str, dict[str, Any]] = {
    "alone": {},
    "rank-stabilised": {"use_rslora": True},
    "ranks by module": {"rank_pattern": {"q_proj": 2}},
    "alphas by module": {"alpha_pattern": {"q_proj": 3}},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "some layers": {"layers_to_transform": [1]},
    "an expression": {"target_modules": r".*\.(q|v)_proj"},
}


@pytest.mark.parametrize(
    ("init", "second"), [("olora", "alone"), *(("pissa", second) for second in CONVERTED)]
)
def test_the_conversion_that_is_proposed_makes_an_adapter_that_equals_peft(
    tmp_path: Path, base_dir: Path, base: BaseSpec, init: str, second: str
) -> None:
    """PEFT makes another file of the trained model, which has all that was trained."""
    model = trained(base_dir, init, **CONVERTED[second])
    saved(model, tmp_path / "initial")
    before = trained(base_dir, True).unload().state_dict()
    train_beside(model)
    with pytest.raises(AdapterRefused, match="path_initial_model_for_weight_conversion"):
        inspect_adapter(*saved(model, tmp_path / "raw"), base, max_rank=16)
    plain = saved(
        model, tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    spec = inspect_adapter(*plain, base, max_rank=16)
    merged = model.merge_and_unload().state_dict()
    from loraplex.adapters.store.tensors import read_tensor

    for site in spec.sites:
        path = f"{base.sites[site.layer, site.site].module_path}.weight"
        a, b = read_tensor(plain[1], site.a), read_tensor(plain[1], site.b)
        change = (merged[path] - before[path]).numpy()
        np.testing.assert_allclose(site.scaling * (b @ a), change, atol=2e-5)


def train_beside(model: Any) -> None:
    """Move all that is trained."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def test_the_way_to_merge_rank_stabilised_adapters_that_the_docs_give(
    tmp_path: Path, base_dir: Path, base: BaseSpec
) -> None:
    model = trained(base_dir, True, use_rslora=True, r=16)
    train_beside(model)
    one = inspect_adapter(*saved(model, tmp_path / "one"), base, max_rank=16)
    model.add_weighted_adapter(["default"], [1.0], "merged", combination_type="cat")
    found = {}
    for stabilised in (True, False):
        model.peft_config["merged"].use_rslora = stabilised
        saved(model, tmp_path / str(stabilised), selected_adapters=["merged"])
        folder = tmp_path / str(stabilised) / "merged"
        files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        found[stabilised] = inspect_adapter(*files, base, max_rank=16).report["norm"]["total"]
    assert found[True] / one.report["norm"]["total"] == pytest.approx(4.0)  # as PEFT would load it
    assert found[False] == pytest.approx(one.report["norm"]["total"])


NOT_CONVERTED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA's magnitudes"),
    "trained tokens": ({"trainable_token_indices": [1, 2]}, "rows of trained tokens"),
    "the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "LoRA on an embedding"),
    "a whole module": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "two at once": (
        {"use_dora": True, "trainable_token_indices": [1]}, "DoRA's magnitudes and rows of trained tokens",
    ),
    "ranks under rank-stabilised scaling": (
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}}, "use_rslora beside rank_pattern or alpha_pattern",
    ),
}  # fmt: skip


@pytest.mark.parametrize("second", NOT_CONVERTED)
def test_no_conversion_is_proposed_that_would_lose_what_was_trained(
    tmp_path: Path, base_dir: Path, base: BaseSpec, second: str
) -> None:
    options, told = NOT_CONVERTED[second]
    model = trained(base_dir, "pissa", **options)
    saved(model, tmp_path / "initial")
    train_beside(model)
    raw = saved(model, tmp_path / "raw")
    with pytest.raises(AdapterRefused) as caught:
        inspect_adapter(*raw, base, max_rank=16)
    assert f"PEFT does not convert {told}, so" in caught.value.message
    assert "path_initial_model_for_weight_conversion" not in caught.value.message
    # It is so: PEFT's conversion fails, or its file lacks a part of what was trained.
    try:
        plain = saved(
            model, tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
        )
    except ValueError:
        assert "use_rslora" in told
    else:
        assert not read_header(raw[1]).keys() <= read_header(plain[1]).keys()
        with pytest.raises(AdapterRefused):
            inspect_adapter(*plain, base, max_rank=16)
    if "modules_to_save" not in options:  # never served
        again = trained(base_dir, True, **options)
        train_beside(again)
        inspect_adapter(*saved(again, tmp_path / "again", save_embedding_layers=False), base, max_rank=16)


@pytest.mark.parametrize(
    "options", [{}, {"layers_to_transform": [1]}, {"target_modules": ["q_proj", "lm_head"]}]
)
def test_lora_in_place_of_too_many_rows_is_served(
    tmp_path: Path, base_dir: Path, base: BaseSpec, options: dict[str, Any]
) -> None:
    error = refused(base, tmp_path, trainable_token_indices=list(range(MAX_TOKEN_ROWS + 1)))
    assert "embed_tokens can be a target, without DoRA and aLoRA" in error.message
    targets = [*options.get("target_modules", ["q_proj"]), "embed_tokens"]
    if "layers_to_transform" in options:  # a name of a target behind the layers is none of theirs
        targets[-1] = "model.embed_tokens"
    model = trained(base_dir, True, **(options | {"target_modules": targets}))
    train_beside(model)
    spec = inspect_adapter(*saved(model, tmp_path / "lora"), base, max_rank=16)
    assert "embed_tokens" in spec.targets


def test_all_faults_are_told_at_once_with_the_code_and_feature_of_the_first(
    tmp_path: Path, base: BaseSpec
) -> None:
    extra = {
        "base_model.model.classifier.dense.weight": halves(2, 32),
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
    for word in ("bias", "lora_bias", "r must be", "use_dora", "lora_alpha", "classifier.dense"):
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
