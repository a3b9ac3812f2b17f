"""Parsers that make parts of a choice's text while it comes."""

from __future__ import annotations

from typing import Protocol

from loraplex.serving.output.parts import AnswerText, Part


class OutputParser(Protocol):
    """The parser of one choice. In whatever pieces the text comes, the merged parts are the same."""

    @property
    def in_reasoning(self) -> bool:
        """The text so far ends in it."""
        ...

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        ...

    def push(self, text: str) -> tuple[Part, ...]:
        """The parts that may be shown now that the text goes on with this."""
        ...

    def finish(self) -> tuple[Part, ...]:
        """The rest: the text has ended."""
        ...


class PlainParser:
    """All of it is text."""

    num_calls = 0
    in_reasoning = False

    def push(self, text: str) -> tuple[Part, ...]:
        return (AnswerText(text),) if text else ()

    def finish(self) -> tuple[Part, ...]:
        return ()
