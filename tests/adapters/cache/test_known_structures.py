"""Structures of adapters that passed once: an adapter of the same config and header passes as it would in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.inspection_cache import KnownStructures
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.adapters.store.files import digest_upload
from support.adapters.admission import ARCH, Q0, halves
from support.adapters.drafts import NUMPY_DTYPES, AdapterDraft, AdapterFiles, draft_adapter, write_base

DTYPES = ("BF16", "F16", "F32")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def full(files: AdapterFiles, base: BaseSpec) -> AdapterSpec:
    return inspect_adapter(files.config, files.tensors, base, max_rank=16)


def learned(draft: AdapterDraft, folder: Path, base: BaseSpec) -> KnownStructures:
    """The structures after one adapter passed in full."""
    structures, files = KnownStructures(base), draft.write(folder)
    structures.remember(files.config, files.tensors, full(files, base))
    return structures


def found(structures: KnownStructures, draft: AdapterDraft, folder: Path) -> AdapterSpec | None:
    files = draft.write(folder)
    return structures.inspect(files.config, files.tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"ranks": {Q0: 2}}], ids=str)
def test_other_values_of_a_known_structure_are_what_an_inspection_says(
    base: BaseSpec, tmp_path: Path, dtype: str, options: dict[str, Any]
) -> None:
    structures = learned(draft_adapter(ARCH, seed=1, dtype=dtype, **options), tmp_path / "first", base)
    draft = draft_adapter(ARCH, seed=2, dtype=dtype, **options)
    spec = found(structures, draft, tmp_path / "second")
    files = draft.write(tmp_path / "third")
    whole = full(files, base)
    assert spec is not None
    assert spec.digest == digest_upload(files.config, files.tensors) == whole.digest
    assert (spec.sites, spec.rank, spec.targets) == (whole.sites, whole.rank, whole.targets)
    assert whole.report["norm"] is not None
    assert spec.report["norm"] is None
    told = {check["name"]: check["detail"] for check in spec.report["checks"]}
    assert told["values"] == "finite, and of effect; the norms were not measured"
    assert told | {"values": "finite, and of effect"} == {
        check["name"]: check["detail"] for check in whole.report["checks"]
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_what_is_not_finite_is_left_to_the_inspection_that_refuses_it(
    base: BaseSpec, tmp_path: Path, dtype: str, value: float, matrix: str
) -> None:
    structures = learned(draft_adapter(ARCH, dtype=dtype), tmp_path / "first", base)
    draft = draft_adapter(ARCH, dtype=dtype)
    for name in [name for name in draft.tensors if matrix in name][-1:]:
        draft.tensors[name].reshape(-1)[-1] = value
    assert found(structures, draft, tmp_path / "second") is None
    with pytest.raises(AdapterRefused) as refused:
        full(draft.write(tmp_path / "third"), base)
    assert refused.value.code == "non_finite"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", ["lora_A", "lora_B", f"{Q0}.lora_B"])
def test_what_changes_nothing_is_left_to_the_inspection(
    base: BaseSpec, tmp_path: Path, dtype: str, zero: str
) -> None:
    structures = learned(draft_adapter(ARCH, dtype=dtype), tmp_path / "first", base)
    draft = draft_adapter(ARCH, dtype=dtype, seed=2)
    for name in [name for name in draft.tensors if zero in name]:
        draft.tensors[name] *= 0
    assert found(structures, draft, tmp_path / "second") is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_numbers_are_finite(base: BaseSpec, tmp_path: Path, dtype: str) -> None:
    structures = learned(draft_adapter(ARCH, dtype=dtype, lora_alpha=4), tmp_path / "first", base)
    draft = draft_adapter(ARCH, dtype=dtype, lora_alpha=4)
    of = np.finfo(np.float16) if dtype == "F16" else np.finfo(np.float32)
    largest = NUMPY_DTYPES[dtype](3.3e38) if dtype == "BF16" else of.max
    for tensor in draft.tensors.values():
        tensor.reshape(-1)[:3] = largest, -largest, of.tiny / 4
    assert found(structures, draft, tmp_path / "second") is not None


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_number_that_its_scaling_makes_infinite_is_left_to_the_inspection(
    base: BaseSpec, tmp_path: Path, dtype: str
) -> None:
    structures = learned(draft_adapter(ARCH, dtype=dtype), tmp_path / "first", base)
    draft = draft_adapter(ARCH, dtype=dtype)  # a scaling of 2
    for name in [name for name in draft.tensors if "lora_B" in name][-1:]:
        draft.tensors[name].reshape(-1)[-1] = -3e38
    assert found(structures, draft, tmp_path / "second") is None
    with pytest.raises(AdapterRefused) as refused:
        full(draft.write(tmp_path / "third"), base)
    assert refused.value.code == "non_finite"


@pytest.mark.parametrize(
    "other", [{"lora_alpha": 5}, {"rank": 2}, {"dtype": "F16"}, {"targets": ["q_proj"]}], ids=str
)
def test_another_config_or_header_is_not_known(base: BaseSpec, tmp_path: Path, other: dict[str, Any]) -> None:
    structures = learned(draft_adapter(ARCH, dtype="BF16"), tmp_path / "first", base)
    assert found(structures, draft_adapter(ARCH, **{"dtype": "BF16", **other}), tmp_path / "second") is None


def test_a_file_of_another_length_is_not_known(base: BaseSpec, tmp_path: Path) -> None:
    draft = draft_adapter(ARCH)
    structures = learned(draft, tmp_path / "first", base)
    files = draft.write(tmp_path / "second")
    files.tensors.write_bytes(files.tensors.read_bytes()[:-1])
    assert structures.inspect(files.config, files.tensors) is None


def test_more_than_lora_on_linears_is_not_remembered(base: BaseSpec, tmp_path: Path) -> None:
    rows = draft_adapter(ARCH, trainable_token_indices=[1, 2])
    rows.tensors["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"] = halves(
        2, ARCH.hidden
    )
    assert found(learned(rows, tmp_path / "rows", base), rows, tmp_path / "again") is None
    for name, draft in {
        "F64": draft_adapter(ARCH, dtype="F64"),
        "head": draft_adapter(ARCH, targets=("lm_head", "v_proj")),
        "DoRA": draft_adapter(ARCH, dora=True),
    }.items():
        assert found(learned(draft, tmp_path / name, base), draft, tmp_path / f"{name} again") is None


def test_only_the_last_structures_are_kept(base: BaseSpec, tmp_path: Path) -> None:
    first = draft_adapter(ARCH)
    structures = learned(first, tmp_path / "first", base)
    for alpha in range(100, 120):
        files = draft_adapter(ARCH, lora_alpha=alpha).write(tmp_path / str(alpha))
        structures.remember(files.config, files.tensors, full(files, base))
    assert found(structures, first, tmp_path / "again") is None
