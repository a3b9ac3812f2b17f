"""Parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

# Structs: with nearly every token one is made.


class AnswerText(msgspec.Struct, frozen=True, gc=False):
    """More of the answer's text."""

    text: str


class ReasoningPart(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A call of the tool `name` begins. `position` counts the choice's calls from 0; `id` is unique."""

    position: int
    name: str
    id: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the arguments of the call at `position`: all of its pieces together are one JSON text. They follow the
    call's start, and precede the start of the next call."""

    position: int
    text: str


Part = AnswerText | ReasoningPart | CallStart | CallArguments


def merge_parts(parts: Iterable[Part]) -> list[Part]:
    """The same answer in as few parts as possible: neighbours of one kind (arguments: of one call) are joined, and
    empty ones left out. However an answer was cut, what is merged is the same."""
    parts = list(parts)
    if len(parts) < 2:
        return [part for part in parts if isinstance(part, CallStart) or part.text]
    runs: list[tuple[Part, list[str]]] = []
    for part in parts:
        if isinstance(part, CallStart):
            runs.append((part, []))
        elif part.text:
            if runs and _is_continued(runs[-1][0], part):
                runs[-1][1].append(part.text)
            else:
                runs.append((part, [part.text]))
    return [
        part
        if isinstance(part, CallStart) or len(texts) == 1
        else msgspec.structs.replace(part, text="".join(texts))
        for part, texts in runs
    ]


def _is_continued(part: Part, other: Part) -> bool:
    """Whether `other` is more of the same."""
    if isinstance(part, CallArguments) and isinstance(other, CallArguments):
        return part.position == other.position
    return type(part) is type(other)


def text_of(parts: Iterable[Part]) -> str:
    """The text of an answer, without reasoning and calls."""
    return "".join([part.text for part in parts if isinstance(part, AnswerText)])
