"""The prompts of pairs: two texts, an instruction before them, and templates of rerankers."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.pooled import Head
from loraplex.api.pooling.prompts import fitted, to_prompts, tokens_of
from loraplex.api.pooling.schemas import ScoreRequest
from loraplex.control.types import ResolvedModel
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import fake_engine_info
from support.models.byte_tokenizer import PAD_ID, byte_decode, write_byte_tokenizer

RANKS = (
    "{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}"
    '{% for m in messages if m.role == "query" %}Q:{{ m.content }}{% endfor %}'
    "{% for m in messages if m.role == 'document' %} D:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}never{% endif %}?"
)


def prompts(
    folder: Path, template: str | None, prompt: str | None = None, pad: int | None = None
) -> list[list[int]]:
    text = TextProcessor(write_byte_tokenizer(folder, chat_template=template), max_model_len=512)
    head = Head("classify", ("LABEL_0",), "regression", pad, prompt)
    asked = to_prompts(ScoreRequest(model="m", text_1="owl", text_2=["a", "b<|pad|>"]))
    request = fitted(asked, ResolvedModel(None), fake_engine_info(head=head))
    return [list(ids) for ids in tokens_of(request, text, 512)]


@pytest.mark.parametrize(
    ("template", "prompt", "texts"),
    [
        (None, None, ["owla", "owlb"]),
        (None, "find: ", ["find: owla", "find: owlb"]),
        (RANKS, None, ["Q:owl D:a?", "Q:owl D:b<|pad|>?"]),
        (RANKS, "find", ["[find]Q:owl D:a?", "[find]Q:owl D:b<|pad|>?"]),
        (RANKS.replace("'document'", "'user'"), None, ["owla", "owlb"]),
    ],
)
def test_a_pair_is_written_as_its_reranker_was_trained(
    tmp_path: Path, template: str | None, prompt: str | None, texts: list[str]
) -> None:
    assert [byte_decode(ids) for ids in prompts(tmp_path, template, prompt)] == texts


def test_a_template_s_texts_forge_no_token_and_a_plain_pair_ends_before_its_padding(tmp_path: Path) -> None:
    assert PAD_ID not in prompts(tmp_path / "template", RANKS)[1]
    assert prompts(tmp_path / "plain", None)[1][-1] == PAD_ID
    assert prompts(tmp_path / "trimmed", None, pad=PAD_ID)[1] == list(b"owlb")
