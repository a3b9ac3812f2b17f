"""Grammars of answers with calls: whatever they allow is read as calls that fit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance.numpy as masks
import numpy as np
import pytest

from loraplex.engine.grammar.tokenizer import load_grammar_tokenizer, new_matcher
from loraplex.serving.errors import GrammarRefused
from loraplex.serving.output.format_parser import FormatParser
from loraplex.serving.output.formats import REASONING_FORMATS, TOOL_FORMATS, Shape, ToolFormat
from loraplex.serving.output.grammar import NO_ARGUMENTS, OfferedTool, ToolGrammar, ToolRefused
from loraplex.serving.output.parts import AnswerText, CallArguments, CallStart, Part, merge_parts
from loraplex.serving.text.processor import TextProcessor
from support.models.byte_tokenizer import EOS_ID, write_byte_tokenizer

SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    OfferedTool('get "w" \u00e9/', SCHEMA, True),
    OfferedTool("f", None, True),
    OfferedTool("free", {"type": "object", "required": ["x"]}, False),
]
SCHEMAS = {'get "w" \u00e9/': SCHEMA, "f": NO_ARGUMENTS, "free": {"type": "object"}}
ANSWER = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
THINK = REASONING_FORMATS["think_tags"]
SNIPPETS = ["<think>", "</think>", "<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "functools[", "{", ";"]
LIKED = frozenset({EOS_ID, *b'"}]:,\n 0123', *range(260, 266)})


class Model:
    """Samples tokens at random, rather those that lead to an end, and tries what a forger would write."""

    def __init__(self, path: Path, special: tuple[str, ...]) -> None:
        model = write_byte_tokenizer(path, special=special)
        self.text = TextProcessor(model, max_model_len=4096)
        self._tokenizer = load_grammar_tokenizer(model, (EOS_ID,))

    def answer(self, grammar: str, rng: random.Random, most: int = 300) -> tuple[list[int], bool]:
        """Tokens, and whether they are a whole answer."""
        matcher = new_matcher(self._tokenizer, grammar)
        assert not matcher.get_error(), matcher.get_error()
        mask = masks.allocate_token_bitmask(1, self._tokenizer.vocab_size)
        ids: list[int] = []
        while len(ids) < most:
            if rng.random() < 0.15:
                snippet = list(rng.choice(SNIPPETS).encode())
                tried = matcher.deep_copy()
                if tried.try_consume_tokens(snippet) == len(snippet) and not tried.get_error():
                    matcher, ids = tried, ids + snippet
                    continue
            masks.fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            liked = [token for token in allowed if token in LIKED]
            token = rng.choice(liked if liked and rng.random() < 0.6 else allowed)
            if token == EOS_ID:
                return ids, True
            assert matcher.consume_token(token)
            ids.append(token)
            if matcher.is_stopped():
                return ids, True
        return ids, False

    def read(self, ids: list[int], tool_format: ToolFormat, **options: Any) -> list[Part]:
        notations = tool_format.under_grammar(self.text.notation(tool_format))
        parser = FormatParser(notations, frozenset(SCHEMAS), lambda: "id", THINK, streams=True, **options)
        stream = self.text.stream(shown=tool_format.markers | THINK.markers)
        text = stream.push(ids).text + stream.finish().text
        return merge_parts([*parser.push(text), *parser.finish()])


@pytest.fixture(scope="module", params=["words", "control tokens"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), SPECIAL if request.param == "control tokens" else ())


KINDS: dict[str, dict[str, Any]] = {
    "required": {"called": True},
    "named": {"called": True, "single": True},
    "strict": {},
    "one at most": {"single": True},
    "or an answer": {"answer": ANSWER},
    "in reasoning": {"called": True, "in_reasoning": True},
    "strict in reasoning": {"in_reasoning": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_what_a_grammar_allows_is_read_as_calls_that_fit(model: Model, name: Any, kind: str) -> None:
    tool_format, options = TOOL_FORMATS[name], KINDS[kind]
    written = (tool_format, model.text.notation(tool_format))
    grammar = ToolGrammar(written, TOOLS, model.text.control_id, reasoning=THINK, **options).text()
    rng = random.Random(f"{name} {kind}")
    whole = calls = 0
    for _ in range(8):
        ids, ended = model.answer(grammar, rng)
        parts = model.read(ids, tool_format, in_reasoning=options.get("in_reasoning", False))
        starts = [part for part in parts if isinstance(part, CallStart)]
        calls += len(starts)
        if not ended:
            continue
        whole += 1
        for part in parts:
            if isinstance(part, CallArguments):
                schema = SCHEMAS[starts[part.position].name]
                assert jsonschema_rs.is_valid(schema, json.loads(part.text)), part
        texts = [part.text for part in parts if isinstance(part, AnswerText)]
        assert len(starts) <= 1 or not options.get("single")
        assert not (options.get("called") and (texts or not starts)), parts
        if "answer" in options and not starts:
            assert jsonschema_rs.is_valid(ANSWER, json.loads(texts[0])), parts
    assert whole >= 4
    assert calls or not options.get("called")


def test_a_required_call_is_written_as_the_format_is_written(model: Model) -> None:
    """The models know these bytes; and no other notation of the format is allowed."""
    shapes = {name: model.text.notation(found).shapes for name, found in TOOL_FORMATS.items()}
    assert (shapes["mistral"] == (Shape.NAMED, Shape.LIST)) == (model.text.control_id("[ARGS]") is not None)
    only = [OfferedTool("f", None, True)]
    expected = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "f", "parameters": {}}',
        "phi": '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>',
        "json": '{"name": "f", "arguments": {}}',
    }
    for name, text in expected.items():
        tool_format = TOOL_FORMATS[name]  # type: ignore[index]
        written = (tool_format, model.text.notation(tool_format))
        grammar = ToolGrammar(written, only, model.text.control_id, called=True, single=True).text()
        ids, stream = [], model.text.stream(shown=tool_format.markers)
        rng = random.Random(3)
        while not ids or len(ids) > 90:
            ids, _ = model.answer(grammar, rng)
        answer = stream.push(ids).text
        assert "".join(answer.split()) in ("".join(text.split()), f"[{''.join(text.split())}]")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "array"}, "object"),
        ({"type": "object", "properties": {"a": False}, "x-guidance": {}}, "x-guidance"),
    ],
)
def test_a_schema_that_cannot_be_followed_names_its_tool(parameters: dict[str, Any], reason: str) -> None:
    hermes = TOOL_FORMATS["hermes"]
    tools = [OfferedTool("f", None, True), OfferedTool("g", parameters, True)]
    with pytest.raises(ToolRefused, match=reason) as refused:
        ToolGrammar((hermes, hermes.written[0]), tools, lambda _: None, called=True).text()
    assert refused.value.name == "g"
    with pytest.raises(GrammarRefused):
        ToolGrammar(None, [], lambda _: None, answer={"x-guidance": 1}).text()
