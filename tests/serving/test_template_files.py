"""Chat templates of a base as transformers saves them: read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from loraplex.adapters.admission.chat_files import read_chat_files
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


def written(model: Path) -> str:
    """The prompt with its control tokens."""
    text = TextProcessor(model, max_model_len=4096)
    return text.spell(text.encode_chat(TALK)).text


NAMES = ("bos_token", "eos_token", "unk_token", "think_token", "image_token", "boi")
NAMING = (
    "".join(f"|{name}={{{{ {name} }}}}" for name in NAMES)
    + "{% for m in messages %}{{ m.content }}{% endfor %}"
)
PAD = {"__type": "AddedToken", "content": "<|pad|>"}
LISTED = {"added_tokens_decoder": {"256": {"content": "<|end|>", "special": True}}}


@pytest.mark.parametrize(
    ("config", "special_map"),
    [
        ({"think_token": "<|end|>"}, {}),
        ({"extra_special_tokens": {"think_token": "<|end|>", "boi": PAD}}, {}),
        ({"model_specific_special_tokens": {"image_token": "<|pad|>"}}, {}),
        ({"extra_special_tokens": ["<|pad|>"], "unk_token": PAD}, {}),
        ({"image_token": 7, "unk_token": None}, {}),
        # The older file counts where the config lists no added tokens.
        ({"unk_token": "<|end|>"}, {"unk_token": "<|pad|>"}),
        ({"unk_token": "<|end|>"} | LISTED, {"unk_token": "<|pad|>"}),
        ({"bos_token": None} | LISTED, {"bos_token": "<|pad|>"}),
    ],
)  # fmt: skip
def test_tokens_that_a_config_names_are_the_templates_variables(
    tmp_path: Path, config: dict[str, Any], special_map: dict[str, str]
) -> None:
    model = saved(tmp_path, NAMING, as_files=True)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    (model / "special_tokens_map.json").write_text(json.dumps(special_map))
    theirs = AutoTokenizer.from_pretrained(model)
    assert written(model) == theirs.apply_chat_template(TALK, tokenize=False)


def test_a_name_that_every_template_is_given_cannot_be_a_tokens(tmp_path: Path) -> None:
    model = saved(tmp_path, NAMING, as_files=True)
    path = model / "tokenizer_config.json"
    names = {"messages": "<|pad|>", "self": "<|pad|>", "a b": "<|pad|>", "boi": "<|pad|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": names}))
    assert written(model).endswith("|boi=<|pad|>Hi.")


def test_a_versions_template_knows_the_tokens_that_its_config_names(tmp_path: Path) -> None:
    model = saved(tmp_path, NAMING, as_files=True)
    path = model / "tokenizer_config.json"
    named = {"extra_special_tokens": {"boi": "<|pad|>", "unread": "<|pad|>"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    files = read_chat_files(model)
    assert files is not None
    assert files.special_tokens == {"eos_token": "<|end|>", "boi": "<|pad|>"}
