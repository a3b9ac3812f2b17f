"""The token that a chat template writes behind an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.serving.text.chat_template import ChatTemplate
from loraplex.serving.text.processor import TextProcessor, base_turn_ends
from loraplex.serving.text.turn_ends import written_ends
from support.models.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer

ADDED = (
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
    "<|end",
    "</tool_call>",
    "\n",
)
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "chatml": (LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
    "llama 3": (LOOP + "<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}", "<|eot_id|>"),
    "gemma": (LOOP + "<t>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}", "<end_of_turn>"),
    "phi 3": (LOOP + "{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}{{ eos_token }}", "<|end|>"),
    "a line before it": (LOOP + "{{ m.content }}\n<|end|>{% endfor %}", "<|end|>"),
    "by name": (LOOP + "{{ m.content }}{{ eos_token }}{% endfor %}", "</s>"),
    "an answer with thoughts": (
        LOOP + "<think>\n\n</think>{{ m.content }}<|im_end|>{% endfor %}",
        "<|im_end|>",
    ),
    "the longer of two": (LOOP + "{{ m.content }}<|end|>{% endfor %}", "<|end|>"),
    "text behind it": (LOOP + "{{ m.content }} ###<|end|>{% endfor %}", None),
    "nothing behind it": (LOOP + "{{ m.content }}\n{% endfor %}", None),
    "a marker of calls": (LOOP + "{{ m.content }}</tool_call>{% endfor %}", None),
    "not behind the last answer": (
        LOOP + "{{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}", "<|im_end|>",
    ),
    "a refusal of this talk": ("{{ raise_exception('no') }}<|im_end|>", "<|im_end|>"),
    "no answer": ("<|end|>", None),
    "a refusal": ("{{ raise_exception('no') }}", None),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_behind_an_answer(name: str) -> None:
    source, end = TEMPLATES[name]
    made = {"default": ChatTemplate(source, {"eos_token": "</s>"})}
    assert written_ends(made, ADDED) == (() if end is None else (end,))


def test_known_ends_of_some_turns() -> None:
    source = LOOP + "{{ m.content }}{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}{% endfor %}"
    made = {"default": ChatTemplate(source, {})}
    assert written_ends(made, (*ADDED, "<|eom_id|>")) == ("<|eot_id|>", "<|eom_id|>")
    assert written_ends(made, ADDED) == ("<|eot_id|>",)


def test_every_template_that_chats_use() -> None:
    made = {
        name: ChatTemplate(LOOP + "{{ m.content }}" + end + "{% endfor %}", {})
        for name, end in (("default", "<|im_end|>"), ("tool_use", "<|end|>"), ("rag", "</s>"))
    }
    assert written_ends(made, ADDED) == ("<|im_end|>", "<|end|>")
    assert written_ends({"rag": made["rag"]}, ADDED) == ("</s>",)


def test_those_of_a_base_are_found_without_its_tokenizer(tmp_path: Path) -> None:
    base = write_byte_tokenizer(tmp_path)
    assert base_turn_ends(base) == TextProcessor(base, max_model_len=64).chat.turn_ends == ("<|end|>",)
    (base / "chat_template.jinja").write_text(CHAT_TEMPLATE + "{% for %}")
    assert base_turn_ends(base) == ()
