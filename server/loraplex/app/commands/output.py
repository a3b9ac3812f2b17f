"""Tables for people, JSON for programs, and nothing from a server that a terminal would obey."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def printable(text: str) -> str:
    """`text` without control characters but for line ends and tabs: what a model or an upload wrote must not move
    the cursor, set the title or answer for the user."""
    return "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160))


def cell(value: Any) -> str:
    """One value for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(v) for v in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{k}={cell(v)}" for k, v in value.items() if v is not None) or "-"
    return escape(printable(str(value)))


def size(num_bytes: int | None) -> str:
    """Bytes for people, in powers of ten."""
    if num_bytes is None:
        return "-"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


class Output:
    """Where a command writes its result."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def json(self, data: Any) -> None:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def line(self, text: str) -> None:
        sys.stdout.write(printable(text) + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        table = Table(*columns)
        for row in rows:
            table.add_row(*(cell(value) for value in row))
        self.render(table)

    def fields(self, data: dict[str, Any]) -> None:
        """One record, a line a field."""
        table = Table(show_header=False, box=None)
        for name, value in data.items():
            table.add_row(f"[bold]{escape(name)}[/]", cell(value))
        self.render(table)

    def render(self, *renderables: Table) -> None:
        console = Console(file=sys.stdout)
        if not console.is_terminal:
            # In a pipe nothing should be cut to the width of a terminal that is not there.
            console = Console(file=sys.stdout, width=240)
        for renderable in renderables:
            console.print(renderable)
