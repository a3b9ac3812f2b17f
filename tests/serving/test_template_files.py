"""Chat templates of a base as transformers saves them: read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from loraplex.serving.text.processor import TextProcessor
from loraplex.serving.text.text_build import text_build
from support.models.byte_tokenizer import byte_decode, write_byte_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + PLAIN
BROKEN = "{% if %}"
"""No chat uses it, so that it is not compiled."""
TOOL = {
    "type": "function",
    "function": {"name": "find_harbour", "parameters": {"type": "object", "properties": {}}},
}
TALK = [{"role": "user", "content": "Hi."}]
SAVED: list[tuple[Any, bool]] = [
    (PLAIN, True),
    (PLAIN, False),
    ({"default": PLAIN, "tool_use": TOOLS, "rag": BROKEN}, True),
    ({"default": PLAIN, "tool_use": TOOLS, "rag": BROKEN}, False),
    ({"default": TOOLS, "rag": BROKEN}, True),
]


def saved(path: Path, template: Any, *, as_files: bool) -> Path:
    source = write_byte_tokenizer(path / "source", chat_template=None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), eos_token="<|end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path / "saved", save_jinja_files=as_files)
    return path / "saved"


def prompt(model: Path, tools: list[dict[str, Any]] | None) -> str:
    return byte_decode(TextProcessor(model, max_model_len=4096).encode_chat(TALK, tools))


@pytest.mark.parametrize(("template", "as_files"), SAVED)
def test_what_save_pretrained_writes(tmp_path: Path, template: Any, as_files: bool) -> None:
    model = saved(tmp_path, template, as_files=as_files)
    theirs = AutoTokenizer.from_pretrained(model)
    for tools in (None, [TOOL]):
        assert prompt(model, tools) == theirs.apply_chat_template(
            TALK, tools=tools, tokenize=False, add_generation_prompt=True
        )


def test_a_file_counts_before_the_config(tmp_path: Path) -> None:
    model = saved(tmp_path, {"default": PLAIN, "tool_use": TOOLS}, as_files=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "other"}))
    assert prompt(model, [TOOL]) == "[find_harbour]user: Hi.\nA:"
    assert prompt(model, None) == "user: Hi.\nA:"
    # Without a default one among the files, the config's serves.
    (model / "chat_template.jinja").unlink()
    assert prompt(model, None) == "other"
    assert prompt(model, [TOOL]) == "[find_harbour]user: Hi.\nA:"


@pytest.mark.parametrize("listed", [[{"name": "default", "template": PLAIN}], {"default": PLAIN}, PLAIN])
def test_a_processors_file(tmp_path: Path, listed: Any) -> None:
    model = write_byte_tokenizer(tmp_path, chat_template=None)
    (model / "chat_template.json").write_text(json.dumps({"chat_template": listed}))
    assert prompt(model, None) == "user: Hi.\nA:"


def test_the_fingerprint_knows_each_template(tmp_path: Path) -> None:
    model = saved(tmp_path, {"default": PLAIN, "tool_use": TOOLS}, as_files=True)
    before = text_build(model)
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS + " ")
    assert text_build(model) != before
