"""Makes parts of a text in a version's formats, while it comes.

Reasoning stands at the head of the answer, calls behind it or between texts. What begins like a block of calls is held
until it is complete, or until a character shows that it is no block: then it is text, to the letter. Each character is
looked at once, and those of half a marker twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from loraplex.serving.output.blocks import Block
from loraplex.serving.output.formats import Notation, ReasoningFormat, Shape
from loraplex.serving.output.json_readers import WHITE, Malformed
from loraplex.serving.output.parts import AnswerText, Part, ReasoningPart

PIECE_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class _Opening:
    """`literal` begins a block, or reasoning where there is no `notation`. `kept`: it is a part of the block's JSON."""

    literal: str
    notation: Notation | None
    kept: bool = False


@dataclass(frozen=True)
class Openings:
    """Markers that may begin a block: anywhere, only at the head of the answer, only behind a call."""

    anywhere: Sequence[_Opening]
    at_head: Sequence[_Opening]
    behind_call: Sequence[_Opening]

    @classmethod
    def of(cls, notations: Iterable[Notation], reasoning: ReasoningFormat | None) -> Openings:
        anywhere, at_head, behind_call = [], [], []
        if reasoning is not None:
            at_head.append(_Opening(reasoning.opens, None))
        for notation in notations:
            if notation.follows:
                behind_call.append(_Opening(notation.opens, notation))
            elif notation.opens:
                anywhere.append(_Opening(notation.opens, notation))
            else:
                brackets = {Shape.OBJECT: "{", Shape.LIST: "["}
                at_head += [_Opening(brackets[shape], notation, kept=True) for shape in notation.shapes]
        return cls(anywhere, at_head, behind_call)


class _Search:
    """Finds the first of several literals in a text that comes in pieces."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, literals))) if literals else None
        self._prefixes = frozenset(literal[:end] for literal in literals for end in range(1, len(literal)))
        self._longest = max(map(len, self._prefixes), default=0)

    def find(self, text: str) -> re.Match[str] | None:
        return None if self._pattern is None else self._pattern.search(text)

    def held(self, text: str) -> int:
        """How many of the last characters may begin one of them."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


