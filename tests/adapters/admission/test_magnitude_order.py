"""DoRA's magnitudes in another order than the rows that they scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import ARCH, admit
from support.adapters.drafts import AdapterDraft, draft_adapter, site_module, write_base
from support.adapters.whole_reads import read_base_weight

DIM = ARCH.head_dim
TARGETS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def draft_trained(base: BaseSpec, *, moved: float, targets: tuple[str, ...] = TARGETS) -> AdapterDraft:
    """Magnitudes are the norms of the rows, times factors that differ from 1 by `moved`."""
    draft = draft_adapter(ARCH, targets=targets, dora=True)
    rng = np.random.default_rng(0)
    for layer in range(ARCH.layers):
        for site in targets:
            key = f"base_model.model.{site_module(layer, site)}"
            a, b = (draft.tensors[f"{key}.lora_{part}.weight"].astype(np.float32) for part in "AB")
            rows = read_base_weight(base, layer, site).astype(np.float32) + 2.0 * b @ a
            factors = np.exp(moved * rng.standard_normal(len(rows)))
            draft.tensors[f"{key}.lora_magnitude_vector"] = (np.linalg.norm(rows, axis=1) * factors).astype(
                np.float32
            )
    return draft


def reordered(draft: AdapterDraft, kind: str, site: str) -> AdapterDraft:
    """Magnitudes of one site in the order of neighbouring pairs, as a conversion leaves them, or back."""
    for name in [name for name in draft.tensors if f"{site}.lora_magnitude" in name]:
        values = draft.tensors[name]
        shape = (-1, 2, DIM // 2) if kind == "as torchtune leaves them" else (-1, DIM // 2, 2)
        draft.tensors[name] = values.reshape(shape).swapaxes(1, 2).reshape(-1)
    return draft


def warnings(draft: AdapterDraft, directory: Path, base: BaseSpec) -> list[str]:
    report = admit(draft.write(directory), base).report
    return [c["detail"] for c in report["checks"] if c["name"] == "values" and not c["ok"]]


@pytest.mark.parametrize("kind", ["as torchtune leaves them", "the other way round"])
@pytest.mark.parametrize("site", ["q_proj", "k_proj"])
def test_magnitudes_in_the_order_of_another_implementation_warn(
    site: str, kind: str, base: BaseSpec, tmp_path: Path
) -> None:
    (told,) = warnings(reordered(draft_trained(base, moved=0.01), kind, site), tmp_path, base)
    assert site in told
    assert "torchtune" in told


@pytest.mark.parametrize("moved", [0.0, 0.01, 0.1, 1.0])
def test_magnitudes_in_their_own_order_do_not(moved: float, base: BaseSpec, tmp_path: Path) -> None:
    assert warnings(draft_trained(base, moved=moved), tmp_path, base) == []


def test_magnitudes_that_no_order_tells_of_do_not(base: BaseSpec, tmp_path: Path) -> None:
    equal = draft_trained(base, moved=0.0)
    for name in [name for name in equal.tensors if "magnitude" in name]:
        equal.tensors[name] = np.ones_like(equal.tensors[name])
    assert warnings(equal, tmp_path / "equal", base) == []
    # A row of zeros has no logarithm.
    zeros = draft_trained(base, moved=0.0)
    for name in [name for name in zeros.tensors if "magnitude" in name]:
        zeros.tensors[name][0] = 0
    assert warnings(zeros, tmp_path / "zeros", base) == []
    unturned = draft_trained(base, moved=0.01, targets=("v_proj", "down_proj"))
    assert warnings(reordered(unturned, "as torchtune leaves them", "v_proj"), tmp_path / "v", base) == []
