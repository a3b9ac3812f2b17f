"""Reading what documents say: their tables, code spans and links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`]+)`")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def rows(text: str, *head: str) -> list[list[str]]:
    """The cells of every table whose first columns are titled `head`, with \\| as the bar that it stands for."""
    found: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if tuple(cells[: len(head)]) == head:
            inside = True
        elif inside and not set("".join(cells)) <= set("-: "):
            found.append(cells)
    assert found, f"no table with the columns {head}"
    return found


def spans(text: str) -> list[str]:
    """Everything in `backticks`, fenced blocks left out."""
    return _SPAN.findall(_FENCE.sub("", text))


def blocks(text: str) -> str:
    """The fenced blocks alone."""
    return "\n".join(_FENCE.findall(text))


def links(text: str) -> list[str]:
    """Targets of links and pictures."""
    return _LINK.findall(_SPAN.sub("", _FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to, as code hosts make them."""
    titles = re.findall(r"^#+ +(.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
