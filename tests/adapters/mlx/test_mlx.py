"""Adapters of mlx-lm become PEFT's form of the same adapter, to the bit, or are refused by name."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.mlx import convert
from loraplex.adapters.mlx.convert import convert_mlx
from loraplex.adapters.rewriting import alpha_of
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.adapters.store.artifact_store import ArtifactStore, Staging
from loraplex.adapters.store.tensors import read_native
from support.adapters.drafts import (
    ALL_SITES,
    TinyBase,
    attempt,
    base_tensors,
    draft_adapter,
    encode_safetensors,
    peft_config,
    write_base,
)
from support.adapters.mlx_adapters import mlx_config, mlx_linear, mlx_tensors

ARCH = TinyBase(layers=4)
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), ARCH, dtype="F32")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> BaseSpec:
    return load_base_spec(base_dir)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return ArtifactStore(tmp_path / "store").begin_staging()


def put(staging: Staging, config: dict[str, Any], tensors: Tensors) -> None:
    staging.config_path.write_text(json.dumps(config))
    staging.tensors_path.write_bytes(encode_safetensors(tensors))


def admit(staging: Staging, base: BaseSpec, config: dict[str, Any], tensors: Tensors) -> AdapterSpec:
    put(staging, config, tensors)
    checks = convert_mlx(staging, 64, base.model_type)
    assert {path.name for path in staging.directory.iterdir()} == {
        staging.config_path.name,
        staging.tensors_path.name,
    }
    return inspect_adapter(staging.config_path, staging.tensors_path, base, max_rank=64, earlier=checks)


def refused(staging: Staging, config: dict[str, Any], tensors: Tensors, max_rank: int = 64) -> AdapterRefused:
    put(staging, config, tensors)
    with pytest.raises(AdapterRefused) as caught:
        convert_mlx(staging, max_rank, "llama")
    assert caught.value.message.isascii()
    return caught.value


def lora(**fields: Any) -> dict[str, Any]:
    return mlx_config(lora_parameters={"rank": 4, "dropout": 0.0, "scale": 20.0} | fields)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("dora", [False, True])
def test_every_value_keeps_its_bits_and_the_scale_its_value(
    staging: Staging, base: BaseSpec, monkeypatch: pytest.MonkeyPatch, dtype: str, dora: bool
) -> None:
    monkeypatch.setattr(convert, "_TILE_BYTES", 96)  # many tiles, and smaller ones at the edges
    tensors = mlx_tensors(ARCH, rank=5, targets=ALL_SITES, dtype=dtype, dora=dora)
    config = lora(rank=5, scale=0.7) | {"fine_tune_type": "dora" if dora else "lora"}
    spec = admit(staging, base, config, tensors)
    assert len(spec.sites) == ARCH.layers * len(ALL_SITES)
    for site in spec.sites:
        path = base.sites[site.layer, site.site].module_path
        for part, slice_ in (("lora_a", site.a), ("lora_b", site.b), ("m", site.magnitude)):
            if slice_ is None:
                assert not dora
                continue
            found = read_native(staging.tensors_path, slice_)
            assert found.T.tobytes() == np.ascontiguousarray(tensors[f"{path}.{part}"]).tobytes()
        assert site.scaling == 0.7
    assert spec.report["checks"][0]["name"] == "mlx"
    assert "scale 0.7 is lora_alpha" in spec.report["checks"][0]["detail"]


@pytest.mark.parametrize(
    ("family", "told"),
    [("gemma2", "sliding window"), ("phi3", "sliding window"), ("glm", "whole heads"), ("llama", "")],
)
def test_a_base_that_mlx_computes_otherwise_is_named(
    staging: Staging, base: BaseSpec, family: str, told: str
) -> None:
    spec = admit(staging, replace(base, model_type=family), lora(), mlx_tensors(ARCH, rank=4))
    warnings = [
        check["detail"] for check in spec.report["checks"] if check["name"] == "mlx" and not check["ok"]
    ]
    assert [told in warning for warning in warnings] == [True] * bool(told)


def outputs_of_peft(base_dir: Path, adapter: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    """What PEFT computes of x for each module with LoRA, in float64."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float64)
    peft_model = PeftModel.from_pretrained(model, str(adapter)).double().eval()
    with torch.no_grad():
        return {
            path.removeprefix("base_model.model."): module(
                torch.from_numpy(x[:, : module.in_features]).double()
            ).numpy()
            for path, module in peft_model.named_modules()
            if isinstance(module, LoraLayer)
        }


