"""`loraplex audit verify`, apart from the commands that need no database: it takes long to import."""

from __future__ import annotations

from typing import Any

import typer
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.output import Output
from loraplex.app.settings import Settings
from loraplex.app.storage.database import existing_database, shown_database
from loraplex.control.audit.verification import Verdict, read_anchor, verify
from loraplex.control.db.database import Database
from loraplex.migrations.run import examine_schema


def verify_log(settings: Settings, *, anchor: str | None, as_json: bool) -> None:
    """Beside a server that runs, or without one. Raises CommandFailed where the log is not whole."""
    expected = None if anchor is None else read_anchor(anchor)
    url = _existing_database(settings)
    database = Database(url)
    try:
        verdict = verify(database, expected)
    finally:
        database.close()
    if as_json:
        Output(True).json(_shown(verdict))
        raise typer.Exit(0 if verdict.whole else 1)
    if not verdict.whole:
        raise CommandFailed(
            f"the audit log of {shown_database(url)} is not whole: row {verdict.broken_at}: {verdict.reason}. "
            f"{verdict.num_rows} rows before it are as they were written."
        )
    out = Output(False)
    out.line(f"the audit log is whole: {verdict.num_rows} rows")
    out.line(f"anchor {verdict.head}")


def _existing_database(settings: Settings) -> str:
    """Its URL, once it is known to be there with this version's schema: to look must not make one."""
    url, is_there = existing_database(settings)
    if not is_there:
        raise CommandFailed(
            f"there is no database at {make_url(url).database}; give --data-dir or --database-url."
        )
    try:
        state = examine_schema(url)
    except SQLAlchemyError as error:
        reason = (str(getattr(error, "orig", None) or error).splitlines() or ["no reason given"])[0]
        raise CommandFailed(f"{shown_database(url)} cannot be read: {reason}") from error
    if state.found != state.newest:
        raise CommandFailed(
            f"{shown_database(url)} has the schema {state.found or 'of nothing'}, and this version's is "
            f"{state.newest}: run 'loraplex migrate' first, or use the version that the servers run."
        )
    return url


def _shown(verdict: Verdict) -> dict[str, Any]:
    return {
        "whole": verdict.whole,
        "rows": verdict.num_rows,
        "anchor": None if verdict.head is None else str(verdict.head),
        "broken_at": verdict.broken_at,
        "reason": verdict.reason,
    }
