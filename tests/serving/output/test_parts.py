"""The parts of an answer, merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.output.parser import PlainParser
from loraplex.serving.output.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    Part,
    ReasoningPart,
    merge_parts,
    text_of,
)


def test_neighbours_of_one_kind_are_joined() -> None:
    start = CallStart(0, "f", "call_1")
    parts: list[Part] = [
        ReasoningPart("a"), ReasoningPart("b"), AnswerText("c"), AnswerText(""), AnswerText("d"),
        start, CallArguments(0, "{"), CallArguments(0, "}"), CallArguments(1, "[]"), AnswerText("e"),
    ]  # fmt: skip
    assert merge_parts(parts) == [
        ReasoningPart("ab"), AnswerText("cd"), start, CallArguments(0, "{}"), CallArguments(1, "[]"), AnswerText("e"),
    ]  # fmt: skip
    assert text_of(parts) == "cde"


def test_calls_are_never_joined() -> None:
    same = CallStart(0, "f", "call_1")
    assert merge_parts([same, same]) == [same, same]


def test_empty_parts_vanish() -> None:
    assert merge_parts([AnswerText(""), ReasoningPart(""), CallArguments(0, "")]) == []


@given(st.lists(st.text()))
def test_a_plain_answer_is_its_text(pieces: list[str]) -> None:
    parser = PlainParser()
    parts = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]
    whole = "".join(pieces)
    assert merge_parts(parts) == ([AnswerText(whole)] if whole else [])
    assert parser.num_calls == 0