def outputs_of_mlx(tensors: Tensors, x: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    weights = base_tensors(ARCH, dtype="F32")
    found: dict[str, np.ndarray] = {}
    for name in tensors:
        module = name.removesuffix(".lora_a")
        if module != name:
            a, b, m = tensors[name], tensors[f"{module}.lora_b"], tensors.get(f"{module}.m")
            found[module] = mlx_linear(x[:, : len(a)], weights[f"{module}.weight"], scale, a, b, m)
    return found


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("fault", [None, "A and B exchanged", "scale doubled", "m lost"])
def test_peft_computes_of_the_result_what_mlx_computes_of_the_files(
    staging: Staging, base: BaseSpec, base_dir: Path, dora: bool, fault: str | None
) -> None:
    """And the comparison notices each fault that a conversion could have."""
    if fault == "m lost" and not dora:
        pytest.skip("LoRA has no m")
    targets = ("o_proj", "q_proj")  # both are square: exchanged matrices fit
    tensors = mlx_tensors(ARCH, rank=6, targets=targets, layers=[2, 3], dora=dora)
    keys = ["self_attn.o_proj", "self_attn.q_proj"]
    config = lora(rank=6, scale=2.5, keys=keys) | {
        "num_layers": 2,
        "fine_tune_type": "dora" if dora else "lora",
    }
    admit(staging, base, config, tensors)
    x = np.random.default_rng(3).standard_normal((5, 64))
    wrong, scale = dict(tensors), 2.5
    if fault == "A and B exchanged":
        for name in tensors:
            if name.endswith("lora_a"):
                other = name.replace("lora_a", "lora_b")
                wrong[name], wrong[other] = tensors[other].T.copy(), tensors[name].T.copy()
    elif fault == "scale doubled":
        scale = 5.0
    elif fault == "m lost":
        wrong = {name: array for name, array in tensors.items() if not name.endswith(".m")}
    ours, theirs = outputs_of_peft(base_dir, staging.directory, x), outputs_of_mlx(wrong, x, scale)
    assert ours.keys() == theirs.keys() != set()
    equal = all(np.allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-9) for name in ours)
    assert equal == (fault is None)


def test_equal_files_have_equal_digests_and_nothing_else_of_the_config_counts(
    tmp_path: Path, base: BaseSpec
) -> None:
    store = ArtifactStore(tmp_path / "store")
    tensors = mlx_tensors(ARCH)
    specs = [
        admit(store.begin_staging(), base, config, tensors)
        for config in (
            lora(),
            lora(),
            lora(dropout=0.2) | {"iters": 7, "data": "elsewhere"},
            lora(scale=10.0),
        )
    ]
    assert specs[0].digest == specs[1].digest == specs[2].digest != specs[3].digest


@pytest.mark.parametrize("layers", [[2, 3], [3]])
@pytest.mark.parametrize("num_layers", [-1, 2, 16])
def test_the_last_layers_are_those_that_mlx_trains(
    staging: Staging, base: BaseSpec, layers: list[int], num_layers: int
) -> None:
    """A layer of the trained range without its tensors is a damaged file."""
    config = lora() | {"num_layers": num_layers}
    complete = len(layers) == 2 if num_layers == 2 else num_layers == -1
    put_tensors = mlx_tensors(ARCH, layers=layers)
    if complete:
        spec = admit(staging, base, config, put_tensors)
        assert {site.layer for site in spec.sites} == set(layers)
    else:
        with pytest.raises(AdapterRefused) as caught:
            admit(staging, base, config, put_tensors)
        assert caught.value.code == "missing_tensor"