@dataclass(slots=True)
class FormatParser:
    """The parser of one choice. `names` are the tools that may be called. `in_reasoning`: the prompt has opened the
    reasoning. `streams`: a grammar keeps the calls well-formed, so their arguments are told as they come. `calls_only`:
    the grammar allows calls and nothing else, so what is left of a call whose name was cut off is no text. `new_id`
    makes the ids of calls."""

    notations: Sequence[Notation]
    names: frozenset[str]
    new_id: Callable[[], str]
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    streams: bool = False
    calls_only: bool = False
    num_calls: int = 0
    _openings: Openings = field(init=False)
    _search: _Search = field(init=False)
    _end_of_reasoning: _Search = field(init=False)
    _parts: list[Part] = field(default_factory=list)
    _spaces: list[str] = field(default_factory=list)  # white space that a marker may follow
    _tail: str = ""  # what may begin a marker
    _drops_space: bool = False  # a marker came last
    _at_head: bool = True
    _behind_call: bool = False
    _block: Block | None = None
    _block_prefix: str = ""  # the white space and the marker before it

    def __post_init__(self) -> None:
        self._openings = Openings.of(self.notations, self.reasoning)
        self._search = _Search([opening.literal for opening in self._openings.anywhere])
        self._end_of_reasoning = _Search([] if self.reasoning is None else [self.reasoning.closes])
        self._drops_space = self.in_reasoning

    def push(self, text: str) -> tuple[Part, ...]:
        # In pieces, as each step copies what is left of one.
        for start in range(0, len(text), PIECE_LENGTH):
            rest = text[start : start + PIECE_LENGTH]
            while rest:
                if self._block is not None:
                    rest = self._read_block(self._block, rest)
                elif self.in_reasoning:
                    rest = self._read_reasoning(rest)
                else:
                    rest = self._read_text(rest)
        return self._take()

    def finish(self) -> tuple[Part, ...]:
        block = self._block
        if self.calls_only and not self.in_reasoning and not (block is not None and block.complete):
            return self._take()
        if block is not None and block.complete:
            self._end_block(block)
        elif block is not None:
            if not self.streams or not block.num_calls:
                self._break_block(block)
            self._block = None  # what follows a call that has been told is no text
        self._show(self._tail)
        self._tail = ""
        rest = "".join(self._spaces)
        self._spaces = []
        if rest and not self._drops_space:
            self._parts.append(self._part(rest))
        return self._take()

    def _take(self) -> tuple[Part, ...]:
        parts, self._parts = tuple(self._parts), []
        return parts

    def _part(self, text: str) -> Part:
        return ReasoningPart(text) if self.in_reasoning else AnswerText(text)

    def _show(self, text: str) -> None:
        """Text or reasoning without a marker. White space at its end waits for what follows."""
        shown = text.rstrip(WHITE)
        if shown:
            lead = "".join(self._spaces)
            self._spaces = []
            body = shown.lstrip(WHITE) if self._drops_space else lead + shown
            self._drops_space = False
            self._parts.append(self._part(body))
            self._at_head = self._at_head and self.in_reasoning
            self._behind_call = False
        space = text[len(shown) :]
        if space and not self._drops_space:
            self._spaces.append(space)

    def _read_reasoning(self, text: str) -> str:
        text = self._tail + text
        self._tail = ""
        match = self._end_of_reasoning.find(text)
        if match is None:
            held = self._end_of_reasoning.held(text)
            self._show(text[: len(text) - held])
            self._tail = text[len(text) - held :]
            return ""
        self._show(text[: match.start()])
        self.in_reasoning = False
        self._mark()
        return text[match.end() :]

    def _mark(self) -> None:
        """A marker has ended here."""
        self._spaces = []
        self._drops_space = True

    def _read_text(self, text: str) -> str:
        text = self._tail + text
        self._tail = ""
        if self._at_head or self._behind_call:
            body = text.lstrip(WHITE)
            self._show(text[: len(text) - len(body)])
            if not body:
                return ""
            openings = [*self._openings.anywhere]
            openings += self._openings.at_head if self._at_head else ()
            openings += self._openings.behind_call if self._behind_call else ()
            for opening in openings:
                if body.startswith(opening.literal):
                    return self._open(opening, body[0 if opening.kept else len(opening.literal) :])
            if any(opening.literal.startswith(body) for opening in openings):
                self._tail = body
                return ""
            text = body
        match = self._search.find(text)
        if match is None:
            held = self._search.held(text)
            self._show(text[: len(text) - held])
            self._tail = text[len(text) - held :]
            return ""
        self._show(text[: match.start()])
        opening = next(found for found in self._openings.anywhere if found.literal == match[0])
        return self._open(opening, text[match.end() :])

    def _open(self, opening: _Opening, rest: str) -> str:
        if opening.notation is None:
            self.in_reasoning = True
            self._mark()
            return rest
        self._block_prefix = "".join(self._spaces) + ("" if opening.kept else opening.literal)
        self._spaces = []
        self._block = Block(opening.notation, self.names, self.num_calls, self.new_id, self.streams)
        return rest

    def _read_block(self, block: Block, text: str) -> str:
        try:
            length = block.push(text)
        except Malformed as error:
            return self._break_block(block, error.again) + text[block.at :]
        if block.ended:
            self._end_block(block)
        elif self.streams:
            self._tell(block)
        return text[length:]

    def _tell(self, block: Block) -> None:
        self._parts += block.parts
        block.parts.clear()
        self.num_calls = block.first_position + block.num_calls

    def _end_block(self, block: Block) -> None:
        self._tell(block)
        self._block = None
        self._mark()
        self._at_head, self._behind_call = False, True

    def _break_block(self, block: Block, again: int = 0) -> str:
        """Show a block that is none as text, except the last `again` characters, which are returned."""
        self._block = None
        if self.streams:
            self._tell(block)
        read = ("" if block.num_calls and self.streams else self._block_prefix) + "".join(block.held)
        # At least one character that is no white space, so that each block that is none takes the text further.
        least = len(read) - len(read.lstrip(WHITE)) + 1
        cut = max(least, len(read) - again)
        self._show(read[:cut])
        return read[cut:]
