"""Tools through chat templates that know all of them, some of it, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.serving.errors import TemplateError
from loraplex.serving.output.format_parser import FormatParser
from loraplex.serving.output.formats import REASONING_FORMATS, TOOL_FORMATS, ToolFormat
from loraplex.serving.output.parts import CallArguments, CallStart
from loraplex.serving.text.processor import TextProcessor
from support.models.byte_tokenizer import CHAT_TEMPLATE, byte_decode, write_byte_tokenizer

MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>")
HEAD = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n"
)
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
CALLS = "{% if m.tool_calls %}{% for call in m.tool_calls %}{% set f = call.function %}"
ELSE = "{% endfor %}{% else %}{{ m.content }}{% endif %}"
HERMES = (
    HEAD
    + CALLS
    + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    + ELSE
) + TAIL
ONE_LLAMA = (
    HEAD
    + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    + '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + "{% else %}{{ m.content }}{% endif %}"
    + TAIL
)
MISTRAL = (
    HEAD
    + CALLS
    + (
        "{% if loop.first %}[TOOL_CALLS] [{% endif %}"
        "{% if call.id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}'
        "{{ ']' if loop.last else ', ' }}"
    )
    + ELSE
    + TAIL
)
PHI_AS_TEXT = (
    HEAD
    + CALLS
    + ('<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}]<|/tool_call|>')
    + ELSE
    + TAIL
)
OTHER = HEAD + CALLS + "<call={{ f.name }}>{{ f.arguments | tojson }}</call>" + ELSE + TAIL
NO_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if m.role != 'tool' %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Go."}


def processor(path: Path, template: str) -> TextProcessor:
    return TextProcessor(
        write_byte_tokenizer(path, chat_template=template, special=MARKERS), max_model_len=4096
    )


def turn(*arguments: Any, content: str = "") -> dict[str, Any]:
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps(a)}}
        for i, a in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def shown(text: TextProcessor, ids: list[int], tool_format: ToolFormat) -> str:
    """With the markers of the format, and no other control token."""
    stream = text.stream(shown=tool_format.markers)
    return stream.push(ids).text + stream.finish().text


@pytest.mark.parametrize(
    ("template", "detected"),
    [
        (HERMES, "hermes"),
        (ONE_LLAMA, "llama3"),
        (ONE_LLAMA.replace("parameters", "arguments"), "json"),
        (ONE_LLAMA.replace("parameters", "arguments") + "{# #}{{ '' if true else 'functools' }}", None),
        (MISTRAL, "mistral"),
        (PHI_AS_TEXT, "phi"),
        (OTHER, None),
        (CHAT_TEMPLATE, None),
        (NO_ROLES, None),
    ],
)
def test_the_format_of_a_template(tmp_path: Path, template: str, detected: str | None) -> None:
    text = processor(tmp_path, template)
    assert (text.chat.tool_format and text.chat.tool_format.name) == detected


@pytest.mark.parametrize(
    ("template", "detected"),
    [
        (HERMES, None),
        (HERMES + "{{ '' if true else '<think></think>' }}", "think_tags"),
        (HERMES + "{{ '' if true else '[THINK]' }}{{ '' if true else '[/THINK]' }}", "think_brackets"),
        (HERMES + "{{ '' if true else '<think></think>[THINK][/THINK]' }}", None),
        (HERMES[:-11] + "<think>\n{% endif %}", "think_tags"),
        (HERMES[:-11] + "{{ '<thi' + 'nk>' }}{% endif %}", "think_tags"),
        (HERMES[:-11] + "[THINK]{% endif %}", "think_brackets"),
        (HERMES[:-11] + "<think>{% endif %}{{ '' if true else '</think>[THINK][/THINK]' }}", "think_tags"),
        (HERMES + "{{ '' if true else '<think>' }}", None),
    ],
)
def test_the_reasoning_of_a_template(tmp_path: Path, template: str, detected: str | None) -> None:
    text = processor(tmp_path, template)
    assert (text.chat.reasoning_format and text.chat.reasoning_format.name) == detected


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    "template", [HERMES, ONE_LLAMA, MISTRAL, PHI_AS_TEXT, OTHER, CHAT_TEMPLATE, NO_ROLES]
)
def test_any_format_goes_through_any_template(tmp_path: Path, template: str, name: Any) -> None:
    """Calls of earlier turns stand in the prompt as the version writes them, and tools are told."""
    text, tool_format = processor(tmp_path, template), TOOL_FORMATS[name]
    text.check_formats(tool_format, None)
    arguments = [{"a": 'x "y" \\ é'}, {}]
    for count in (1, 2):
        messages = [
            USER,
            turn(*arguments[:count]),
            {"role": "tool", "tool_call_id": "abcdefgh0", "content": "4"},
        ]
        ids = text.encode_chat(messages, [TOOL], tool_format=tool_format)
        prompt = shown(text, ids, tool_format)
        assert '"name": "f"' in prompt.partition("Go.")[0] + prompt.partition("Go.")[2]
        answer = prompt.rpartition("Go.")[2].partition("assistant\n")[2]
        answer = answer[: answer.index("4")].rpartition("\n" + ("tool" if "tool\n" in answer else "user"))[0]
        parser = FormatParser(tool_format.notations, frozenset({"f"}), lambda: "id")
        parts = [*parser.push(answer), *parser.finish()]
        assert [type(part) for part in parts] == [CallStart, CallArguments] * count, answer
        read = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
        assert read == arguments[:count]


def test_a_template_of_another_format_does_not_list_the_tools(tmp_path: Path) -> None:
    """Its instructions may say how to call them, which is not how this version does."""
    for template, lists in ((HERMES, True), (MISTRAL, False), (OTHER, False), (CHAT_TEMPLATE, False)):
        text = processor(tmp_path / str(len(template)), template)
        prompt = byte_decode(text.encode_chat([USER], [TOOL], tool_format=TOOL_FORMATS["hermes"]))
        assert ("You can call tools." in prompt) != lists
        assert prompt.count('"parameters"') == 1


def test_markers_in_the_prompt_are_control_tokens_unless_a_client_writes_them(tmp_path: Path) -> None:
    text, mistral = processor(tmp_path, CHAT_TEMPLATE), TOOL_FORMATS["mistral"]
    plain = {"role": "assistant", "content": "[TOOL_CALLS]f[ARGS]{}"}
    counts = []
    for message in (turn({"x": "[TOOL_CALLS]"}), plain):
        ids = text.encode_chat([USER, message], tool_format=mistral)
        counts.append([ids.count(260), ids.count(261)])
    assert counts == [[1, 1], [0, 0]]


def test_phi_gets_its_tools_between_its_own_markers(tmp_path: Path) -> None:
    model = write_byte_tokenizer(tmp_path, special=("<|tool|>", "<|/tool|>"))
    text = TextProcessor(model, max_model_len=4096)
    ids = text.encode_chat([USER], [TOOL], tool_format=TOOL_FORMATS["phi"])
    start, end = ids.index(260), ids.index(261)
    assert json.loads(bytes(ids[start + 1 : end])) == [TOOL]


def test_a_template_that_changes_calls_is_refused(tmp_path: Path) -> None:
    text = processor(tmp_path, CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"))
    with pytest.raises(TemplateError, match="does not come back"):
        text.check_formats(TOOL_FORMATS["hermes"], None)
    text = processor(tmp_path / "none", "{{ raise_exception('no chats') }}")
    with pytest.raises(TemplateError, match="no chats"):
        text.check_formats(TOOL_FORMATS["json"], None)


def test_reasoning_that_the_prompt_opens(tmp_path: Path) -> None:
    think = REASONING_FORMATS["think_tags"]
    for template, opens in ((CHAT_TEMPLATE, False), (CHAT_TEMPLATE[:-11] + "<think>\n{% endif %}", True)):
        text = processor(tmp_path / str(opens), template)
        ids = text.encode_chat([{"role": "user", "content": "<think>"}])
        assert text.opens_reasoning(ids, think) == opens
        text.check_formats(None, think)
