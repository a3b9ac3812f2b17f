"""Admission against a base: what is accepted, the report, and what has no effect."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt, ArtifactMissing
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.files import digest_upload
from loraplex.adapters.store.tensors import read_native, read_tensor
from support.adapters.admission import ARCH, Q0, admit, halves, refusal
from support.adapters.drafts import (
    ALL_SITES,
    TinyBase,
    attempt,
    draft_adapter,
    frame_header,
    site_module,
    write_base,
)
from support.adapters.whole_reads import read_base_weight


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("infix", ["", "default"])
def test_an_adapter_is_admitted_with_its_report(
    tmp_path: Path, base: BaseSpec, dtype: str, infix: str
) -> None:
    draft = draft_adapter(
        ARCH, rank=4, targets=ALL_SITES, dtype=dtype, infix=infix, ranks={site_module(1, "up_proj"): 9}
    )
    files = draft.write(tmp_path)
    spec = admit(files, base)
    assert spec.digest == digest_upload(files.config, files.tensors)
    assert spec.num_bytes == files.config.stat().st_size + files.tensors.stat().st_size
    assert (spec.rank, spec.targets) == (9, ALL_SITES)
    assert [(s.layer, s.site) for s in spec.sites] == [(i, site) for i in (0, 1) for site in ALL_SITES]
    report = json.loads(json.dumps(spec.report, allow_nan=False))
    assert report["modules_matched"] == 14
    assert report["parameters"] == sum(t.size for t in draft.tensors.values())
    assert report["rank_by_module"][site_module(1, "up_proj")] == 9
    assert report["reference_error"] is None
    assert [c["name"] for c in report["checks"] if not c["ok"]] == ["base_name"]  # only a warning
    squares = 0.0
    for site in spec.sites:
        a, b = read_tensor(files.tensors, site.a), read_tensor(files.tensors, site.b)
        assert a.dtype == b.dtype == np.float32
        assert site.scaling == 8 / site.rank
        squares += float(np.linalg.norm(site.scaling * (b.astype(np.float64) @ a))) ** 2
    assert report["norm"]["total"] == pytest.approx(math.sqrt(squares))
    assert report["norm"]["min"] <= report["norm"]["max"] <= report["norm"]["total"]


def test_the_base_s_name_only_warns(tmp_path: Path, base: BaseSpec) -> None:
    name = Path(base.model_dir).name
    files = draft_adapter(ARCH, base_model_name_or_path=f"org/{name.upper()}").write(tmp_path)
    assert all(check["ok"] for check in admit(files, base).report["checks"])


def test_tensors_read_in_their_own_dtype(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH, dtype="BF16")
    files = draft.write(tmp_path)
    site = admit(files, base).sites[0]
    native = read_native(files.tensors, site.a)
    assert native.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(native, draft.tensors[f"{Q0}.lora_A.weight"])
    os.truncate(files.tensors, site.a.end - 1)
    with pytest.raises(ArtifactCorrupt):
        read_tensor(files.tensors, site.a)


def test_a_missing_file_is_a_missing_artifact(tmp_path: Path, base: BaseSpec) -> None:
    files = draft_adapter(ARCH).write(tmp_path)
    files.tensors.unlink()
    with pytest.raises(ArtifactMissing):
        admit(files, base)


def test_digest_tells_which_file_a_byte_belongs_to(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    for path, content in ((a, b"xy"), (b, b"z"), (c, b"x"), (d, b"yz")):
        path.write_bytes(content)
    digests = {digest_upload(a, b), digest_upload(c, d), digest_upload(b, a)}
    assert len(digests) == 3
    assert all(len(digest) == 64 for digest in digests)


@pytest.mark.parametrize("suffix", ["", ".weight", ".default", ".default.weight"])
def test_dora_is_admitted_however_its_magnitudes_are_called(
    tmp_path: Path, base: BaseSpec, suffix: str
) -> None:
    draft = draft_adapter(ARCH, targets=ALL_SITES, dora=True, infix="default" if "default" in suffix else "")
    for name in [name for name in draft.tensors if "magnitude" in name]:
        draft.tensors[name.partition("_vector")[0] + "_vector" + suffix] = draft.tensors.pop(name)
    spec = admit(draft.write(tmp_path), base)
    assert [site.magnitude.shape for site in spec.sites if site.magnitude] == [
        (ARCH.out_in(site.site)[0],) for site in spec.sites
    ]
    assert spec.report["parameters"] == sum(t.size for t in draft.tensors.values())
    assert spec.report["checks"][0]["detail"] == "DoRA"


def test_magnitudes_alone_have_an_effect(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH, dora=True)
    draft.tensors |= {name: t * 0 for name, t in draft.tensors.items() if "lora_B" in name}
    assert admit(draft.write(tmp_path), base).report["norm"]["max"] == 0.0


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_admitted_with_the_copy_of_its_weight_that_peft_saves(tmp_path: Path, tied: bool) -> None:
    arch = TinyBase(tied=tied)
    base = load_base_spec(write_base(tmp_path / "base", arch))
    draft = draft_adapter(arch, targets=["lm_head", "v_proj"], ranks={"lm_head": 7})
    draft.tensors["base_model.model.lm_head.base_layer.weight"] = read_base_weight(base, 0, "lm_head")
    spec = admit(draft.write(tmp_path / "adapter"), base)
    assert [(s.layer, s.site) for s in spec.sites] == [(0, "v_proj"), (0, "lm_head"), (1, "v_proj")]
    assert spec.targets == ("v_proj", "lm_head")
    assert spec.report["rank_by_module"]["lm_head"] == 7
    assert spec.report["modules_ignored"] == 1


def test_modules_of_an_expression_are_those_with_tensors(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH, target_modules=r".*\.(q|v)_proj", rank_pattern={".*v_proj": 6}, fan_in_fan_out=True,
                          ranks={site_module(layer, "v_proj"): 6 for layer in range(2)})  # fmt: skip
    draft.config["rank_pattern"] = {".*v_proj": 6}
    spec = admit(draft.write(tmp_path), base)
    assert {(site.site, site.rank, site.scaling) for site in spec.sites} == {
        ("q_proj", 4, 2.0),
        ("v_proj", 6, 8 / 6),
    }
    warnings = [c["detail"] for c in spec.report["checks"] if c["name"] == "config" and not c["ok"]]
    assert len(warnings) == 2
    assert "not evaluated" in warnings[0]
    assert "fan_in_fan_out" in warnings[1]


def test_a_product_that_cancels_out_has_no_effect(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH, rank=4)
    rng = np.random.default_rng(0)
    for name, tensor in draft.tensors.items():
        if "lora_A" in name:  # rows 2, 3 repeat rows 0, 1, and B takes them away again
            draft.tensors[name] = np.concatenate([tensor[:2]] * 2)
        else:
            half = rng.standard_normal((tensor.shape[0], 2)).astype(np.float32)
            draft.tensors[name] = np.concatenate([half, -half], axis=1)
    assert refusal(draft, tmp_path, base).code == "no_effect"


def test_a_small_effect_is_one(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH, rank=4)
    draft.config["lora_alpha"] = 1e-30
    assert 0 < admit(draft.write(tmp_path), base).report["norm"]["max"] < 1e-28


def test_product_of_zero_is_refused_whatever_its_rounded_norm(tmp_path: Path, base: BaseSpec) -> None:
    """All values and sums of two of them are exact in float32, so B.A is zero exactly: B = [P, P, -P] meets
    A = [U, V, U + V]. Its Gram matrices are not exact, so their product comes out as something beside zero."""
    draft = draft_adapter(ARCH, rank=12)
    rng = np.random.default_rng(0)
    for name, tensor in draft.tensors.items():
        if "lora_A" in name:
            u, v = rng.integers(-(1 << 22), 1 << 22, (2, 4, tensor.shape[1])) / (1 << 22)
            draft.tensors[name] = np.concatenate([u, v, u + v]).astype(np.float32)
        else:
            p = rng.integers(-(1 << 22), 1 << 22, (tensor.shape[0], 4)) / (1 << 22)
            draft.tensors[name] = np.concatenate([p, p, -p], axis=1).astype(np.float32)
    assert refusal(draft, tmp_path, base).code == "no_effect"


def test_one_site_with_effect_is_enough(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH)
    for name in draft.tensors:
        if "lora_B" in name and not name.startswith(Q0):
            draft.tensors[name] *= 0
    spec = admit(draft.write(tmp_path), base)
    assert spec.report["norm"]["min"] == 0.0 < spec.report["norm"]["max"]
    assert spec.report["norm"]["max_module"] == site_module(0, "q_proj")


def test_values_at_the_very_end_of_a_large_tensor_are_seen(tmp_path: Path) -> None:
    arch = TinyBase(layers=1, hidden=512, heads=64, kv_heads=8)
    wide = load_base_spec(write_base(tmp_path / "base", arch))
    rank = 600  # 512 rows of B are more than one chunk
    for name, at in (("lora_A", (rank - 1, 511)), ("lora_B", (511, rank - 1))):
        draft = draft_adapter(arch, rank=rank, targets=["q_proj"])
        draft.tensors[f"{Q0}.{name}.weight"][at] = np.inf
        assert refusal(draft, tmp_path / name, wide, max_rank=1024).code == "non_finite"
        admit(draft.write(tmp_path / name), wide, max_rank=1024, deep=False)


class TestBaseWeightsSavedAlong:
    def copy(self, base: BaseSpec, dtype: Any) -> np.ndarray:
        return read_base_weight(base, 0, "q_proj").astype(np.float32).astype(dtype)

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_equal_to_the_base_they_are_dropped(self, tmp_path: Path, base: BaseSpec, dtype: Any) -> None:
        draft = draft_adapter(ARCH)
        draft.tensors[f"{Q0}.base_layer.weight"] = self.copy(base, dtype)
        spec = admit(draft.write(tmp_path), base)
        assert spec.report["modules_ignored"] == 1
        assert len(spec.sites) == 4

    @pytest.mark.parametrize("deep_change", [1e-6, 1.0])
    def test_different_by_anything_they_are_refused(
        self, tmp_path: Path, base: BaseSpec, deep_change: float
    ) -> None:
        draft = draft_adapter(ARCH)
        copy = self.copy(base, np.float32)
        copy[-1, -1] += deep_change
        draft.tensors[f"{Q0}.base_layer.weight"] = copy
        assert refusal(draft, tmp_path, base).code == "base_mismatch"

    @pytest.mark.parametrize("shape", [(32,), (32, 31), ()])
    def test_weights_of_another_shape_are_refused(
        self, tmp_path: Path, base: BaseSpec, shape: tuple[int, ...]
    ) -> None:
        draft = draft_adapter(ARCH)
        draft.tensors[f"{Q0}.base_layer.weight"] = halves(*shape)
        assert refusal(draft, tmp_path, base).code == "base_mismatch"

    def test_weights_of_a_module_that_the_base_lacks(self, tmp_path: Path, base: BaseSpec) -> None:
        draft = draft_adapter(ARCH)
        draft.tensors["base_model.model.other.base_layer.weight"] = halves(4, 4)
        assert refusal(draft, tmp_path, base).code == "unexpected_tensor"

    def test_a_tied_head_is_the_embedding(self, tmp_path: Path) -> None:
        arch = TinyBase(tied=True)
        tied = load_base_spec(write_base(tmp_path / "base", arch))
        draft = draft_adapter(arch)
        draft.tensors["base_model.model.lm_head.weight"] = np.zeros((64, 32), np.float32)
        assert refusal(draft, tmp_path / "other", tied).code == "base_mismatch"


def test_hostile_names_never_reach_messages_raw(tmp_path: Path, base: BaseSpec) -> None:
    draft = draft_adapter(ARCH)
    draft.tensors["base_model.model.\x1b[31m\u202e\ud800.lora_A.weight"] = halves(4, 4)
    draft.tensors["base_model.model.\x1b[31m\u202e\ud800.lora_B.weight"] = halves(4, 4)
    error = refusal(draft, tmp_path, base)
    assert error.code == "base_mismatch"
    assert "\x1b" not in error.message


_MEASURE = """
import json, sys
from pathlib import Path
from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.admission.inspection import inspect_adapter
base = load_base_spec(Path(sys.argv[1]))
def peak_kib():
    return int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])

