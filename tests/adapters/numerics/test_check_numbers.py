"""The check of a version's numbers: honest outputs pass in every dtype, wrong ones are named, and so is overflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt, ArtifactMissing, ArtifactUnreadable
from loraplex.adapters.numerics import (
    MAX_ERROR,
    TOLERANCE,
    NumbersVerdict,
    SiteOutputs,
    join_outputs,
)
from loraplex.adapters.numerics.probes import PROBE_ROWS, SKETCH_SUMS, column_signs, probe_inputs, sketch
from loraplex.adapters.spec import BaseSpec
from support.adapters.drafts import ALL_SITES, AdapterDraft, TinyBase, base_tensors, draft_adapter, write_base
from support.adapters.served_outputs import Outputs, served_rows, site_outputs
from support.adapters.whole_reads import check_numbers

ARCH = TinyBase(model_type="qwen2", hidden=160, intermediate=200, heads=4, kv_heads=2, head_dim=24)
DTYPES = ("float32", "float16", "bfloat16")
Q1 = "model.layers.1.self_attn.q_proj"

DRAFTS: dict[str, dict[str, Any]] = {
    "all": {"rank": 16, "targets": (*ALL_SITES, "lm_head")},
    "small": {"rank": 8, "scale": 1e-3, "targets": ALL_SITES},
    "large": {"rank": 64, "scale": 3.0, "targets": ALL_SITES, "dtype": "BF16"},
    "rslora": {"rank": 8, "use_rslora": True, "infix": "default", "dtype": "F16"},
    "patterns": {"ranks": {Q1: 12}, "alpha_pattern": {"q_proj": 40}, "targets": ("q_proj", "down_proj")},
    "dora": {"rank": 8, "dora": True, "targets": (*ALL_SITES, "lm_head")},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def rows_of(draft: AdapterDraft, base: BaseSpec, dtype: str) -> Outputs:
    return served_rows(draft, base, dtype, base_tensors(ARCH))


def check(draft: AdapterDraft, base: BaseSpec, outputs: SiteOutputs, directory: Path) -> NumbersVerdict:
    files = draft.write(directory)
    verdict = check_numbers(files.config, files.tensors, base, outputs)
    json.dumps(verdict.report, allow_nan=False)
    assert verdict.ok == (verdict.report["verdict"] == "equal")
    return verdict


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DRAFTS)
def test_honest_outputs_are_equal(name: str, dtype: str, base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH, **DRAFTS[name])
    verdict = check(draft, base, site_outputs(rows_of(draft, base, dtype), dtype), tmp_path)
    report = verdict.report
    assert verdict.ok, verdict.message
    assert report["max"] < TOLERANCE / 2
    assert report["mean"] <= report["max"]
    assert report["tolerance"] == TOLERANCE
    assert report["dtype"] == dtype
    assert len(report["norms"]) == sum("lora_A" in tensor for tensor in draft.tensors)
    assert report["errors"].keys() == report["norms"].keys()
    assert report["errors"][report["worst_module"]] == max(report["errors"].values()) == report["max"]
    # Besides, what the served dtype costs: the units above say nothing of it.
    limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert report["relative"]["max"] < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("factor", "scale"), [(1.0, 1e-5), (1.0001, 1e-5), (1.05, 1e-7), (1e-3, 0.3), (1e-9, 0.3)]
)
def test_dora_with_factors_near_one_and_near_zero_is_equal(
    factor: float, scale: float, dtype: str, base: BaseSpec, tmp_path: Path
) -> None:
    """Early in a training g is nearly 1, and (1 - g) ⊙ bias is what float32 left of two nearly equal numbers."""
    draft = draft_adapter(ARCH, rank=8, dora=True, scale=scale, targets=("q_proj", "up_proj"))
    weights = base_tensors(ARCH)
    for name in [name for name in draft.tensors if "magnitude" in name]:
        module = name.removeprefix("base_model.model.").partition(".lora_magnitude")[0]
        norms = np.linalg.norm(weights[f"{module}.weight"].astype(np.float32), axis=1)
        draft.tensors[name] = (norms * factor).astype(np.float32)
    rows = rows_of(draft, base, dtype)
    verdict = check(draft, base, site_outputs(rows, dtype), tmp_path / "right")
    assert verdict.ok, verdict.message
    rows[1, "q_proj"][:-1] *= 2
    rows[1, "up_proj"][-1] *= 2
    assert not check(draft, base, site_outputs(rows, dtype), tmp_path / "wrong").ok


def test_norms_and_effects_are_those_of_the_change(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH, rank=8, lora_alpha=24, targets=("q_proj",))
    report = check(draft, base, site_outputs(rows_of(draft, base, "float32"), "float32"), tmp_path).report
    for module, norm in report["norms"].items():
        a, b = (draft.tensors[f"base_model.model.{module}.lora_{kind}.weight"] for kind in "AB")
        assert norm == pytest.approx(3 * np.linalg.norm(b @ a), rel=1e-5)
    assert 0.7 < report["effect"]["mean"] / (norm / np.sqrt(len(b))) < 1.4
    assert report["effect"]["mean"] < report["effect"]["max"] < 2 * report["effect"]["mean"]


def two_percent(rows: Outputs, keys: list[tuple[int, str]]) -> None:
    for key in keys:
        exact = rows[key].astype(np.float32)
        exact[:-1] *= 1.02
        rows[key] = exact.astype(rows[key].dtype)


def exchange(rows: Outputs, one: tuple[int, str], other: tuple[int, str]) -> None:
    rows[one], rows[other] = rows[other], rows[one]


FAULTS: dict[str, Any] = {
    "scaling of all": lambda rows: two_percent(rows, list(rows)),
    "scaling of one": lambda rows: two_percent(rows, [(1, "up_proj")]),
    "exchanged sites": lambda rows: exchange(rows, (1, "gate_proj"), (1, "up_proj")),
    "exchanged layers": lambda rows: exchange(rows, (0, "up_proj"), (1, "up_proj")),
    "columns in another order": lambda rows: rows.update({(1, "up_proj"): rows[1, "up_proj"][:, ::-1]}),
    "moves the base": lambda rows: rows[1, "up_proj"].__setitem__(
        (-1, slice(None)), rows[1, "up_proj"][-1] * 1.02
    ),
    "a site is missing": lambda rows: rows.pop((1, "up_proj")),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_outputs_are_refused_by_their_numbers(
    fault: str, dtype: str, base: BaseSpec, tmp_path: Path
) -> None:
    draft = draft_adapter(ARCH, rank=16, targets=ALL_SITES)
    rows = rows_of(draft, base, dtype)
    FAULTS[fault](rows)
    verdict = check(draft, base, site_outputs(rows, dtype), tmp_path)
    assert verdict.report["verdict"] == "mismatch"
    assert verdict.report["max"] > 1.5 * TOLERANCE
    worst = verdict.report["worst_module"]
    assert worst in verdict.message
    if fault not in ("scaling of all", "exchanged layers"):
        assert worst.endswith(("1.mlp.up_proj", "1.mlp.gate_proj"))


def test_a_site_that_the_upload_does_not_name_is_a_mismatch(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH, targets=("q_proj",))
    rows = rows_of(draft, base, "float32")
    rows[0, "k_proj"] = np.zeros((PROBE_ROWS, 48), np.float32)
    verdict = check(draft, base, site_outputs(rows, "float32"), tmp_path)
    assert (verdict.report["verdict"], verdict.report["max"]) == ("mismatch", MAX_ERROR)
    assert "model.layers.0.self_attn.k_proj" in verdict.message


def test_ignored_magnitudes_are_a_mismatch(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH, dora=True)
    plain = AdapterDraft(draft.config, {n: t for n, t in draft.tensors.items() if "magnitude" not in n})
    verdict = check(draft, base, site_outputs(rows_of(plain, base, "bfloat16"), "bfloat16"), tmp_path)
    assert verdict.report["verdict"] == "mismatch"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "size", "found"),
    [("A", 1e38, "output"), ("B", 1e20, "output"), ("AB", 1e20, "output"), ("A", 1e40, "lora_A")],
)
def test_overflow_is_named(
    kind: str, size: float, found: str, dtype: str, base: BaseSpec, tmp_path: Path
) -> None:
    draft = draft_adapter(ARCH, targets=("q_proj", "v_proj"))
    with np.errstate(all="ignore"):
        for name, tensor in draft.tensors.items():
            if Q1 in name and any(f"lora_{letter}" in name for letter in kind):
                draft.tensors[name] = (tensor * size).astype(np.float32)
        outputs = site_outputs(rows_of(draft, base, dtype), dtype)
    for measured in (outputs, SiteOutputs(dtype, (), b"", b"", "its values are not finite")):
        verdict = check(draft, base, measured, tmp_path)
        assert (verdict.report["verdict"], verdict.report["worst_module"]) == ("overflow", Q1)
        assert f"{Q1}: " in verdict.message
        assert dtype in verdict.message
        if dtype == "bfloat16":
            assert found in verdict.message


def test_outputs_that_are_not_finite_overflow_whatever_the_reference_says(
    base: BaseSpec, tmp_path: Path
) -> None:
    draft = draft_adapter(ARCH, targets=("q_proj",))
    rows = rows_of(draft, base, "float16")
    rows[1, "q_proj"][2, 5] = np.inf
    verdict = check(draft, base, site_outputs(rows, "float16"), tmp_path)
    assert (verdict.report["verdict"], verdict.report["worst_module"]) == ("overflow", Q1)


def test_nothing_measured_of_a_sound_adapter_is_a_mismatch(base: BaseSpec, tmp_path: Path) -> None:
    verdict = check(draft_adapter(ARCH), base, SiteOutputs("float16", (), b"", b""), tmp_path)
    assert (verdict.report["verdict"], verdict.report["max"]) == ("mismatch", MAX_ERROR)


def test_a_load_that_failed_for_another_reason_is_no_verdict(base: BaseSpec, tmp_path: Path) -> None:
    with pytest.raises(ArtifactUnreadable, match="the disk is gone"):
        check(draft_adapter(ARCH), base, SiteOutputs("float16", (), b"", b"", "the disk is gone"), tmp_path)


def test_files_that_cannot_be_read(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH)
    outputs = site_outputs(rows_of(draft, base, "float32"), "float32")
    files = draft.write(tmp_path)
    whole = files.tensors.read_bytes()
    for cut in (4, 100, len(whole) - 4):
        files.tensors.write_bytes(whole[:cut])
        with pytest.raises(ArtifactCorrupt):
            check_numbers(files.config, files.tensors, base, outputs)
    files.tensors.unlink()
    with pytest.raises(ArtifactMissing):
        check_numbers(files.config, files.tensors, base, outputs)
    draft.tensors = {name.replace("q_proj", "x_proj"): tensor for name, tensor in draft.tensors.items()}
    files = draft.write(tmp_path)
    with pytest.raises(AdapterRefused):
        check_numbers(files.config, files.tensors, base, outputs)


def test_parts_join_in_order(base: BaseSpec) -> None:
    rows = rows_of(draft_adapter(ARCH, targets=ALL_SITES), base, "float16")
    keys = list(rows)
    parts = [site_outputs({key: rows[key] for key in part}, "float16") for part in (keys[:3], [], keys[3:])]
    assert join_outputs(parts) == site_outputs(rows, "float16")


def test_sketches_keep_norms_on_average() -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((200, 1000))
    sums = sketch(rows)
    assert sums.shape == (200, SKETCH_SUMS)
    assert np.square(sums).sum() == pytest.approx(np.square(rows).sum(), rel=0.05)
    assert abs(column_signs(1000).mean()) < 0.1


def test_probes_differ_between_layers_and_rows_and_hold_signs() -> None:
    rows = np.concatenate([probe_inputs(layer, 500) for layer in range(3)])
    signs = rows[np.abs(rows).sum(axis=1) > 0]
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert len(signs) == 3 * (PROBE_ROWS - 1)
    assert np.abs(signs @ signs.T - 500 * np.eye(len(signs))).max() < 120
