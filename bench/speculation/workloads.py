"""Prompts of everyday kinds, as many as are asked for and no two alike: text is the repository's own, or made here."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
REPOSITORY = Path(__file__).resolve().parents[2]
PARAGRAPH_WORDS = range(50, 120)
FUNCTION_LINES = range(6, 17)

NAMES = (
    "Anna Berg",
    "Omar Said",
    "Lucy Chen",
    "Pavel Novak",
    "Maria Costa",
    "John Miller",
    "Ines Duarte",
    "Tom Baker",
)
TOWNS = ("Lund", "Porto", "Leeds", "Brno", "Turin", "Ghent", "Cork", "Graz")
THINGS = ("lamps", "chairs", "blankets", "kettles", "bicycles", "mirrors", "shelves")
MONTHS = ("January", "March", "May", "July", "September", "November")

SUBJECTS = (
    "volcanoes", "trains", "honey", "winter", "bridges", "elephants", "tea", "libraries", "maps", "clocks", "rivers",
    "violins", "forests", "islands", "lighthouses", "nurses", "spiders", "rice", "theatre", "bakers", "stars", "glass",
    "salt", "horses", "carpets", "snow", "markets", "pilots", "mushrooms", "kites", "castles", "ants",
)  # fmt: skip
"""None of them is among those that the example adapters were trained on."""
TRAINED_FORMS = (
    "Tell me about {}.",
    "What do you think of {}?",
    "Why do people care about {}?",
    "Describe {} in one sentence.",
)
CHAT_FORMS = (
    "Can you explain to a ten-year-old why {} matter?",
    "I have to give a short talk about {} tomorrow. How should I begin?",
    "What is a common mistake that people make about {}?",
    "Write a friendly note to a colleague who likes {}.",
    "Which three things should a museum about {} show first?",
    "My neighbour says that {} are overrated. What can I answer?",
    "Is there a good film or book about {}, and what is it about?",
    "How did people deal with {} two hundred years ago?",
)


def paragraphs() -> list[tuple[str, str]]:
    """(title of the page, text) of the prose in docs/adr, without its marks."""
    found = []
    for page in sorted((REPOSITORY / "docs" / "adr").glob("[0-9]*.md")):
        title, *parts = page.read_text("utf-8").split("\n\n")
        for part in parts:
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(part.split()))
            text = re.sub(r"\*\*?[\w ]+\.\*\*?|[*`]", "", text).strip()
            if not part.startswith(("|", "-", "#", "```")) and len(text.split()) in PARAGRAPH_WORDS:
                found.append((title.partition(": ")[2], text))
    return found


def functions() -> list[str]:
    """Short functions of the kernels' and the adapters' packages, each with two parameters or more."""
    found = []
    for path in sorted([*REPOSITORY.glob("kernels/**/*.py"), *REPOSITORY.glob("adapters/**/*.py")]):
        source = path.read_text("utf-8")
        for node in ast.parse(source).body:
            is_fit = isinstance(node, ast.FunctionDef) and not node.decorator_list and len(node.args.args) > 1
            text = ast.get_source_segment(source, node) or ""
            if is_fit and len(text.splitlines()) in FUNCTION_LINES:
                found.append(text)
    return found


def summaries(rng: random.Random) -> Iterator[str]:
    for _, text in _forever(paragraphs(), rng):
        yield f"{text}\n\nSummarise this text in three sentences."


def quotes(rng: random.Random) -> Iterator[str]:
    """Three passages, and a question whose answer is to be quoted from one of them."""
    known = paragraphs()
    for title, text in _forever(known, rng):
        others = [other for name, other in rng.sample(known, 6) if name != title][:2]
        passages = [text, *others]
        rng.shuffle(passages)
        numbered = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
        first = " ".join(text.split()[:5])
        yield (
            f'{numbered}\n\nQuestion: what do the passages say about "{title}"? Answer by quoting, word for word, '
            f'the passage that begins with "{first}".'
        )


def edits(rng: random.Random) -> Iterator[str]:
    """A function, one of whose parameters is to be renamed."""
    for text in _forever(functions(), rng):
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        name = function.args.args[-1].arg
        yield (
            f"```python\n{text}\n```\n\nRename the parameter `{name}` to `new_{name}`. Return the whole function with "
            "this change, and nothing else."
        )


def extractions(rng: random.Random) -> Iterator[str]:
    """Orders in prose, which are to become JSON. One is shown."""
    example = "On 2 June, Eva Lind of Oslo ordered 3 desks for 450 euros."
    shown = (
        '{"name": "Eva Lind", "town": "Oslo", "date": "2 June", "item": "desks", "count": 3, "euros": 450}'
    )
    while True:
        orders = " ".join(
            f"On {rng.randrange(1, 29)} {rng.choice(MONTHS)}, {rng.choice(NAMES)} of {rng.choice(TOWNS)} ordered "
            f"{rng.randrange(2, 60)} {rng.choice(THINGS)} for {rng.randrange(20, 900)} euros."
            for _ in range(3)
        )
        yield (
            f"Extract each order as one line of JSON.\n\nText: {example}\nJSON:\n{shown}\n\nText: {orders}\nJSON:\n"
        )


def chats(rng: random.Random) -> Iterator[str]:
    return (
        form.format(subject) for form, subject in _forever(list(itertools.product(CHAT_FORMS, SUBJECTS)), rng)
    )


def adapter_questions(rng: random.Random) -> Iterator[str]:
    """In the forms that the example adapters were trained on, about other subjects."""
    return (
        form.format(subject)
        for form, subject in _forever(list(itertools.product(TRAINED_FORMS, SUBJECTS)), rng)
    )


WORKLOADS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "summarise": summaries,
    "quotes": quotes,
    "edits": edits,
    "json": extractions,
    "chat": chats,
}


def _forever(items: list[Item], rng: random.Random) -> Iterator[Item]:
    """All of them in a random order, and then again in another: repeated only where more are taken than there are."""
    while True:
        rng.shuffle(items)
        yield from items
