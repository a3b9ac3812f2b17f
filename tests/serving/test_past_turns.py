"""Templates that refuse how earlier turns were written: the conversation goes on, in another form of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.serving.errors import TemplateError
from loraplex.serving.output.formats import TOOL_FORMATS
from loraplex.serving.text.past_turns import simpler
from loraplex.serving.text.processor import TextProcessor
from loraplex.serving.text.tool_rendering import ToolRendering
from support.models.byte_tokenizer import byte_decode, write_byte_tokenizer

USER = {"role": "user", "content": "Go."}
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
TURNS = (
    "{% for m in messages %}CHECK<|start|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
HERMES = TURNS.replace("CHECK", "")
SHORT_IDS = TURNS.replace(
    "CHECK",
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}",
)
ALTERNATES = "{% set ns = namespace(n=0) %}" + TURNS.replace(
    "CHECK",
    "{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}",
)
KNOWN_CALLS = "{% set ns = namespace(called=false) %}" + TURNS.replace(
    "CHECK",
    "{% if m.tool_calls %}{% set ns.called = true %}{% endif %}"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call for this result') }}{% endif %}",
)
AS_TEXT = HERMES.replace("c.function.arguments | tojson", "c.function.arguments")
TEMPLATES = [HERMES, SHORT_IDS, ALTERNATES, KNOWN_CALLS, AS_TEXT]


def call(arguments: str, label: str = "call_1") -> dict[str, Any]:
    return {"id": label, "type": "function", "function": {"name": "note", "arguments": arguments}}


def called(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(content: str, label: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": label, "content": content}


def words(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def prompt(path: Path, template: str, *messages: dict[str, Any], max_model_len: int = 4096) -> str:
    folder = write_byte_tokenizer(path, chat_template=template)
    text = TextProcessor(folder, max_model_len=max_model_len)
    return byte_decode(text.encode_chat(messages, tool_format=TOOL_FORMATS["hermes"]))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("arguments", ['{"text": "half a sent', '{"a": 1} and so on', "[]", "3", "\ud800"])
def test_arguments_that_are_no_object_stand_as_they_were_written(
    tmp_path: Path, template: str, arguments: str
) -> None:
    turns = [USER, called(call(arguments), content="I note."), result("Not run."), words("Well."), USER]
    told = prompt(tmp_path, template, *turns)
    shown = arguments.replace("\ud800", "�")
    assert f'<tool_call>\n{{"name": "note", "arguments": {shown}}}\n</tool_call>' in told
    assert told.index("I note.") < told.index(shown) < told.index("Not run.") < told.index("Well.")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "turns",
    [
        [
            called(call("{}", "toolu_01"), call("{}", "x" * 200)),
            result("a", "toolu_01"),
            result("b", "x" * 200),
        ],
        [called(call("{}")), result("a"), result("b")],
        [words("Hm."), result("a", "lost"), words("b")],
        [result("a"), called(call("{}")), words("b")],
        [called(call("{}"), call("{}")), result("a"), result("b")],
        [words("a"), words("b")],
        [USER, USER, words("a"), words("b")],
    ],
)
def test_any_order_of_earlier_turns_is_told(
    tmp_path: Path, template: str, turns: list[dict[str, Any]]
) -> None:
    told = prompt(tmp_path, template, USER, *turns, words("Done."), USER)
    assert told.endswith("\nuser\nGo.\nassistant\n")
    assert told.index("a") < told.rindex("b\n") < told.index("Done.")


def test_a_form_that_the_template_takes_is_left_alone(tmp_path: Path) -> None:
    """No id is changed, and no neighbours are joined, where the template asks for neither."""
    shows_ids = HERMES.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")
    told = prompt(
        tmp_path, shows_ids, USER, USER, called(call("{}")), result("a"), words("b"), words("c"), USER
    )
    assert told.count("user\nGo.") == 3
    assert "call_1a" in told
    assert told.count("assistant\n") == 4


def test_an_id_is_the_same_each_time(tmp_path: Path) -> None:
    shows_ids = SHORT_IDS.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")
    turns = [USER, called(call("{}")), result("a")]
    first = prompt(tmp_path / "a", shows_ids, *turns)
    assert prompt(tmp_path / "b", shows_ids, *turns, words("b"), USER).startswith(first[: first.rindex("a")])
    assert "call_1" not in first


@pytest.mark.parametrize("behind", [[USER, USER], [words("x"), USER, USER]])
def test_the_current_turn_is_refused_in_the_templates_words(
    tmp_path: Path, behind: list[dict[str, Any]]
) -> None:
    with pytest.raises(TemplateError, match="must alternate"):
        prompt(tmp_path, ALTERNATES, USER, words("a"), *behind)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("depth", [190, 500, 5000])
def test_deep_arguments_of_an_earlier_call_are_told(tmp_path: Path, template: str, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    turns = [USER, called(call(arguments)), result("Not run."), words("Well."), USER]
    told = prompt(tmp_path, template, *turns, max_model_len=1 << 16)
    assert arguments in told.replace(": ", ":")


def test_past_results_in_words_leave_the_current_turn_as_it_is(tmp_path: Path) -> None:
    refuses_a = TURNS.replace(
        "CHECK",
        "{% if m.role == 'tool' and m.content == 'a' %}{{ raise_exception('old result') }}{% endif %}",
    )
    turns = [USER, called(call("{}")), result("a"), words("b"), USER]
    current = [called(call("{}")), result("c"), result("d"), USER]
    told = prompt(tmp_path, refuses_a, *turns, *current)
    assert told.endswith("\ntool\nc\ntool\nd\nuser\nGo.\nassistant\n")
    with pytest.raises(TemplateError, match="old result"):
        prompt(tmp_path, refuses_a, *turns, called(call("{}")), result("a"))


@pytest.mark.parametrize(
    ("turns", "ways"),
    [
        ([USER], 0),
        ([USER, words("a"), USER, USER], 0),
        ([USER, words("a"), words("b"), USER], 1),
        ([USER, called(call("{}", "abcdefghi")), result("c", "abcdefghi")], 1),
        ([USER, called(call("{}", "abcdefghi")), result("c", "abcdefghi"), words("a"), USER], 2),
        ([USER, called(call("{}")), result("c"), words("a"), words("b"), USER], 4),
    ],
)
def test_no_way_is_tried_twice(turns: list[dict[str, Any]], ways: int) -> None:
    """Each costs the template's time, and a hostile one takes all of it."""
    shown = ToolRendering("object", lists_tools=True, shows_results=True, takes_system=True)
    assert len(list(simpler(turns, shown))) == ways
    if not any(message.get("tool_calls") for message in turns):
        assert len(list(simpler(turns, None))) == ways
