"""Which tokens end a turn: all that a base model's files and its chat template name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.end_tokens import FAMILY_ENDS, NAMED_ENDS, EndToken, read_end_tokens

CHATML = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
LLAMA3 = {"<|end_of_text|>": 1, "<|eom_id|>": 8, "<|eot_id|>": 9}


def base(folder: Path, special: dict[str, int], plain: dict[str, int] | None = None, **files: Any) -> Path:
    """A folder with these files, and a tokenizer with these added tokens."""
    added = [{"id": number, "content": token, "special": True} for token, number in special.items()]
    added += [{"id": number, "content": token, "special": False} for token, number in (plain or {}).items()]
    tokenizer = {"added_tokens": added, "model": {"vocab": {"word": 50}}}
    for name, value in (files | {"tokenizer": tokenizer}).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("special", "files", "written", "ids", "disagreement"),
    [
        # A ChatML template over a base whose files name the end of a text alone.
        (
            CHATML, {"config": {"eos_token_id": 0}}, ["<|im_end|>"], (0, 2),
            "config.json says '<|endoftext|>' (0); the chat template says '<|im_end|>' (2)",
        ),
        (CHATML, {"config": {"eos_token_id": 2}}, ["<|im_end|>"], (2,), ""),
        (CHATML, {"config": {}}, ["<|im_end|>"], (2,), ""),
        (CHATML, {}, [], (), ""),
        # A list that has them all.
        (
            LLAMA3, {"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [1, 8, 9]}}, ["<|eot_id|>"],
            (1, 8, 9), "",
        ),
        (
            LLAMA3, {"config": {"eos_token_id": [8, 9]}, "generation_config": {"eos_token_id": 1}}, [], (1, 8, 9),
            "generation_config.json says '<|end_of_text|>' (1); config.json says '<|eom_id|>' (8) and '<|eot_id|>' (9)",
        ),
        # The tokenizer's own names: a string, or an object; in either file.
        (
            LLAMA3, {"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": {"content": "<|eot_id|>"}}}, [],
            (1, 9), "config.json says '<|end_of_text|>' (1); tokenizer_config.json's eos_token says '<|eot_id|>' (9)",
        ),
        (LLAMA3, {"config": {"eos_token_id": 9}, "special_tokens_map": {"eom_token": "<|eom_id|>"}}, [], (8, 9),
            "config.json says '<|eot_id|>' (9); special_tokens_map.json's eom_token says '<|eom_id|>' (8)"),
        (LLAMA3, {"config": {"eos_token_id": 9}, "tokenizer_config": {"eos_token": "<lost>"}}, [], (9,), ""),
        # The text part's of a multimodal model.
        (CHATML, {"config": {"text_config": {"eos_token_id": 2}}}, [], (2,), ""),
    ],
)  # fmt: skip
def test_all_that_name_a_special_token_are_heard(
    special: dict[str, int],
    files: dict[str, Any],
    written: list[str],
    ids: tuple[int, ...],
    disagreement: str,
    tmp_path: Path,
) -> None:
    ends = read_end_tokens(base(tmp_path, special, **files), written)
    assert (ends.ids, ends.disagreement) == (ids, disagreement)


def test_each_token_says_who_named_it(tmp_path: Path) -> None:
    files = {"config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<|im_end|>"}}
    ends = read_end_tokens(base(tmp_path, CHATML, **files), ["<|im_end|>"])
    sources = ("config.json", "tokenizer_config.json's eos_token", "the chat template")
    assert ends.found == (EndToken(2, "<|im_end|>", sources),)


def test_a_word_ends_a_turn_only_where_the_file_that_decides_says_so(tmp_path: Path) -> None:
    """The id in config.json may be a default that nobody chose."""
    config = {"eos_token_id": 50}
    folder = base(tmp_path, CHATML, {"<think>": 3}, config=config, generation_config={"eos_token_id": 2})
    assert read_end_tokens(folder).ids == (2,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert read_end_tokens(folder).ids == (2,)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    (end,) = read_end_tokens(folder).found
    assert (end.id, end.token) == (50, "word")


@pytest.mark.parametrize(("number", "size"), [(-1, 60), (60, 60), (10**12, 60), (-1, None), (10**12, None)])
def test_an_id_outside_the_vocabulary_ends_nothing_and_is_told(
    number: int, size: int | None, tmp_path: Path
) -> None:
    config = {"eos_token_id": [number, None, "2", 2], "vocab_size": size}
    ends = read_end_tokens(base(tmp_path, CHATML, config=config))
    assert ends.ids == (2,)
    assert ends.warning == f"the vocabulary has no token {number}, which a file names"


def test_the_page_lists_the_sources() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    named = ", ".join(f"`{name}`" for name in NAMED_ENDS)
    assert f"the added tokens named {named} |" in page
    families = [
        f"`{token}` of " + ", ".join(f"`{kind}`" for kind, end in FAMILY_ENDS.items() if end == token)
        for token in dict.fromkeys(FAMILY_ENDS.values())
    ]
    assert f"| the model type | {'; '.join(families)} |" in page
