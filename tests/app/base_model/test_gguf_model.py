"""A GGUF file, or a folder with one, as the base model: a directory over the file, which stays where it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from loraplex.app.base_model.source import ModelUnavailable, default_served_name, ensure_model
from support.models.gguf import MIXES, write_gguf
from support.servers.run_here import run_here

Q8 = MIXES["Q8_0"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAPLEX_MODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-GGUF"
    folder.mkdir()
    return write_gguf(folder / "Tiny.Q8_0.gguf", kinds=Q8)


def refusal(spec: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        ensure_model(str(spec))
    return caught.value.message


def test_a_file_is_read_once_and_again_where_it_has_changed(path: Path) -> None:
    said: list[str] = []
    found = ensure_model(str(path), said.append)
    assert found.name == default_served_name(str(path)) == "Tiny.Q8_0"
    assert (found / "model.gguf").resolve() == path.resolve()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {each.name for each in found.iterdir()}
    assert not list(found.glob("*.safetensors"))
    assert ensure_model(str(path), said.append) == found
    assert said == ["reading Tiny.Q8_0.gguf (once)"]
    assert ensure_model(str(found)) == found  # a directory like any other
    os.utime(path, (1, 1))
    assert ensure_model(str(path)) != found


def test_files_beside_it_go_before_what_the_file_says(path: Path) -> None:
    made = ensure_model(str(path))
    folder = path.parent
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(made / name, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    (folder / "chat_template.jinja").write_text("own")
    found = ensure_model(str(folder))
    assert found.name == default_served_name(str(folder)) == "Tiny-GGUF"
    written = json.loads((found / "config.json").read_text())
    assert (written["rms_norm_eps"], written["quantization_config"]["kinds"]) == (0.5, ["Q8_0"])
    assert (found / "chat_template.jinja").read_text() == "own"
    # The file alone is what its metadata say, whatever lies beside it.
    assert json.loads((made / "config.json").read_text())["rms_norm_eps"] == pytest.approx(1e-5)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    assert "is not that of a Llama" in refusal(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "is no JSON" in refusal(folder)


def test_a_file_without_codes_is_converted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "plain.gguf", kinds=dict.fromkeys(Q8, "BF16"))
    found = ensure_model(str(path))
    assert (found / "model.safetensors").is_file()
    assert "quantization_config" not in json.loads((found / "config.json").read_text())


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (Q8 | {"ffn_up": "MXFP4"}, "the tensor 'blk.0.ffn_up.weight' is MXFP4: Q4_0, Q4_1, Q5_0"),
        (Q8 | {"attn_q": "F16"}, "the tensor 'blk.0.attn_q.weight' is F16 in a quantised file"),
    ],
)
def test_kinds_that_are_not_served_are_named(tmp_path: Path, kinds: dict[str, str], words: str) -> None:
    assert words in refusal(write_gguf(tmp_path / "odd.gguf", kinds=kinds))


def test_other_architectures_several_files_and_parts_are_refused(tmp_path: Path, path: Path) -> None:
    assert "of architecture 'mamba', which is none of llama, qwen2" in refusal(
        write_gguf(tmp_path / "o.gguf", architecture="mamba")
    )
    part = shutil.copy(path, path.parent / "Tiny-00001-of-00002.gguf")
    assert "is a part of a model" in refusal(Path(part))
    assert "has 2 GGUF files (Tiny-00001-of-00002.gguf, Tiny.Q8_0.gguf, …)" in refusal(path.parent)


@pytest.mark.parametrize("length", [0, 3, 8, 100, 3000, -1])
def test_a_broken_file_is_one_line(path: Path, length: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:length])
    said = refusal(path)
    assert "Tiny.Q8_0.gguf could not be read: it is no GGUF file, or is cut short or broken (" in said
    assert "\n" not in said


def test_counts_beyond_the_file_are_no_work(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:24] = np.array([1 << 60, 1 << 60], "<u8").tobytes()
    path.write_bytes(data)
    assert "could not be read" in refusal(path)


def test_rope_factors_are_the_configs(tmp_path: Path) -> None:
    folder = tmp_path / "factors"
    folder.mkdir()
    path = write_gguf(folder / "f.gguf", kinds=Q8, factors={"rope_freqs.weight": [2.0] * 8})
    found = ensure_model(str(path))
    assert "rope_freqs.weight" not in (found / "model.gguf.json").read_text()
    assert json.loads((found / "config.json").read_text())["rope_parameters"]["short_factor"] == [2.0] * 8
    # The model's own config may say the same in other words, but not that nothing is scaled.
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(found / name, folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 50_000.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": own}))
    assert json.loads((ensure_model(str(folder)) / "config.json").read_text())["rope_parameters"] == own
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 50_000.0}}))
    assert "config.json scales no rope, and the file does" in refusal(folder)


def test_the_config_of_another_model_is_refused(path: Path) -> None:
    folder = path.parent
    config = json.loads((ensure_model(str(path)) / "config.json").read_text())
    for field, key in (("num_attention_heads", "attention.head_count"), ("num_hidden_layers", "block_count")):
        (folder / "config.json").write_text(json.dumps(config | {field: 8}))
        assert f"config.json has {field} 8, and the file's llama.{key} is" in refusal(folder)


def test_plan_takes_the_file(path: Path) -> None:
    done = run_here("plan", "--model", str(path), "--gpu", "cpu", "--gpu-memory", "4GiB", "--json")
    assert done.code == 0, done.stderr
    weights = json.loads(done.stdout)["weights"]
    codes = sum(
        tensor.n_elements for tensor in gguf.GGUFReader(path).tensors if tensor.tensor_type.name == "Q8_0"
    )
    # The embedding is kept in bfloat16 too, for its rows are read.
    embedding = 265 * 64 * 2
    assert weights == pytest.approx(codes * (1 + 4 / 32) + embedding, rel=0.02)
