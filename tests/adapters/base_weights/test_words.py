"""Checkpoints of GPTQ and AWQ as their makers write quantization_config: the tensors decide what the codes stand for,
and settings that change that are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec
from loraplex.adapters.base_weights.schemes import read_scheme, stores_head
from loraplex.adapters.errors import BaseModelInvalid
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.quantised_formats import FORMATS, write_quantised

MODULE = "model.layers.1.mlp.down_proj"
ROUND = {"data_type": "int", "iters": 200, "autoround_version": "0.16.1", "provider": "auto-round"}
OF_GPTQMODEL: dict[str, Any] = {
    "quant_method": "gptq", "method": "gptq", "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32",
    "sym": True, "desc_act": False, "lm_head": False, "bits": 4, "group_size": 32,
    "meta": {"quantizer": ["gptqmodel:7.7.0"], "act_group_aware": True, "fallback": {"smooth": None}},
}  # fmt: skip
OF_TRANSFORMERS: dict[str, Any] = {
    "damp_percent": 0.1, "desc_act": False, "act_group_aware": True, "sym": True, "true_sequential": True, "meta": None,
    "backend": "auto", "batch_size": 1, "cache_block_outputs": True, "modules_in_block_to_quantize": None,
    "bits": 4, "group_size": 32, "tokenizer": None, "dataset": None, "modules_to_not_convert": None,
}  # fmt: skip
OF_AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
} | ROUND
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTQModel 7": ("gptq int4", OF_GPTQMODEL),
    "GPTQModel, modules left out": ("gptq int4", OF_GPTQMODEL | {"dynamic": {"-:.*lm_head": {}}}),
    "GPTQModel, a rule that says the same": (
        "gptq int4",
        OF_GPTQMODEL | {"dynamic": {"lm_head": {"bits": 4, "group_size": 32, "sym": True, "mse": 2.4}}},
    ),
    "transformers 5": (
        "gptq int4",
        OF_TRANSFORMERS | {"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq"},
    ),
    "transformers 5, act order in config alone": (
        "gptq int4",
        OF_TRANSFORMERS | {"quant_method": "gptq", "desc_act": True, "checkpoint_format": "gptq"},
    ),
    "AutoRound as GPTQ": (
        "gptq int4",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "desc_act": False,
            "damp_percent": 0.01,
        }
        | ROUND,
    ),
    "AutoRound": ("gptq int4", OF_AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}),
    "AutoRound, words of an old release": (
        "gptq int4",
        OF_AUTO_ROUND | {"backend": "auto_round:gptq:exllamav2"},
    ),
    "AutoRound, modules in 16 bits": (
        "gptq int4",
        OF_AUTO_ROUND
        | {
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {
                "lm_head": {"bits": 16, "data_type": "fp"},
                "a": {"bits": 4, "act_bits": 16, "data_type": "int"},
            },
        },
    ),
    "AutoRound, zeros": (
        "gptq int4, zeros",
        OF_AUTO_ROUND | {"packing_format": "auto_round:exllamav2", "sym": False},
    ),
    "AutoRound, as GPTQModel packs": (
        "gptq int4, zeros",
        OF_AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
    ),
    "AutoRound as AWQ, zeros": (
        "awq",
        OF_AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
    ),
    "GPTQModel's gptq_v2": (
        "gptq int4, zeros",
        OF_GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": "gptq_v2", "sym": False},
    ),
    "a text for false": (
        "gptq int4, zeros",
        OF_GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": "gptq_v2", "sym": "False"},
    ),
    "GPTQModel's AWQ": (
        "awq",
        {
            "quant_method": "awq",
            "method": "awq",
            "format": "gemm",
            "checkpoint_format": "gemm",
            "version": "gemm",
            "pack_dtype": "int32",
            "zero_point": True,
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "lm_head": False,
        },
    ),
    "transformers 5's AWQ": (
        "awq",
        OF_TRANSFORMERS | {"quant_method": "awq", "zero_point": True, "version": "gemm", "format": "gemm"},
    ),
    "AutoAWQ": (
        "awq",
        {
            "quant_method": "awq",
            "w_bit": 4,
            "q_group_size": 32,
            "zero_point": True,
            "version": "GEMM",
            "modules_to_not_convert": None,
        },
    ),
    "settings that are off": (
        "gptq int4",
        OF_GPTQMODEL
        | {
            "useHadamard": False,
            "smoothquant": None,
            "quarot": {},
            "spinquant": [],
            "rotation": {"R1": False},
            "transform": {"enabled": False, "seed": 7},
            "static_kv_dtype": "none",
            "sparsity": 0,
        },
    ),
    "names of who wrote it, and how": (
        "gptq int4",
        OF_GPTQMODEL
        | {
            "transformers_version": "5.23.0",
            "packages": {"transformers": "5.23.0"},
            "exploration": "wide",
            "absolute_error": 0.1,
            "dataset": "rotation/hadamard",
            "smooth": 1.2,
            "supervised": True,
        },
    ),
    "a setting of tomorrow": ("gptq int4", OF_GPTQMODEL | {"search_strategy": {"name": "beam", "width": 4}}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    return save_tiny(tmp_path_factory.mktemp("base") / "base", FAMILIES["llama"] | sizes)


def with_config(folder: Path, given: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))
    return folder


def dense(folder: Path) -> np.ndarray:
    spec = load_base_spec(folder)
    return np.concatenate(list(BaseWeights(spec).rows(1, "down_proj", np.dtype(np.float32))))


@pytest.mark.parametrize("name", SERVED)
def test_settings_of_todays_makers_stand_for_the_same_weights(name: str, base: Path, tmp_path: Path) -> None:
    stored, given = SERVED[name]
    made, exact = write_quantised(base, tmp_path, stored)
    expected = load_file(exact / "model.safetensors")[f"{MODULE}.weight"].numpy()
    np.testing.assert_allclose(dense(with_config(made, given)), expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    ("stored", "change", "words"),
    [
        ("gptq int4", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gives '+:.*down.*' 'bits' 8, another"),
        ("gptq int4", {"dynamic": {".*down.*": {"group_size": 16}}}, "'.*down.*' 'group_size' 16, another"),
        ("gptq int4", {"dynamic": {"+:a": {"adapter": {"rank": 8}}}}, "'+:a' 'adapter'"),
        ("gptq int4", {"dynamic": ["a"]}, 'dynamic is ["a"], not an object'),
        ("gptq int4", {"dynamic": {"+:a": 8}}, "dynamic '+:a' is not an object"),
        ("gptq int4", {"extra_config": {"a": {"bits": 8}}}, "extra_config gives 'a' 'bits' 8, another"),
        ("gptq int4", {"rotation": "hadamard"}, "'rotation', which changes the weights"),
        ("gptq int4", {"rotation_config": {"R1": 1}}, "'rotation_config', which changes the weights"),
        ("gptq int4", {"hadamard_size": 32}, "'hadamard_size', which changes the weights"),
        ("gptq int4", {"smoothquant": True}, "'smoothquant', which changes the weights"),
        ("gptq int4", {"smooth_quant_args": {"alpha": 0.5}}, "'smooth_quant_args', which changes"),
        ("gptq int4", {"useHadamard": True}, "'useHadamard', which changes"),
        ("gptq int4", {"USE-HADAMARD": "yes"}, "'USE-HADAMARD', which changes"),
        ("gptq int4", {"QuaRot": 1}, "'QuaRot', which changes"),
        ("gptq int4", {"meta": {"SpinQuant": {"R1": "r1.pt"}}}, "'SpinQuant' in 'meta', which changes"),
        ("gptq int4", {"meta": {"steps": [{"online_had": True}]}}, "'online_had' in 'meta', which changes"),
        ("gptq int4", {"preprocessing": ["calibrate", "Random-Hadamard"]}, "'preprocessing', which changes"),
        ("gptq int4", {"algorithm": "SmoothQuant"}, "'algorithm', which changes"),
        ("gptq int4", {"rotations": ["R1"]}, "'rotations', which changes"),
        ("gptq int4", {"static_kv_dtype": "fp8"}, "'static_kv_dtype', which changes"),
        ("gptq int4", {"pre_quant_scale": True}, "'pre_quant_scale', which changes"),
        ("gptq int4", {"kvCacheScheme": {"bits": 8}}, "'kvCacheScheme', which changes"),
        ("gptq int4", {"superBits": 6}, "'superBits', which changes"),
        ("gptq int4", {"regex_config": {".*down.*": {"bits": 8}}}, "regex_config gives '.*down.*' 'bits' 8"),
        ("gptq int4", {"layer_config": {"a": {"useRotation": 1}}}, "layer_config gives 'a' 'useRotation' 1"),
        ("awq", {"duo": {"scaling": "smoothquant"}}, "'scaling' in 'duo', which changes"),
        (
            "gptq int4",
            {"quant_method": "auto-round", "hadamard_config": {"kind": "dct"}},
            "'hadamard_config', which changes",
        ),
        ("gptq int4", {"act_bits": 8}, "act_bits 8 is not served; served: 16, 32"),
        ("gptq int4", {"data_type": "mx_fp"}, "data_type 'mx_fp' is not served"),
        ("gptq int4", {"checkpoint_format": "gptq_p"}, "checkpoint_format 'gptq_p' is not served"),
        ("gptq int4", {"format": "gptq_v2"}, "checkpoint_format is 'gptq', and its format 'gptq_v2'"),
        ("gptq int4", {"format": ["gptq"]}, 'format ["gptq"] is not served'),
        ("gptq int4", {"method": "qqq"}, "method 'qqq' is not served"),
        ("gptq int4", {"is_marlin_format": True}, "is_marlin_format true is not served"),
        (
            "gptq int4",
            {"checkpoint_format": "gptq_v2"},
            "zeros that are not 8, and quantization_config says sym: true",
        ),
        ("gptq int4", {"bits": 8}, "64 zeros of 4 bits, and quantization_config says bits 8"),
        ("gptq int4", {"bits": "4"}, "codes of '4' bits"),
        ("gptq int4", {"bits": True}, "codes of true bits"),
        ("gptq int4", {"sym": "maybe"}, "sym is 'maybe', not true or false"),
        (
            "gptq int4",
            {"group_size": 48},
            "has 3 groups of 96 inputs, and quantization_config says group_size 48",
        ),
        ("gptq int4, zeros", {"sym": "True"}, "quantization_config says sym: true"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not served"),
        ("awq", {"format": "gemv_fast"}, "format 'gemv_fast' is not served"),
        ("awq", {"backend": "llm-awq"}, "backend 'llm-awq' is not served"),
        (
            "awq",
            {"zero_point": False},
            "zeros that are not 8, and quantization_config says zero_point: false",
        ),
        ("awq", {"dynamic": {"+:a": {"bits": 8}}}, "gives '+:a' 'bits' 8"),
        (
            "gptq int4",
            {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"},
            "'auto_round:fp8_static'",
        ),
        ("gptq int4", {"quant_method": "auto-round", "packing_format": 7}, "packing_format 7 is not served"),
    ],
)
def test_settings_that_change_what_codes_stand_for_are_refused_by_name(
    stored: str, change: dict[str, Any], words: str, base: Path, tmp_path: Path
) -> None:
    made, _ = write_quantised(base, tmp_path, stored)
    with_config(made, FORMATS[stored].config | change)
    with pytest.raises(BaseModelInvalid, match=re.escape(words)) as caught:
        dense(made)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("given", [None, "absent"])
def test_codes_without_their_settings_are_refused(given: object, base: Path, tmp_path: Path) -> None:
    made, _ = write_quantised(base, tmp_path, "gptq int4")
    if given is None:
        with_config(made, None)
    else:
        config = json.loads((made / "config.json").read_text())
        (made / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelInvalid, match=r"qweight'.* no quantization_config .*quantize_config\.json"):
        load_base_spec(made)


def test_who_wrote_compressed_tensors_is_neutral() -> None:
    config = FORMATS["compressed int4"].config
    by_auto_round = read_scheme({"quantization_config": config | {"provider": "auto-round"}})
    assert by_auto_round == read_scheme({"quantization_config": config})


@pytest.mark.parametrize(("bits", "stored"), [(4, True), (16, False)])
def test_a_head_that_a_rule_leaves_as_floats_is_not_planned_as_codes(bits: int, stored: bool) -> None:
    rules = {"extra_config": {"lm_head": {"bits": bits}}}
    assert stores_head({"quantization_config": OF_AUTO_ROUND | rules}) is stored
