"""Checkpoints that other tools have quantised: what is read equals what was written, and what is broken is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.base_model import (
    BaseWeights,
    load_base_spec,
    locate_tensors,
    read_text_config,
    stored_scheme,
)
from loraplex.adapters.base_weights import bitsandbytes, compressed_tensors, gptq, schemes
from loraplex.adapters.base_weights.grouped import stack
from loraplex.adapters.base_weights.nf4 import NF4
from loraplex.adapters.base_weights.schemes import read_scheme
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, nibbles
from loraplex.adapters.errors import BaseModelInvalid
from loraplex.kernels.linear.stored import GroupedWeight
from support.models.checkpoints import FAMILIES, save_tiny
from support.models.quantised_formats import FORMATS, write_quantised

MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    return save_tiny(tmp_path_factory.mktemp("base") / "base", FAMILIES["llama"] | sizes)


def read(folder: Path, module: str = MODULE) -> GroupedWeight:
    stored = stored_scheme(read_text_config(folder), locate_tensors(folder))
    assert stored is not None
    return stored.read(module)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_was_written(name: str, base: Path, tmp_path: Path) -> None:
    made, dense = write_quantised(base, tmp_path, name)
    exact = load_file(dense / "model.safetensors")
    spec, plain = load_base_spec(made), load_base_spec(base)
    assert spec.sites == plain.sites
    assert spec.stored
    assert spec.fingerprint != plain.fingerprint
    weights = BaseWeights(spec)
    for (layer, site), shape in spec.sites.items():
        if site in ("lm_head", "embed_tokens"):
            continue
        rows = np.concatenate(list(weights.rows(layer, site, np.dtype(np.float32))))
        expected = exact[f"{shape.module_path}.weight"].numpy()
        if FORMATS[name].exact:
            np.testing.assert_allclose(rows, expected, rtol=2e-6, atol=2e-7)
        else:
            # Codes of 8 bits in groups of the block: half a step of the largest.
            assert np.abs(rows - expected).max() <= 0.51 * np.abs(expected).max() / 127


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("fp8")])
def test_8_bit_floats_are_read_as_they_are_stored(name: str, base: Path, tmp_path: Path) -> None:
    made, dense = write_quantised(base, tmp_path, name)
    expected = load_file(dense / "model.safetensors")[f"{MODULE}.weight"].numpy()
    stored = stored_scheme(read_text_config(made), locate_tensors(made))
    assert stored is not None
    found = stored.read(MODULE)
    assert found is not None
    assert found.values.dtype.itemsize == 1
    each = expected.shape[1] // found.scales.shape[1]
    assert each == (32 if name == "fp8, blocks" else expected.shape[1])
    np.testing.assert_array_equal(
        found.values.astype(np.float32) * np.repeat(found.scales, each, 1), expected
    )
    path = made / "model.safetensors"
    right = load_file(path)
    values = right[f"{MODULE}.weight"].view(torch.uint8).clone()
    values[3, 5] = 0xFF
    save_file(right | {f"{MODULE}.weight": values.view(torch.float8_e4m3fn)}, path, {"format": "pt"})
    with pytest.raises(QuantisationUnsupported, match=r"down_proj\.weight has a value that is no number"):
        stored_scheme(read_text_config(made), locate_tensors(made)).read(MODULE)


def test_blocks_that_do_not_divide_the_inputs_are_read_as_what_they_stand_for(
    base: Path, tmp_path: Path
) -> None:
    made, _ = write_quantised(base, tmp_path, "fp8, blocks")
    stored = stored_scheme(read_text_config(made), locate_tensors(made))
    assert stored is not None
    stored.scheme = replace(stored.scheme, block=(16, 36))
    assert stored.read(MODULE) is None
    assert sum(map(len, stored.dense_rows(MODULE))) == 64


def test_activations_in_8_bits_are_those_of_the_config() -> None:
    rows = FORMATS["fp8, a scale a row"].config
    token = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}

    def of_groups(*activations: Any) -> bool:
        group = rows["config_groups"]["group_0"]
        groups = {f"group_{at}": group | {"input_activations": found} for at, found in enumerate(activations)}
        return read_scheme({"quantization_config": rows | {"config_groups": groups}}).activations

    assert of_groups(token)
    assert not of_groups(None)
    assert not of_groups(token, None)
    for scheme, expected in (("dynamic", True), ("static", False), (None, False)):
        config = _changed("fp8, blocks", activation_scheme=scheme)
        assert read_scheme({"quantization_config": config}).activations is expected


def test_nf4s_table_is_the_published_one() -> None:
    values = np.array(NF4)
    assert (len(values), values[0], values[7], values[15]) == (16, -1, 0, 1)
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gptq int4", "zero off by one"),
        ("gptq int4, zeros", "nibbles exchanged"),
        ("compressed int4", "nibbles exchanged"),
        ("awq", "order of GPTQ"),
        ("nf4", "nibbles exchanged"),
        *((name, "scale of the neighbouring group") for name in ("compressed int4", "gptq int4", "awq")),
    ],
)
def test_planted_faults_are_noticed(
    name: str, fault: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, dense = write_quantised(base, tmp_path, name)
    exact = load_file(dense / "model.safetensors")[f"{MODULE}.weight"].numpy()
    assert np.abs(read(made).dense() - exact).max() < 0.01

    def exchanged(packed: np.ndarray, bits: int) -> np.ndarray:
        found = nibbles(packed, bits)
        return found.reshape(-1, 2)[:, ::-1].reshape(found.shape)

    match fault:
        case "zero off by one":
            right_reader = gptq.read_gptq
            monkeypatch.setitem(
                schemes._READERS,
                "gptq",
                lambda config: replace(right_reader(config), zero_shift=0, is_symmetric=False),
            )
        case "nibbles exchanged" if name == "nf4":
            right = np.stack
            monkeypatch.setattr(bitsandbytes.np, "stack", lambda parts, axis: right(parts[::-1], axis))
        case "nibbles exchanged":
            for module in (gptq, compressed_tensors):
                monkeypatch.setattr(module, "nibbles", exchanged)
        case "order of GPTQ":
            monkeypatch.setattr(gptq, "_AWQ_PLACES", tuple(range(8)))
    found = read(made)
    if fault.startswith("scale"):
        found = GroupedWeight(found.codes, np.roll(found.scales, 1, axis=1), found.offsets, found.group)
    assert np.abs(found.dense() - exact).max() > 0.01


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fault", ["missing", "dtype", "rows", "empty", "columns"])
def test_broken_tensors_are_named(name: str, fault: str, base: Path, tmp_path: Path) -> None:
    made, _ = write_quantised(base, tmp_path, name)
    path = made / "model.safetensors"
    right = load_file(path)
    for key in [key for key in right if key.startswith(f"{MODULE}.")]:
        tensor = right[key]
        changed: dict[str, Any] = {
            "missing": None,
            "dtype": tensor.to(torch.float64),
            "rows": torch.cat((tensor, tensor)),
            "empty": tensor[:0],
            "columns": tensor[..., :-1].contiguous(),
        }
        tensors = dict(right)
        del tensors[key]
        if changed[fault] is not None:
            tensors[key] = changed[fault]
        save_file(tensors, path, {"format": "pt"})
        if fault == "missing" and key.endswith(("g_idx", "zero_point")):
            read(made)  # the order of the groups may be left out, and so may zeros in the middle
            continue
        if name.startswith("fp8") and key == f"{MODULE}.weight" and fault == "columns":
            continue  # another model: an input less
        if name == "awq" and key.endswith("qweight") and fault == "rows":
            continue  # another model: twice the inputs, in groups of twice the size
        with pytest.raises(BaseModelInvalid, match="down_proj"):
            list(BaseWeights(load_base_spec(made)).rows(1, "down_proj", np.dtype(np.float32)))


def test_scales_that_are_not_finite_and_orders_by_activation_are_refused(base: Path, tmp_path: Path) -> None:
    made, _ = write_quantised(base, tmp_path, "gptq int4")
    path = made / "model.safetensors"
    right = load_file(path)
    scales = right[f"{MODULE}.scales"].clone()
    scales[0, 3] = float("inf")
    save_file(right | {f"{MODULE}.scales": scales}, path, {"format": "pt"})
    with pytest.raises(QuantisationUnsupported, match=r"down_proj\.scales has a scale that is infinite"):
        read(made)
    order = right[f"{MODULE}.g_idx"].flip(0).contiguous()
    save_file(right | {f"{MODULE}.g_idx": order}, path, {"format": "pt"})
    with pytest.raises(QuantisationUnsupported, match="ordered by activation"):
        read(made)


def test_a_config_without_such_tensors_is_refused(base: Path, tmp_path: Path) -> None:
    made, dense = write_quantised(base, tmp_path, "awq")
    shutil.copy(made / "config.json", dense)
    with pytest.raises(
        QuantisationUnsupported, match=r"says awq int4, and no linear .* has a tensor qweight"
    ):
        load_base_spec(dense)


def _changed(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(FORMATS[name].config)) | changes


def _group(**changes: Any) -> dict[str, Any]:
    config = _changed("compressed int4")
    config["config_groups"]["group_0"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("nf4", "is not an object"),
        (
            {"quant_method": "hqq"},
            "quantised by 'hqq' is not served: auto-round, awq, bitsandbytes, compressed-tensors, fp8, gptq",
        ),
        ({"quant_method": ["gptq"]}, "is not served"),
        ({}, "quantised by null is not served"),
        (_changed("compressed int4", format="marlin-24"), "format 'marlin-24' is not served"),
        (_changed("compressed int4", format="float-quantized"), "are not floats of 8 bits"),
        (_changed("compressed int4", rotations=["R1"]), "settings that are not known here.*: rotations"),
        (
            _group(weights=_changed("compressed int4")["config_groups"]["group_0"]["weights"] | {"lut": 1}),
            ": lut",
        ),
        (
            _changed("gptq int4", adapter={"rank": 8}),
            "GPTQ's quantization_config has 'adapter', which changes the weights",
        ),
        (_changed("awq", rotate=True), "AWQ's quantization_config has 'rotate', which changes the weights"),
        (_changed("nf4", rotate=1), "bitsandbytes' quantization_config has .*: rotate"),
        (_changed("fp8, blocks", fmt="e5m2"), "fp8 values 'e5m2' are not served"),
        (_changed("fp8, blocks", activation_scheme="odd"), "activation_scheme 'odd'"),
        (_changed("fp8, blocks", weight_block_size=[0, 128]), r"block size \[0, 128\]"),
        (_changed("fp8, blocks", weight_block_size="128"), "block size '128'"),
        (_changed("compressed int4", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not served"),
        (_changed("compressed int4", transform_config={"R1": 1}), "transform_config is not served"),
        (_changed("compressed int4", config_groups={}), "several kinds, or none"),
        (_changed("compressed int4", config_groups=[]), "are not an object"),
        (_changed("compressed int4", config_groups={"a": {}}), "has no weights"),
        (_group(input_activations={"dynamic": True, "strategy": "tensor"}), "one scale for several rows"),
        (_group(input_activations={"dynamic": False, "strategy": "token"}), "one scale for several rows"),
        (_group(output_activations={"num_bits": 8}), "output_activations are not served"),
        (_group(weights={"num_bits": 4, "type": "float", "strategy": "group"}), "type 'float'"),
        (_group(weights={"num_bits": 3, "type": "int", "strategy": "group"}), "weights of 3 bits"),
        (_group(weights={"num_bits": 4, "type": "int", "strategy": "tensor_group"}), "'tensor_group'"),
        (
            _group(weights={"num_bits": 4, "type": "int", "strategy": "group", "group_size": 1}),
            "group size 1",
        ),
        (_changed("gptq int4", group_size="128"), "group size '128'"),
        (_changed("awq", group_size=True), "group size true"),
        (_changed("gptq int4", bits=3), "codes of 3 bits"),
        (_changed("gptq int4", checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (_changed("gptq int4", pack_dtype="int16"), "pack_dtype"),
        (_changed("gptq int4", dynamic={"+:a": {"bits": 8}}), "'\\+:a' 'bits' 8.*settings by module"),
        (_changed("awq", version="gemv"), "version 'gemv' is not served; served: gemm"),
        (_changed("awq", bits=8), "codes of 8 bits"),
        (_changed("nf4", bnb_4bit_quant_type="fp4"), "type 'fp4'"),
        (_changed("nf4", bnb_4bit_quant_storage="bfloat16"), "not stored as uint8"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(QuantisationUnsupported, match=message):
        read_scheme({"quantization_config": config})
    assert read_scheme({}) is None


@pytest.mark.parametrize(
    "state",
    [
        b"{", b"[]", b"\xff", b"{}", b'{"quant_type": "fp4"}', b'{"quant_type": "nf4"}',
        b'{"quant_type": "nf4", "shape": [64, 96]}', b'{"quant_type": "nf4", "shape": [64, 96], "blocksize": 0}',
        b'{"quant_type": "nf4", "shape": [64, 96], "blocksize": 100}',
        b'{"quant_type": "nf4", "shape": [64, true], "blocksize": 64}',
        b'{"quant_type": "nf4", "shape": [99999999999, 99999999999], "blocksize": 64}',
    ],
)  # fmt: skip
def test_a_state_of_nf4_that_is_broken_is_named(state: bytes, base: Path, tmp_path: Path) -> None:
    made, _ = write_quantised(base, tmp_path, "nf4")
    path = made / "model.safetensors"
    key = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    save_file(
        load_file(path) | {key: torch.frombuffer(bytearray(state), dtype=torch.uint8)}, path, {"format": "pt"}
    )
    with pytest.raises(QuantisationUnsupported, match="down_proj"):
        read(made)


@pytest.mark.parametrize("offset", [None, "x", 10**400, [1], float("inf")])
def test_an_offset_of_nested_scales_that_is_no_number_is_named(
    offset: Any, base: Path, tmp_path: Path
) -> None:
    made, _ = write_quantised(base, tmp_path, "nf4, nested")
    path = made / "model.safetensors"
    tensors = load_file(path)
    key = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[key].tolist())) | {"nested_offset": offset}
    tensors[key] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(QuantisationUnsupported, match=r"no usable nested_offset|is no JSON"):
        read(made)


def test_weights_are_stacked_whatever_their_groups() -> None:
    rng = np.random.default_rng(0)

    def part(rows: int, group: int, *, offsets: bool) -> GroupedWeight:
        shape = (rows, 96 // group)
        codes = rng.integers(-128, 128, (rows, 96)).astype(np.int8)
        scales, moved = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        return GroupedWeight(codes, scales, moved if offsets else None, group)

    parts = [part(3, 32, offsets=False), part(2, 96, offsets=True), part(4, 48, offsets=False)]
    whole = stack(parts)
    assert whole.group == 16
    np.testing.assert_array_equal(whole.dense(), np.concatenate([each.dense() for each in parts]))
    np.testing.assert_array_equal(np.concatenate(list(whole.dense_rows())), whole.dense())
