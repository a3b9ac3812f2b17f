"""GGUF blocks as codes, and the index of a file's tensors: what is broken or foreign is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from loraplex.adapters.admission.base_model import BaseWeights, load_base_spec, locate_tensors
from loraplex.adapters.base_weights.gguf import INDEX, Gguf
from loraplex.adapters.base_weights.gguf_blocks import KINDS
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported, QuantisedTensors
from loraplex.adapters.errors import BaseModelInvalid
from loraplex.app.base_model.gguf_model import make_model
from support.models.gguf import MIXES, blocks, write_gguf

ROWS, INPUTS = 12, 512
PLAIN = Gguf("gguf", query_heads=1, kv_heads=1)


def stored(kind: str) -> np.ndarray:
    """[ROWS, bytes] of a kind."""
    rng = np.random.default_rng(1)
    if kind in ("Q4_K", "Q5_K", "Q6_K"):
        return blocks(rng, ROWS, INPUTS, kind)
    values = rng.standard_normal((ROWS, INPUTS), dtype=np.float32)
    found: np.ndarray = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    return found


def decoded(kind: str, data: np.ndarray) -> np.ndarray:
    """[ROWS, INPUTS]: what a kind's decoder makes of rows of blocks."""
    found = KINDS[kind]
    codes, scales, offsets = found.decode(data.reshape(-1, found.size))
    dense = codes.astype(np.int8).astype(np.float32).reshape(len(codes), -1, found.group) * scales[:, :, None]
    return (dense if offsets is None else dense + offsets[:, :, None]).reshape(ROWS, INPUTS)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_stand_for_what_ggml_computes_to_the_bit(kind: str) -> None:
    data = stored(kind)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert same_bits(decoded(kind, data), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_exchanged_nibbles_and_a_neighbours_scale_are_noticed(kind: str) -> None:
    data = stored(kind)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    found = KINDS[kind]
    each = data.reshape(-1, found.size)
    exchanged, rolled = each.copy(), each.copy()
    exchanged[:, -16:] = each[:, -16:] >> 4 | each[:, -16:] << 4
    rolled[:, :2] = np.roll(each[:, :2], 1, axis=0)
    if kind == "Q6_K":  # its scales stand behind the codes
        exchanged[:, :16], exchanged[:, -16:] = each[:, :16] >> 4 | each[:, :16] << 4, each[:, -16:]
        rolled[:, :2], rolled[:, 192:208] = each[:, :2], np.roll(each[:, 192:208], 1, axis=1)
    for wrong in (exchanged, rolled):
        assert not same_bits(decoded(kind, wrong.reshape(data.shape)), expected)


def made_model(tmp_path: Path) -> Path:
    path = write_gguf(tmp_path / "tiny.gguf", tied=False, kinds=MIXES["Q4_K_M"], hidden=256, inner=512)
    make_model(path, tmp_path / "model")
    return tmp_path / "model"


def test_doras_norms_see_what_the_blocks_stand_for(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    base = load_base_spec(model)
    assert base.stored == "gguf Q4_K Q6_K"
    weights = BaseWeights(base)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(model / "model.gguf").tensors}
    for site, name in (("down_proj", "blk.1.ffn_down.weight"), ("o_proj", "blk.1.attn_output.weight")):
        found = np.concatenate(list(weights.rows(1, site, np.dtype(np.float16))))
        assert same_bits(found, gguf.dequantize(tensors[name].data, tensors[name].tensor_type))
    rows = np.concatenate(list(weights.rows(0, "embed_tokens", np.dtype(np.float16))))
    exact = gguf.dequantize(tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type)
    np.testing.assert_array_equal(rows, exact.astype(np.float16).astype(np.float32))


def change(model: Path, name: str, **fields: Any) -> None:
    index = json.loads((model / INDEX).read_text())
    index[name] |= fields
    (model / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": 1 << 40}, "beyond the end of the file"),
        ({"shape": [1 << 40, 1 << 40]}, "beyond the end of the file"),
        ({"shape": [256]}, "is not served"),
        ({"shape": [256, 100]}, "is not served"),
        ({"shape": [-1, 256]}, "has no shape"),
        ({"shape": 5}, "is broken"),
        ({"kind": "Q2_K"}, "Q2_K"),
        ({"kind": None}, "is broken"),
        ({"start": True}, "has no shape"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    model = made_model(tmp_path)
    change(model, "model.layers.0.mlp.up_proj.weight", **fields)
    with pytest.raises(BaseModelInvalid, match=words):
        load_base_spec(model)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a": 1}', '{"a": {}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    model = made_model(tmp_path)
    (model / INDEX).write_text(text)
    with pytest.raises(BaseModelInvalid, match="is broken"):
        locate_tensors(model)


def test_what_is_wrong_with_a_tensor_is_told(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    tensors = QuantisedTensors(locate_tensors(model))
    module = "model.layers.0.mlp.up_proj"
    entry = locate_tensors(model)[f"{module}.weight"].tensor
    path = (model / "model.gguf").resolve()
    data = bytearray(path.read_bytes())
    data[entry.start : entry.start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(QuantisationUnsupported, match=rf"{module}\.weight has a scale that is infinite"):
        PLAIN.read(module, tensors)
    with pytest.raises(QuantisationUnsupported, match="which are not 7 heads"):
        Gguf("gguf", query_heads=7, kv_heads=7).read("model.layers.0.self_attn.q_proj", tensors)
    path.write_bytes(data[: entry.start + 10])
    with pytest.raises(QuantisationUnsupported, match="ends inside"):
        PLAIN.read(module, tensors)


@pytest.mark.parametrize("kinds", [None, [], ["Q2_K"], "Q4_K", [["Q4_K"]]])
def test_kinds_that_are_not_served_are_refused(tmp_path: Path, kinds: Any) -> None:
    model = made_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["kinds"] = kinds
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelInvalid, match="a GGUF file with weights of"):
        load_base_spec(model)
