"""Tensors for the parts of a multimodal base that no text goes through: left out where the base has them, and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import BaseTensor, load_base_spec, locate_module_weights
from loraplex.adapters.admission.model_parts import MULTIMODAL
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.numerics.upload import Upload
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from support.adapters.admission import ARCH, admit, halves, refusal
from support.adapters.drafts import draft_adapter, write_base
from support.adapters.towers import PREFIX, PROJECTOR, TABLE, TOWER, draft_with, write_multimodal_base


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_multimodal_base(tmp_path_factory.mktemp("llava")))


def left_out(spec: AdapterSpec) -> list[str]:
    details = [check["detail"] for check in spec.report["checks"] if not check["ok"]]
    return [" ".join(detail.split()[1:6]) for detail in details if "were left out" in detail]


@pytest.mark.parametrize(
    "tower", [TOWER, TOWER.removeprefix("model."), TOWER.replace(".encoder", ".vision_model.encoder")]
)
@pytest.mark.parametrize("deep", [False, True])
def test_what_no_text_goes_through_is_left_out_and_told(
    tower: str, deep: bool, base: BaseSpec, tmp_path: Path
) -> None:
    plain = admit(draft_adapter(ARCH).write(tmp_path / "plain"), base, deep=deep)
    draft = draft_with(tower)
    draft.tensors[f"{PREFIX}{TABLE}.lora_embedding_A"] = halves(4, 9)
    draft.tensors[f"{PREFIX}{TABLE}.lora_embedding_B"] = halves(24, 4)
    draft.tensors[f"{PREFIX}{PROJECTOR}.lora_A.weight"] = halves(4, 16)
    draft.tensors[f"{PREFIX}{PROJECTOR}.lora_B.weight"] = halves(32, 4)
    found = admit(draft.write(tmp_path / "both"), base, deep=deep)
    assert [(s.layer, s.site, s.scaling) for s in found.sites] == [
        (s.layer, s.site, s.scaling) for s in plain.sites
    ]
    assert found.report["norm"] == plain.report["norm"]
    assert found.report["modules_matched"] == plain.report["modules_matched"]
    assert found.report["modules_ignored"] == 6
    assert sorted(left_out(found)) == [
        "2 tensors of model.multi_modal_projector were",
        "4 tensors of model.vision_tower were",
    ]


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_the_check_of_its_numbers_leaves_them_out_too(
    model_type: str, base: BaseSpec, tmp_path: Path
) -> None:
    """An upload is read a second time, on its own, for the verdict."""
    parts = MULTIMODAL[model_type]
    names = [f"{before}{part}" for part in parts.others for before in ("", "model.")]
    modules = [
        f"{name}{behind}" for name in names for behind in ("", ".fc1", ".encoder.layers.0.self_attn.q_proj")
    ]
    files = draft_with(*modules).write(tmp_path)
    spec = admit(files, replace(base, multimodal=model_type), deep=False)
    second = Upload(files.config, files.tensors, replace(base, multimodal=model_type))
    assert second.sites.keys() == {(site.layer, site.site) for site in spec.sites}


def test_the_check_of_its_numbers_misses_nothing_of_the_text(base: BaseSpec, tmp_path: Path) -> None:
    files = draft_with("language_model.layers.9.self_attn.q_proj").write(tmp_path)
    with pytest.raises(AdapterRefused, match="no linear"):
        Upload(files.config, files.tensors, base)


def test_the_magnitudes_of_dora_go_with_them(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH, use_dora=True)
    draft.tensors |= draft_with(TOWER).tensors
    draft.tensors[f"{PREFIX}{TOWER}.lora_magnitude_vector"] = halves(32)
    for module in {name.partition(".lora_")[0] for name in draft.tensors} - {f"{PREFIX}{TOWER}"}:
        rows = len(draft.tensors[f"{module}.lora_B.weight"])
        draft.tensors[f"{module}.lora_magnitude_vector"] = halves(rows)
    found = admit(draft.write(tmp_path), base)
    assert left_out(found) == ["3 tensors of model.vision_tower were"]
    assert all(site.magnitude for site in found.sites)


@pytest.mark.parametrize(
    ("modules", "inputs", "code", "words"),
    [
        (["model.vision_tower.encoder.layers.7.self_attn.q_proj"], 24, "base_mismatch", "has no module"),
        (["model.vision_tower.hidden"], 24, "base_mismatch", "has no module"),
        (["model.audio_tower.layers.0.q_proj"], 24, "base_mismatch", "for another model"),
        (["vision.tower"], 24, "base_mismatch", "for another model"),
        (["model.language_model.vision_tower.q_proj"], 24, "base_mismatch", "for another model"),
        ([TOWER], 16, "shape_mismatch", "does not fit the base's weight"),
    ],
)
def test_a_name_alone_hides_nothing(
    modules: list[str], inputs: int, code: str, words: str, base: BaseSpec, tmp_path: Path
) -> None:
    """What the base has not, in its own parts, is refused, as it is in the language model."""
    error = refusal(draft_with(*modules, inputs=inputs), tmp_path, base)
    assert (error.code, words in error.message) == (code, True), error.message


def test_a_text_model_has_no_such_parts(text: BaseSpec, tmp_path: Path) -> None:
    assert refusal(draft_with(TOWER), tmp_path, text).code == "base_mismatch"


def test_an_adapter_of_a_tower_alone_is_refused(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_with(TOWER)
    draft.tensors = {name: tensor for name, tensor in draft.tensors.items() if TOWER in name}
    for deep in (True, False):
        error = refusal(draft, tmp_path / str(deep), base, deep=deep)
        assert error.code == "no_effect"
        assert "model.vision_tower" in error.message


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "name", ["multi_modal_projector", "model.multi_modal_projector", "projector.linear_1", "linear_1"]
)
def test_a_whole_part_that_was_trained_beside_is_left_out(
    name: str, deep: bool, base: BaseSpec, tmp_path: Path
) -> None:
    draft = draft_adapter(ARCH, modules_to_save=[name])
    draft.tensors[f"{PREFIX}{PROJECTOR}.weight"] = halves(32, 16) * 3
    draft.tensors[f"{PREFIX}{PROJECTOR}.bias"] = np.zeros(32, np.float32)
    found = admit(draft.write(tmp_path), base, deep=deep)
    assert left_out(found) == ["2 tensors of model.multi_modal_projector were"]


@pytest.mark.parametrize(
    "names",
    [
        ["lm_head"],
        ["multi_modal_projector", "lm_head"],
        ["q_proj"],
        ["model"],
        ["absent"],
        ["norm"],
        ["language_model"],
    ],
)
def test_a_module_that_text_goes_through_is_not(names: list[str], base: BaseSpec, tmp_path: Path) -> None:
    error = refusal(draft_adapter(ARCH, modules_to_save=names), tmp_path, base)
    assert error.feature == "modules_to_save"


@pytest.mark.parametrize(("deep", "reads"), [(True, 2), (False, 0)])
def test_the_headers_of_the_base_are_not_read_for_each_name(
    deep: bool, reads: int, base: BaseSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large mixture take a second, and the engine loads an adapter beside its steps."""
    found: list[BaseSpec] = []

    def locate(asked: BaseSpec) -> dict[str, BaseTensor]:
        found.append(asked)
        return locate_module_weights(asked)

    monkeypatch.setattr("loraplex.adapters.admission.modules.locate_module_weights", locate)
    saved = ["linear_1", "projector.linear_1", "multi_modal_projector", "multi_modal_projector.linear_1"]
    draft = draft_with(TOWER, modules_to_save=saved)
    admit(draft.write(tmp_path), base, deep=deep)
    assert len(found) == reads


def test_an_operator_may_have_them_refused(base: BaseSpec, tmp_path: Path) -> None:
    error = refusal(draft_with(TOWER), tmp_path, base, refuse_towers=True)
    assert (error.code, error.feature) == ("unsupported_feature", "other_towers")
    assert "--adapter-towers refuse" in error.message
    error = refusal(draft_adapter(ARCH, modules_to_save=["linear_1"]), tmp_path, base, refuse_towers=True)
    assert error.feature == "modules_to_save"