before = peak_kib()
codes = []
for name in sys.argv[2:]:
    try:
        inspect_adapter(Path(name, "adapter_config.json"), Path(name, "adapter_model.safetensors"), base, max_rank=16)
    except AdapterRefused as refusal:
        codes.append(refusal.code)
print(json.dumps([peak_kib() - before, codes]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hostile_sizes_cost_bounded_memory(tmp_path: Path, base: BaseSpec) -> None:
    """Headers of 2 MiB that want to be many objects, and a sparse file of 4 GiB in one tensor."""
    directories = []
    fill = {"lists": b"[],", "objects": b"{},", "numbers": b"1.5,", "strings": b'"ab",'}
    for name, unit in fill.items():
        files = draft_adapter(ARCH).write(tmp_path / name)
        count = (2_000_000) // len(unit)
        files.tensors.write_bytes(frame_header(b'{"a": [' + unit * count + b"0]}"))
        directories.append(name)
    files = draft_adapter(ARCH).write(tmp_path / "sparse")
    size = 1 << 32
    header = {f"{Q0}.lora_A.weight": {"dtype": "F32", "shape": [4, size // 16], "data_offsets": [0, size]}}
    files.tensors.write_bytes(frame_header(json.dumps(header).encode()))
    os.truncate(files.tensors, files.tensors.stat().st_size + size)
    directories.append("sparse")
    command = [sys.executable, "-c", _MEASURE, base.model_dir, *(str(tmp_path / d) for d in directories)]
    grown_kib, codes = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    assert codes == ["not_safetensors"] * 4 + ["missing_tensor"]
    assert grown_kib < 160 * 1024


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fuzz_any_mixture_of_names_and_shapes_is_admitted_or_refused(
    tmp_path: Path, base: BaseSpec, data: st.DataObject
) -> None:
    draft = draft_adapter(ARCH, rank=2)
    module = ["base_model", "model", "layers", "0", "1", "self_attn", "q_proj", "lm_head", ""]
    leaf = ["lora_A", "lora_B", "weight", "bias", "default", "base_layer", "lora_magnitude_vector"]
    parts = st.sampled_from([*module, *leaf])
    for _ in range(data.draw(st.integers(0, 3))):
        name = data.draw(
            st.sampled_from(sorted(draft.tensors)) | st.lists(parts, min_size=1, max_size=9).map(".".join)
        )
        if data.draw(st.booleans()):
            draft.tensors.pop(name, None)
        else:
            shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 16, 32]), max_size=3)))
            fill = data.draw(st.sampled_from([0.0, 0.1, 1e38, np.nan]))
            draft.tensors[name or "x"] = np.full(shape, fill, np.float32)
    files = draft.write(tmp_path)
    outcome = attempt(admit, files, base)
    if isinstance(outcome, AdapterRefused):
        json.dumps(outcome.report, allow_nan=False)
    else:
        json.dumps(outcome.report, allow_nan=False)
        assert all(site.rank == 2 for site in outcome.sites)
