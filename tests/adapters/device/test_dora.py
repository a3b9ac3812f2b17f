"""DoRA's vectors: the formula, from slices of the base's files; what no formula helps; a load that is given up."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.device.dora import dora_vectors
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.errors import AdapterRefused, BaseModelInvalid, LoadAbandoned
from loraplex.adapters.spec import SiteWeights, TensorSlice
from loraplex.adapters.store.tensors import NUMPY_DTYPES
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.drafts import (
    ALL_SITES,
    TinyBase,
    base_tensors,
    draft_adapter,
    write_base,
    write_safetensors,
)

ARCH = TinyBase(model_type="qwen2", layers=1, hidden=300, intermediate=1000, heads=4, kv_heads=2, head_dim=48)
"""Wide enough for several slices and several products of each, none of them even."""
SITE = "model.layers.0.self_attn.q_proj"
NOWHERE = TensorSlice("F32", (0,), 0, 0)


def write(root: Path, dtype: str = "BF16", **changed: Any) -> BaseWeights:
    tensors = base_tensors(ARCH, dtype=dtype) | changed
    (root / "base").mkdir()
    (root / "base" / "config.json").write_text(json.dumps(ARCH.config(dtype)))
    write_safetensors(root / "base" / "model.safetensors", tensors, {"format": "pt"})
    return BaseWeights(load_base_spec(root / "base"))


def vectors(
    base: BaseWeights, site: str, magnitude: Any, a: Any, b: Any, served: str = "F32"
) -> tuple[np.ndarray, np.ndarray]:
    where = SiteWeights(0, site, len(a), 1.0, NOWHERE, NOWHERE, NOWHERE)
    return dora_vectors(magnitude, a, b, base, where, NUMPY_DTYPES[served])


def draw(site: str, rank: int, scale: float = 0.1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    out_features, in_features = ARCH.out_in(site)
    rng = np.random.default_rng(rank)
    shapes = ((out_features,), (rank, in_features), (out_features, rank))
    magnitude, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return magnitude, a * np.float32(scale), b * np.float32(scale)


@pytest.mark.parametrize(
    ("stored", "served", "rank"),
    [("BF16", "BF16", 64), ("F32", "F32", 7), ("F32", "BF16", 1), ("F16", "F32", 512)],
)
def test_the_formula(tmp_path: Path, stored: str, served: str, rank: int) -> None:
    base = write(tmp_path, stored)
    weights = base_tensors(ARCH, dtype=stored)
    for site in (*ALL_SITES, "lm_head"):
        magnitude, a, b = draw(site, rank)
        gain, offset = vectors(base, site, magnitude, a, b, served)
        name = next(name for name in weights if name.endswith(f"{site}.weight"))
        exact = weights[name].astype(NUMPY_DTYPES[served]).astype(np.float64)
        exact += b.astype(np.float64) @ a.astype(np.float64)
        np.testing.assert_allclose(gain, magnitude / np.linalg.norm(exact, axis=1), rtol=2e-6)
        bias = weights.get(name.replace(".weight", ".bias"))
        if bias is None:
            assert not offset.any()
        else:
            own = bias.astype(NUMPY_DTYPES[served]).astype(np.float64)
            np.testing.assert_allclose(offset, (1 - gain.astype(np.float64)) * own, rtol=1e-5, atol=1e-7)


def test_magnitudes_of_zero_turn_outputs_off_and_negative_ones_around(tmp_path: Path) -> None:
    base = write(tmp_path)
    magnitude, a, b = draw("o_proj", 4)
    gain, _ = vectors(base, "o_proj", magnitude, a, b)
    magnitude[5], magnitude[6] = 0, -magnitude[6]
    changed, _ = vectors(base, "o_proj", magnitude, a, b)
    assert changed[5] == 0
    assert changed[6] == -gain[6]
    assert (np.delete(changed, [5, 6]) == np.delete(gain, [5, 6])).all()


@pytest.mark.parametrize("size", [0.0, 1.0, 3e38])
def test_rows_that_have_no_direction_are_refused(tmp_path: Path, size: float) -> None:
    """A row of zeros that B does not change, one that B·A takes away, one too long for a float."""
    weight = base_tensors(ARCH, dtype="F32")[f"{SITE}.weight"]
    magnitude, a, b = draw("q_proj", 4)
    b[7] = 0
    weight[7] = 0
    if size == 1.0:
        b[7], weight[7] = [1, 0, 0, 0], -a[0]
    elif size:
        b[7] = size
    base = write(tmp_path, "F32", **{f"{SITE}.weight": weight})
    with pytest.raises(AdapterRefused, match="q_proj of layer 0: DoRA's magnitudes") as refusal:
        vectors(base, "q_proj", magnitude, a, b)
    assert refusal.value.code == "non_finite"


def test_a_magnitude_too_large_for_its_row_is_refused(tmp_path: Path) -> None:
    magnitude, a, b = draw("q_proj", 4, scale=1e-3)
    weight = base_tensors(ARCH, dtype="F32")[f"{SITE}.weight"] * np.float32(1e-3)
    base = write(tmp_path, "F32", **{f"{SITE}.weight": weight})
    magnitude[3] = 3e38
    with pytest.raises(AdapterRefused, match="too large"):
        vectors(base, "q_proj", magnitude, a, b)


def test_a_base_that_was_changed_under_the_engine_is_noticed(tmp_path: Path) -> None:
    base = write(tmp_path)
    path = tmp_path / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(BaseModelInvalid, match="was changed after the engine had loaded it"):
        vectors(base, "q_proj", *draw("q_proj", 4))


def test_a_load_that_nobody_waits_for_stops_at_the_next_site(tmp_path: Path) -> None:
    arch = TinyBase()
    spec = load_base_spec(write_base(tmp_path / "base", arch))
    files = draft_adapter(arch, targets=("q_proj", "down_proj"), dora=True).write(tmp_path / "adapter")
    adapter = inspect_adapter(files.config, files.tensors, spec, max_rank=8)
    groups = tuple(
        SiteGroup(site, (site,), arch.out_in(site)[1], (arch.out_in(site)[0],))
        for site in ("q_proj", "down_proj")
    )
    layout = ArenaLayout(groups, arch.layers, torch.float32, max_rank=8, page_bytes=16 << 10)
    asked: list[bool] = []

    class Base(BaseWeights):
        num_read = 0

        def rows(self, layer: int, site: str, served: Any) -> Any:
            self.num_read += 1
            return super().rows(layer, site, served)

    def wanted() -> bool:
        asked.append(len(asked) < 2)
        return asked[-1]

    base = Base(spec)
    with pytest.raises(LoadAbandoned):
        build_image(adapter, files.tensors, layout, base=base, wanted=wanted)
    assert asked == [True, True, False]
    assert base.num_read == 2
    assert build_image(replace(adapter), files.tensors, layout, base=base).num_pages


@pytest.mark.soak
@pytest.mark.parametrize("rank", [16, 64])
def test_cost_and_exactness_on_the_real_model(real_model_dir: Path, rank: int) -> None:
    spec = load_base_spec(real_model_dir)
    base = BaseWeights(spec)
    rng = np.random.default_rng(0)
    seconds, count, worst = 0.0, 0, 0.0
    for (layer, site), shape in spec.sites.items():
        if site == "lm_head":
            continue
        a = rng.standard_normal((rank, shape.in_features)).astype(np.float32) * np.float32(0.02)
        b = rng.standard_normal((shape.out_features, rank)).astype(np.float32) * np.float32(0.02)
        where = SiteWeights(layer, site, rank, 1.0, NOWHERE, NOWHERE, NOWHERE)
        before = time.process_time()
        gain, _ = dora_vectors(
            np.ones(shape.out_features, np.float32), a, b, base, where, NUMPY_DTYPES["BF16"]
        )
        seconds += time.process_time() - before
        count += shape.in_features * shape.out_features
        exact = np.concatenate(
            [rows.astype(np.float64) for rows in base.rows(layer, site, NUMPY_DTYPES["BF16"])]
        )
        exact += b.astype(np.float64) @ a.astype(np.float64)
        worst = max(worst, float(np.abs(gain * np.linalg.norm(exact, axis=1) - 1).max()))
    print(
        f"rank {rank}: {seconds:.2f} s of a processor for {count / 1e6:.0f} million weights, error {worst:.1e}"
    )
    assert worst < 2e-6
