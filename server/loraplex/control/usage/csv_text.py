"""Tables as CSV that a spreadsheet opens without harm."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

_FORMULA = frozenset("=+-@\t\r")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """RFC 4180. A text that a spreadsheet would take for a formula is shown with an apostrophe before it; None is
    empty."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    writer.writerows([[_cell(value) for value in row] for row in rows])
    return out.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text[:1] in _FORMULA else text
