"""Which of the two readings of a model's tokenizer serves, and the words about their difference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loraplex.app.base_model.served_tokenizer import serve_tokenizer
from loraplex.serving.text.processor import TextProcessor
from loraplex.serving.text.text_build import text_build
from loraplex.serving.text.tokenizer_comparison import PROBES
from support.models.tokenizer_folders import CLASSES, write_folder

EXAMPLES = {
    "LlamaTokenizer": r"'<s>1' is '<s>' '<s>' '\u2581' '1' by tokenizer.json and '<s>' '<s>' '1' by transf",
    "LlamaTokenizerFast": r"' Hello' is '<s>' '\u2581' '\u2581He' 'll' 'o' by tokenizer.json",
    "Qwen2Tokenizer": "'2026' is '202' '6' by tokenizer.json and '2' '0' '2' '6' by transformers' Qwen2Tokenizer",
    "GPT2Tokenizer": r"'a\n\nb' is 'a' '\u010a\u010a' 'b' by tokenizer.json and",
    "GPTNeoXTokenizerFast": r"'a\n\nb' is 'a' '\u010a\u010a' 'b' by tokenizer.json and",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_class_is_served_as_transformers_reads_it_or_as_it_lies(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = write_folder(tmp_path / "Base", name)
    theirs, as_it_lies = (
        AutoTokenizer.from_pretrained(model),
        Tokenizer.from_file(str(model / "tokenizer.json")),
    )
    served = serve_tokenizer(model, "transformers", tmp_path)
    by_file = serve_tokenizer(model, "file", tmp_path)
    assert by_file.model_dir == model
    assert served.model_dir.name == "Base"
    texts = [TextProcessor(found.model_dir, max_model_len=512) for found in (served, by_file)]
    for text in (*PROBES, "<s>Hi</s> 1", "<|im_start|>user\n2026<|im_end|>"):
        assert texts[0].encode(text) == theirs(text)["input_ids"], text
        assert texts[1].encode(text) == as_it_lies.encode(text).ids, text
    for found, choice in ((served, "transformers"), (by_file, "file")):
        assert EXAMPLES[name] in found.warning
        assert f". --tokenizer {choice} serves" in found.warning
        assert "\n" not in found.warning
    assert text_build(served.model_dir) != text_build(by_file.model_dir)


def test_a_tokenizer_that_both_read_alike_serves_as_it_lies(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "Base", "PreTrainedTokenizerFast")
    found = serve_tokenizer(model, "transformers", tmp_path)
    assert (found.model_dir, found.name, found.warning) == (model, "TokenizersBackend", "")


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_special_tokens_that_transformers_splits_are_told(name: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path / "Base", name)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": True}))
    found = serve_tokenizer(model, "transformers", tmp_path)
    assert found.warning.startswith("tokenizer_config.json has split_special_tokens, by which transformers")
    assert EXAMPLES.get(name, "") in found.warning


def test_what_was_read_is_kept_until_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (write_folder(tmp_path / name, "Qwen2Tokenizer") for name in ("a", "b"))
    before = serve_tokenizer(first, "transformers", tmp_path)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert serve_tokenizer(first, "transformers", tmp_path) == before
    other = serve_tokenizer(second, "transformers", tmp_path)
    assert other.model_dir.name == "b"
    assert (other.model_dir / "config.json").resolve() == second / "config.json"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = json.loads((first / "tokenizer_config.json").read_text())
    (first / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (first / "config.json").write_text('{"model_type": "llama"}')
    assert serve_tokenizer(first, "transformers", tmp_path).model_dir == first


def test_files_that_transformers_cannot_read_serve_as_they_lie(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "Base", "PreTrainedTokenizerFast")
    own_code = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(own_code))
    found = serve_tokenizer(model, "transformers", tmp_path)
    assert found.model_dir == model
    assert "for transformers cannot read the tokenizer: " in found.warning
    assert "\n" not in found.warning


def test_every_class_has_its_example() -> None:
    assert EXAMPLES.keys() == CLASSES.keys() - {"PreTrainedTokenizerFast"}


@pytest.mark.slow
def test_the_quickstarts_base_is_read_as_its_adapters_were_trained(
    real_model_dir: Path, tmp_path: Path
) -> None:
    found = serve_tokenizer(real_model_dir, "transformers", tmp_path)
    assert (found.model_dir, found.warning) == (real_model_dir, "")
