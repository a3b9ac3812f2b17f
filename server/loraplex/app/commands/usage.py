"""`loraplex usage`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loraplex.app.commands.client import AdminClient
from loraplex.app.commands.errors import CommandFailed
from loraplex.app.commands.output import Output
from loraplex.app.commands.paths import segment
from loraplex.control.usage.columns import COUNTS, GROUPS
from loraplex.control.usage.csv_text import csv_text


def usage(
    admin: AdminClient,
    out: Output,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", "-t", help="Of this tenant alone; a key with usage:read may ask for its own"
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="From then on, such as 2026-11-01 (30 days before the end)")
    ] = None,
    end: Annotated[str | None, typer.Option(help="Before then (now)")] = None,
    bucket: Annotated[str, typer.Option(help="A row for each: hour, day, month or none")] = "day",
    group_by: Annotated[
        str | None, typer.Option(help=f"A row for each, too: some of {', '.join(GROUPS)}, with commas")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV")] = False,
) -> None:
    if as_csv and out.as_json:
        raise CommandFailed("--csv or --json, not both.")
    path = "/usage" if tenant is None else f"/tenants/{segment(tenant)}/usage"
    asked = {"start": _time(start), "end": _time(end), "bucket": bucket, "group_by": group_by}
    params = {name: value for name, value in asked.items() if value is not None}
    rows = list(admin.pages(path, **params))
    if out.as_json:
        out.json({"data": rows})
        return
    groups = [name for name in GROUPS if name in (group_by or "").split(",")]
    columns = [*(["start"] if bucket != "none" else []), *groups, *COUNTS]
    cells = [[row[name] for name in columns] for row in rows]
    if as_csv:
        sys.stdout.write(csv_text(columns, cells))
        return
    out.table([name.replace("_", " ") for name in columns], cells)


def _time(given: str | None) -> str | None:
    """A day stands for its midnight in UTC."""
    return f"{given}T00:00:00Z" if given is not None and len(given) == len("2026-11-01") else given
