"""Calls and reasoning in every format: found, shown to the letter where they are none, whatever pieces a text comes
in."""

from __future__ import annotations

import itertools
import json
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.output.format_parser import FormatParser
from loraplex.serving.output.formats import REASONING_FORMATS, TOOL_FORMATS
from loraplex.serving.output.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    Part,
    ReasoningPart,
    merge_parts,
    text_of,
)

NAMES = frozenset({"f", "get_weather"})
THINK = REASONING_FORMATS["think_tags"]
FORMATS = sorted(TOOL_FORMATS)


def new_parser(tool_format: str, **options: Any) -> FormatParser:
    numbers = itertools.count()
    notations = TOOL_FORMATS[tool_format].notations  # type: ignore[index]
    return FormatParser(notations, NAMES, lambda: f"id{next(numbers)}", **options)


def parse(tool_format: str, pieces: Iterable[str], **options: Any) -> list[Part]:
    parser = new_parser(tool_format, **options)
    parts = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]
    assert parser.num_calls == sum(isinstance(part, CallStart) for part in parts)
    return merge_parts(parts)


def call(position: int, arguments: str, name: str = "f") -> list[Part]:
    return [CallStart(position, name, f"id{position}"), CallArguments(position, arguments)]


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


WRITTEN = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ['{"a": 1}']),
    ("hermes", '<tool_call>{"arguments":{"x":"}"},"name":"f"}</tool_call>', ['{"x":"}"}']),
    ("hermes", '<tool_call>{"name":"f"}', ["{}"]),  # neither arguments nor an end
    ("llama3", '{"name": "f", "parameters": {"a": [1, {}]}}', ['{"a": [1, {}]}']),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "arguments": {"b":2}}', ["{}", '{"b":2}']),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}', ["{}"]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', ["{}"]),
    ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{"a":1}}, {"name":"f"}]', ['{"a":1}', "{}"]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "["}[TOOL_CALLS]f[ARGS] {}', ['{"a": "["}', "{}"]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', ['{"a": 1}']),
    ("phi", '<|tool_call|>[{"name":"f","arguments":{"a":null}}]<|/tool_call|>', ['{"a":null}']),
    ("phi", 'functools[{"name":"f","arguments":{}}, {"name":"f","arguments":{}}]', ["{}", "{}"]),
    ("json", ' {"name": "f", "parameters": {"a": true}}\n', ['{"a": true}']),
    ("json", '[{"name":"f","arguments":{}},{"name":"f","arguments":{"a":-0.5e+3}}]', ["{}", '{"a":-0.5e+3}']),
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("tool_format", "text", "arguments"), WRITTEN)
def test_calls_as_models_write_them(tool_format: str, text: str, arguments: list[str], streams: bool) -> None:
    expected = [part for position, told in enumerate(arguments) for part in call(position, told)]
    for size in (1, 2, 5, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(tool_format, pieces, streams=streams) == expected


BLOCKS = {
    "hermes": "<tool_call>{}</tool_call>",
    "llama3": "{}",
    "mistral": "[TOOL_CALLS] [{}]",
    "phi": "<|tool_call|>[{}]<|/tool_call|>",
    "json": "{}",
}
HELD = '{"a": "x \\"y\\" \\n"}'
IN_A_STRING, TWICE = json.dumps(HELD), json.dumps(json.dumps(HELD))
OTHER_FORMS = [
    (f'{{"name": "f", "arguments": {IN_A_STRING}}}', HELD),
    (f'{{"parameters": {json.dumps(" " + HELD)}, "name": "f"}}', HELD),
    (f'{{"name": "f", "arguments": {TWICE}}}', HELD),
    ('{"name": "f", "arguments": null}', "{}"),
    ('{"name": "f", "arguments": ""}', "{}"),
    ('{"name": "f", "arguments": "null"}', "{}"),
    ('{"name": "f", "id": null, "arguments": {}}', "{}"),
    ('{"index": 0, "id": 7, "name": "f", "arguments": {}}', "{}"),
    (f'{{"index": 12, "type": "function", "function": {{"name": "f", "arguments": {IN_A_STRING}}}}}', HELD),
    (f'{{"type": "function", "function": {{"name": "f", "arguments": {HELD}}}}}', HELD),
    (f'{{"function": {{"arguments": {IN_A_STRING}, "name": "f"}}, "id": "c"}}', HELD),
    ('{"function": {"name": "f"}, "type": "function"}', "{}"),
    (f'{{"type": "function", "function": "f", "parameters": {HELD}}}', HELD),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(("written", "arguments"), OTHER_FORMS)
def test_calls_in_other_forms(tool_format: str, written: str, arguments: str, streams: bool) -> None:
    text = BLOCKS[tool_format].replace("{}", written, 1)
    for size in (1, 3, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(tool_format, pieces, streams=streams) == call(0, arguments)


@pytest.mark.parametrize(("given", "arguments"), [(json.dumps(HELD), HELD), ("null", "{}"), (HELD, HELD)])
def test_arguments_behind_a_name_in_other_forms(given: str, arguments: str) -> None:
    text = f"[TOOL_CALLS]f[ARGS]{given}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS] {given}"
    for pieces in ([text], list(text)):
        for streams in (False, True):
            assert parse("mistral", pieces, streams=streams) == [*call(0, arguments), *call(1, arguments)]


NO_CALLS = [
    ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    *(
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{half}"}}}}</tool_call>')
        for half in ("\\ud83d", "\\uDE00", "\\ud83dx", "\\ud83d\\n", "\\ud83d\\ud83d", "\\ude00\\ud83d")
    ),
    *(
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {value}}}</tool_call>')
        for value in (
            '"{} and more"', '"[]"', '"x"', '"{\"a\": 01}"', '"\"{}"', '"{\"a\": \"\\ud83d\"}"', "[]",
            "3", "true", "nul", "None", '{}, "function": {"name": "f"}',
        )
    ),
    ("hermes", '<tool_call>{"function": {"function": {"name": "f"}}}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"name": "f"}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "more": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "In <tool_call> tags, models call their tools.</tool_call>"),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("llama3", '{"city": "Paris", "days": [1, 2]}'),
    ("llama3", 'I call {"name": "f", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="weather")'),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", '[TOOL_CALLS] [{"name":"f","arguments":{}}, {"name":"f", broken}]'),
    ("phi", "Use functools.lru_cache, or functools[1]."),
    ("phi", '<|tool_call|>[{"name":"f"}] and more'),
    ("json", '{"name": "f", "arguments": {}} That was it.'),
    ("json", '[1, 2, {"name": "f"}]'),
    ("json", 'Here: {"name": "f", "arguments": {}}'),
    ("json", '{"name": "Ada", "arguments": {}}'),
    *((name, text) for name in FORMATS for text in ("", " ", "\n\nhi \n", "<", "<tool_call", "[TOOL_", "{", "[", ";")),
]  # fmt: skip


@pytest.mark.parametrize(("tool_format", "text"), NO_CALLS)
def test_what_is_no_call_is_text_to_the_letter(tool_format: str, text: str) -> None:
    for size in (1, 3, len(text) or 1):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert parse(tool_format, pieces) == ([AnswerText(text)] if text else [])


def test_text_around_calls_loses_the_white_space_next_to_them() -> None:
    one = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    text = f" Let me see.\n\n{one}\n{one} \t Done.\n"
    assert parse("hermes", [text]) == [
        AnswerText(" Let me see."), *call(0, "{}"), *call(1, "{}"), AnswerText("Done.\n"),
    ]  # fmt: skip


def test_a_marker_behind_a_broken_block_counts() -> None:
    good = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert parse("hermes", [f"<tool_call><tool_call>{good}"]) == [
        AnswerText("<tool_call><tool_call>"), *call(0, "{}"),
    ]  # fmt: skip
    broken = '<tool_call>{"name":"f","arguments":{"a":}}</tool_call>'
    assert parse("hermes", [broken, good]) == [AnswerText(broken), *call(0, "{}")]
    # Where the marker begins as the expected one does.
    unclosed = '<tool_call>{"name":"f","arguments":{}}'
    assert parse("hermes", [unclosed, good]) == [
        AnswerText(unclosed), CallStart(0, "f", "id1"), CallArguments(0, "{}"),
    ]  # fmt: skip
    args = "[TOOL_CALLS]f[ARGS]{}"
    assert parse("mistral", [f"[TOOL_CALLS]{args}"]) == [AnswerText("[TOOL_CALLS]"), *call(0, "{}")]


def test_a_call_without_a_grammar_is_told_when_it_is_complete() -> None:
    parser = new_parser("hermes")
    text = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
    assert [parser.push(char) for char in text[:-1]] == [()] * (len(text) - 1)
    assert parser.push(text[-1]) == tuple(call(0, '{"a":1}'))


def test_arguments_under_a_grammar_are_told_as_they_come() -> None:
    parser = new_parser("hermes", streams=True)
    head, arguments = '<tool_call>\n{"name": "f", "arguments": ', '{"a": "b"}'
    assert [part for char in head for part in parser.push(char)] == []
    first, *others = [parser.push(char) for char in arguments]
    assert first == (CallStart(0, "f", "id0"), CallArguments(0, "{"))
    assert others == [(CallArguments(0, char),) for char in arguments[1:]]
    assert [part for char in "}\n</tool_call>" for part in parser.push(char)] == []
    assert parser.finish() == ()


def test_what_a_limit_cuts_off_under_a_grammar() -> None:
    """Arguments so far are told; half a head is text; what is left of a block with a call is nothing."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    head, end = text.index('{"a"'), text.index("}}")
    for length in range(len(text)):
        parts = parse("hermes", [text[:length]], streams=True)
        if length <= head:
            assert parts == ([AnswerText(text[:length])] if length else [])
        else:
            assert parts == call(0, text[head : min(length, end + 1)])


def test_what_a_limit_cuts_off_where_the_answer_is_calls_only() -> None:
    """A call whose name was cut off is nothing. Reasoning that was cut off is told."""
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text, told in (("", []), ("<think>Hm.</think>", [ReasoningPart("Hm.")]), (f"{one}\n", call(0, "{}"))):
        for length in range(one.index("{}") + 1):
            options: dict[str, Any] = {"streams": True, "calls_only": True, "reasoning": THINK}
            assert parse("hermes", [text, one[:length]], **options) == told
            assert parse("hermes", text + one[:length], **options) == told
    assert parse("hermes", ["<think>Hm. </thi"], streams=True, calls_only=True, reasoning=THINK) == [
        ReasoningPart("Hm. </thi")
    ]


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [ReasoningPart("Hm."), AnswerText("Yes.")]),
        ("\nHm. </think>Yes.", True, [ReasoningPart("Hm."), AnswerText("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [AnswerText("Yes.")]),
        ("<think>Hm.\n", False, [ReasoningPart("Hm.\n")]),
        ("Yes. <think>No.</think>", False, [AnswerText("Yes. <think>No.</think>")]),
        ("Yes.</think>", False, [AnswerText("Yes.</think>")]),
        (" <thin", False, [AnswerText(" <thin")]),
    ],
)
def test_reasoning(text: str, opened: bool, parts: list[Part]) -> None:
    for pieces in ([text], list(text)):
        assert parse("hermes", pieces, reasoning=THINK, in_reasoning=opened) == parts


def test_calls_in_reasoning_are_none() -> None:
    one = '{"name": "f", "parameters": {}}'
    assert parse("llama3", [f"<think>{one}</think>{one}"], reasoning=THINK) == [
        ReasoningPart(one), *call(0, "{}"),
    ]  # fmt: skip


SCRAPS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>",
    "<|/tool_call|>", "functools", "<think>", "</think>", "{", "}", "[", "]", '"', ",", ":", ";", " ", "\n", "\\",
    '{"name":"f","arguments":{}}', '"name":"f"', '"parameters":{"a":', "f", "1", "é", "🙂", "\ud800", "x",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=4), max_size=40).map("".join)
CUTS = st.lists(st.integers(0, 1 << 16), max_size=40)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tool_format", FORMATS)
@given(text=TEXTS, cuts=CUTS, opened=st.booleans())
def test_pieces_change_nothing(
    tool_format: str, streams: bool, text: str, cuts: list[int], opened: bool
) -> None:
    options: dict[str, Any] = {"streams": streams, "reasoning": THINK, "in_reasoning": opened}
    whole = parse(tool_format, [text], **options)
    assert parse(tool_format, cut(text, cuts), **options) == whole
    assert parse(tool_format, text, **options) == whole


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize(
    "text", ["\n[1, 2]", " \n[TOOL_CALLS]", "\n\n[[", " {x", "\t<tool_call>[", " functools[1"]
)
def test_white_space_before_what_is_no_call_comes_to_an_end(
    text: str, tool_format: str, streams: bool
) -> None:
    """A parser that looks at the same character again and again holds the event loop of the whole server."""
    for pieces in ([text], list(text)):
        parts = parse(tool_format, pieces, streams=streams, reasoning=THINK, in_reasoning=False)
        assert "".join(part.text for part in parts if isinstance(part, AnswerText)).strip() == text.strip()


NOTATION = re.compile(
    r"\s*(?:<tool_call>|</tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|<\|/?tool_call\|>|functools|\[ARGS\]|;"
    r'|\[CALL_ID\][^\[]*|"(?:name|id|type|arguments|parameters)"|"[^"]*"|[\[\]{},:]|f|get_weather|\s)*'
)


@pytest.mark.parametrize("tool_format", FORMATS)
@given(text=TEXTS)
def test_nothing_is_swallowed_or_told_twice(tool_format: str, text: str) -> None:
    """What is told stands in the text in this order, and between it is nothing but a call's notation."""
    parts = parse(tool_format, [text])
    place = 0
    gaps = []
    for part in parts:
        told = "" if isinstance(part, CallStart) else part.text
        found = text.find(told, place)
        if isinstance(part, CallArguments) and told == "{}" and not text[place:].count("{}"):
            continue  # no arguments
        assert found >= 0
        gaps.append(text[place:found])
        place = found + len(told)
    gaps.append(text[place:])
    if any(isinstance(part, CallStart) for part in parts):
        assert all(NOTATION.fullmatch(gap) for gap in gaps), gaps
    else:
        assert text_of(parts) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.sampled_from(["", *'{}[]",:\\0-.eE1u tfn\n'])), max_size=3
)