@pytest.mark.parametrize("site", ["lm_head"])
def test_a_module_outside_of_the_layers(staging: Staging, base: BaseSpec, site: str) -> None:
    tensors = mlx_tensors(ARCH, layers=[3]) | mlx_tensors(ARCH, targets=[site], layers=[0])
    config = lora(keys=["self_attn.q_proj", "self_attn.v_proj", site]) | {"num_layers": 1}
    spec = admit(staging, base, config, tensors)
    assert {(found.layer, found.site) for found in spec.sites} == {(3, "q_proj"), (3, "v_proj"), (0, site)}


def test_keys_without_tensors_are_a_warning(staging: Staging, base: BaseSpec) -> None:
    """mlx-lm passes over keys that the model lacks."""
    keys = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.qkv_proj"]
    spec = admit(staging, base, lora(keys=keys), mlx_tensors(ARCH))
    assert any(
        not check["ok"] and "self_attn.qkv_proj" in check["detail"]
        for check in spec.report["checks"]
        if check["name"] == "mlx"
    )


def renamed(**names: str) -> Tensors:
    tensors = mlx_tensors(ARCH)
    for old, new in names.items():
        tensors = {name.replace(old, new): array for name, array in tensors.items()}
    return tensors


def with_one(name: str, array: np.ndarray) -> Tensors:
    return mlx_tensors(ARCH) | {name: array}


