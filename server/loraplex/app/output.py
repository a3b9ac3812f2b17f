"""Tables for people, JSON for programs, and nothing from a server that a terminal would obey."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a completion, or an answer as JSON, needs no tables
    from rich.table import Table

PIPE_WIDTH = 100
"""Columns of a table that no terminal shows."""


def printable(text: str) -> str:
    """`text` without control characters except line ends and tabs: what a model or an upload wrote must not move
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
    return printable(str(value))


def moment(time: str | None) -> str | None:
    """An RFC 3339 time in UTC, to the second, for a table: it may be wrapped between its day and its hour."""
    if time is None or len(time) < len("2030-01-31T00:00:00Z"):
        return time
    return f"{time[:10]} {time[11:19]}Z"


def size(num_bytes: int | None) -> str:
    """Bytes for people, in powers of ten."""
    if num_bytes is None:
        return "-"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


def rows_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, unbroken: Collection[str] = ()
) -> Table:
    """A table; see `Output.table`."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, no_wrap=name in unbroken) for name in columns))
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    return table


def fields_table(data: Mapping[str, Any]) -> Table:
    """One record as a table, a line a field."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    for name, value in data.items():
        table.add_row(Text(name, "bold"), Text(cell(value)))
    return table


def _folded(tables: Iterable[Table]) -> Iterator[Table]:
    for table in tables:
        for column in table.columns:
            column.overflow = "fold"
        yield table


class Output:
    """Where a command writes its result."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def json(self, data: Any) -> None:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def line(self, text: str) -> None:
        sys.stdout.write(printable(text) + "\n")

    def note(self, text: str) -> None:
        """Words beside the result, on stderr."""
        sys.stderr.write(printable(text) + "\n")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, unbroken: Collection[str] = ()
    ) -> None:
        """`unbroken` names the columns whose short values stay on one line, such as ids."""
        self.render(rows_table(columns, rows, unbroken=unbroken))

    def rows(
        self,
        rows: Sequence[dict[str, Any]],
        columns: Sequence[str],
        cells: Callable[[dict[str, Any]], Sequence[Any]],
        *,
        unbroken: Collection[str] = (),
    ) -> None:
        """A list, as JSON or as a table with the `cells` of each row."""
        if self.as_json:
            self.json({"data": rows})
        else:
            self.table(columns, map(cells, rows), unbroken=unbroken)

    def fields(self, data: dict[str, Any]) -> None:
        """One record, a line a field."""
        self.render(fields_table(data))

    def record(self, data: dict[str, Any]) -> None:
        """One record, as JSON or a line a field."""
        if self.as_json:
            self.json(data)
        else:
            self.fields(data)

    def done(self, data: dict[str, Any], sentence: str) -> None:
        """The result of a change, as JSON or a sentence."""
        if self.as_json:
            self.json(data)
        else:
            self.line(sentence)

    def render(self, *tables: Table) -> None:
        """In the terminal's width; in a pipe without lines, in `PIPE_WIDTH` columns. Long values wrap."""
        from rich.console import Console

        console = Console(file=sys.stdout)
        if not console.is_terminal:
            console = Console(file=sys.stdout, width=PIPE_WIDTH)
        for table in _folded(tables):
            if not console.is_terminal:
                table.box = None
            console.print(table)

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @contextmanager
    def redrawing(self) -> Iterator[Callable[..., None]]:
        """A function that draws tables at a terminal, each time in place of those before."""
        from rich.console import Console, Group
        from rich.live import Live

        with Live(console=Console(file=sys.stdout), auto_refresh=False) as live:
            yield lambda *tables: live.update(Group(*_folded(tables)), refresh=True)