@pytest.mark.parametrize("tool_format", ["hermes", "mistral"])
@given(
    value=st.dictionaries(st.text(), JSON, max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_=st.booleans(),
    edits=EDITS,
    cuts=CUTS,
)
def test_arguments_are_what_a_json_library_takes(
    tool_format: str,
    value: Any,
    indent: int | None,
    ascii_: bool,
    edits: list[tuple[int, str]],
    cuts: list[int],
) -> None:
    arguments = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    for number, char in edits:
        place = number % max(1, len(arguments))  # all may be gone
        arguments = arguments[:place] + char + arguments[place + 1 :]
    opens, closes = {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS] [", "]")}[
        tool_format
    ]
    text = f'{opens}{{"name": "f", "arguments": {arguments}}}{closes}'
    parts = parse(tool_format, cut(text, cuts))
    if is_object(arguments):
        assert parts == call(0, arguments.strip(" \n\t\r"))
    elif is_object(f'{{"name": "f", "arguments": {arguments}}}'):
        # The edit reached out of the arguments: other keys, or two values.
        assert text_of(parts) in (text, "")
    else:
        assert parts == [AnswerText(text)]


def is_object(text: str) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(text, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # Python takes half a surrogate pair; others do not
        return isinstance(value, dict)
    except ValueError:
        return False


HOSTILE = {
    "nested braces": lambda n: '<tool_call>{"name":"f","arguments":' + '{"a":' * n,
    "nested lists": lambda n: '<tool_call>{"name":"f","arguments":{"a":' + "[" * n + "]" * n + "}}",
    "quotes": lambda n: '<tool_call>{"name":"f","arguments":{"a":"' + '\\"' * n,
    "markers": lambda n: "<tool_call>" * (n // 8),
    "half markers": lambda n: "<tool_cal" * (n // 8),
    "beginnings": lambda n: '<tool_call>{"name":"f","arguments":{"a":"' * (n // 32),
    "spaces": lambda n: "x" + " " * n + "<tool_call>" + " " * n,
    "keys": lambda n: '<tool_call>{"' + "a" * n,
    "names": lambda n: '<tool_call>{"name":"' + "a" * n,
}


@pytest.mark.parametrize("size", [7, 1 << 30])
@pytest.mark.parametrize("text_of_size", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_take_linear_work_and_memory(text_of_size: Callable[[int], str], size: int) -> None:
    def work(text: str) -> int:
        """Calls of functions, which do not depend on the machine."""
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        sys.setprofile(count)
        parse("hermes", pieces)
        sys.setprofile(None)
        return calls

    assert work(text_of_size(8000)) < 2.5 * work(text_of_size(4000)) + 200
    text = text_of_size(100_000)
    tracemalloc.start()
    parse("hermes", [text[start : start + size] for start in range(0, len(text), size)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * len(text) + 1_000_000