Q0 = "model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[dict[str, Any], Tensors, str, str]] = {
    "whole weights": (
        lora() | {"fine_tune_type": "full"}, with_one("x.weight", np.ones(3, np.float32)),
        "unsupported_feature", "full",
    ),
    "another type": (lora() | {"fine_tune_type": "ia3"}, mlx_tensors(ARCH), "unsupported_feature", "ia3"),
    "quantised": (
        lora(), with_one(f"{Q0}.linear.scales", np.ones((2, 2), np.float32)), "unsupported_feature", "quantised",
    ),
    "experts": (
        lora(),
        with_one("model.layers.0.mlp.switch_mlp.up_proj.lora_a", np.ones((4, 4, 8), np.float32)),
        "unsupported_feature",
        "experts",
    ),
    "experts of an older mlx-lm": (
        lora(),
        with_one("model.layers.0.mlp.switch_mlp.up_proj.lora_a", np.ones((16, 8), np.float32)),
        "unsupported_feature",
        "experts",
    ),
    "an embedding": (
        lora(),
        with_one("model.embed_tokens.lora_a", np.ones((64, 4), np.float32)),
        "unsupported_feature",
        "embedding",
    ),
    "integers": (lora(), with_one(f"{Q0}.lora_a", np.ones((32, 4), np.int64)), "unsupported_feature", "I64"),
    "a weight": (lora(), with_one("model.norm.weight", np.ones(32, np.float32)), "unexpected_tensor", "norm.weight"),
    "PEFT's tensors": (lora(), draft_adapter(ARCH).tensors, "unexpected_tensor", "PEFT's adapter_config.json"),
    "PEFT's config": (peft_config(), mlx_tensors(ARCH), "config_invalid", "mlx_lm.lora"),
    "no parameters": (mlx_config(lora_parameters=None), mlx_tensors(ARCH), "config_invalid", "lora_parameters"),
    "no scale": (mlx_config(lora_parameters={"rank": 4}), mlx_tensors(ARCH), "config_invalid", "scale"),
    "a scale that is no number": (lora(scale="2"), mlx_tensors(ARCH), "config_invalid", "scale"),
    "a scale that is too large": (lora(scale=1e300), mlx_tensors(ARCH), "config_invalid", "scale"),
    "no rank": (mlx_config(lora_parameters={"scale": 1.0}), mlx_tensors(ARCH), "config_invalid", "rank"),
    "rank 0": (lora(rank=0), mlx_tensors(ARCH), "config_invalid", "rank"),
    "another rank": (lora(rank=8), mlx_tensors(ARCH), "shape_mismatch", "rank 8"),
    "a rank that is too large": (lora(rank=80), mlx_tensors(ARCH, rank=80), "rank_exceeds_max", "80"),
    "PEFT's way round": (
        lora(), {name: array.T.copy() for name, array in mlx_tensors(ARCH).items()}, "shape_mismatch", "[in, rank]",
    ),
    "no lora_b": (
        lora(), with_one("model.layers.1.mlp.up_proj.lora_a", np.ones((32, 4), np.float32)), "missing_tensor", "lora_b",
    ),
    "m without DoRA": (lora(), mlx_tensors(ARCH, dora=True), "unexpected_tensor", "dora"),
    "DoRA without m": (lora() | {"fine_tune_type": "dora"}, mlx_tensors(ARCH), "missing_tensor", "no m"),
    "m of another length": (
        lora() | {"fine_tune_type": "dora"},
        mlx_tensors(ARCH, dora=True) | {f"{Q0}.m": np.ones(31, np.float32)},
        "shape_mismatch",
        "31",
    ),
    "a module beside the keys": (lora(keys=["self_attn.q_proj"]), mlx_tensors(ARCH), "unexpected_tensor", "keys"),
    "keys that are no list": (lora(keys="q_proj"), mlx_tensors(ARCH), "config_invalid", "keys"),
    "more layers than it says": (lora() | {"num_layers": 2}, mlx_tensors(ARCH), "unexpected_tensor", "num_layers"),
    "layers that are no number": (lora() | {"num_layers": "all"}, mlx_tensors(ARCH), "config_invalid", "num_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(staging: Staging, case: str) -> None:
    config, tensors, code, words = REFUSED[case]
    refusal = refused(staging, config, tensors)
    assert refusal.code == code
    assert words in refusal.message
    assert (refusal.feature is not None) == (code == "unsupported_feature")


def old_config(**parameters: Any) -> dict[str, Any]:
    config = mlx_config(
        lora_parameters={"rank": 4, "dropout": 0.0, "scale": 10.0} | parameters, lora_layers=16
    )
    del config["num_layers"], config["fine_tune_type"]
    return config


def test_configs_of_older_versions(staging: Staging, base: BaseSpec) -> None:
    """Until June 2024 alpha counted, until October 2024 nothing in a config tells whether it did."""
    assert admit(staging, base, old_config(), mlx_tensors(ARCH)).sites[0].scaling == 10.0
    assert admit(staging, base, old_config(alpha=4), mlx_tensors(ARCH)).sites[0].scaling == 10.0
    dora = old_config() | {"use_dora": True}
    assert admit(staging, base, dora, mlx_tensors(ARCH, dora=True)).sites[0].magnitude is not None
    assert "alpha" in refused(staging, old_config(alpha=16), mlx_tensors(ARCH)).message
    newer = lora(alpha=16, scale=10.0)
    assert admit(staging, base, newer, mlx_tensors(ARCH)).sites[0].scaling == 10.0


@given(st.floats(1e-30, 1e4), st.integers(1, 512))
def test_alpha_gives_the_scale_back(scale: float, rank: int) -> None:
    found = alpha_of(scale, rank) / rank
    assert np.float32(found) == np.float32(scale)
    assert abs(found - scale) <= math.ulp(scale)
    if rank & (rank - 1) == 0:
        assert found == scale


def test_whatever_the_files_are_nothing_else_is_raised(staging: Staging) -> None:
    good = lora()
    for field, value in [(None, None), *((name, None) for name in good), ("lora_parameters", [1])]:
        for tensors in (
            {},
            mlx_tensors(ARCH),
            {"": np.ones(1, np.float32)},
            {"lora_a": np.ones((4, 4), np.float32)},
        ):
            config = copy.deepcopy(good)
            if field is not None:
                config[field] = value
            put(staging, config, tensors)
            found = attempt(convert_mlx, staging, 64, "llama")
            assert isinstance(found, list) or found.message.isascii()
