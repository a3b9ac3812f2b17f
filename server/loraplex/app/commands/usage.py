"""`loraplex usage`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.paths import segment
from loraplex.app.commands.shared.values import parse_time
from loraplex.app.output import Output
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
        str | None,
        typer.Option(
            metavar="<time>", help="From then on, such as 2026-11-01 [default: 30 days before the end]"
        ),
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="<time>", help="Before then [default: now]")] = None,
    bucket: Annotated[str, typer.Option(help="A row for each: hour, day, month or none")] = "day",
    group_by: Annotated[
        str | None, typer.Option(help=f"A row for each, too: some of {', '.join(GROUPS)}, with commas")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV")] = False,
) -> None:
    if as_csv and out.as_json:
        out.as_json = False  # it is not known in which form to answer
        raise CommandFailed("--csv or --json, not both.")
    path = "/usage" if tenant is None else f"/tenants/{segment(tenant)}/usage"
    asked = {
        "start": parse_time("--start", start),
        "end": parse_time("--end", end),
        "bucket": bucket,
        "group_by": group_by,
    }
    params = {name: value for name, value in asked.items() if value is not None}
    rows = list(admin.pages(path, **params))
    if tenant is not None and not rows and _is_unknown(admin, tenant):
        out.note(f"there is no tenant '{tenant}', and no usage of one from these days")
    if out.as_json:
        of = {} if tenant is None else {"tenant": tenant}
        out.json(of | {"data": [row | of for row in rows]})
        return
    groups = [name for name in GROUPS if name in (group_by or "").split(",")]
    columns = [*(["start"] if bucket != "none" else []), *groups, *COUNTS]
    cells = [[row[name] for name in columns] for row in rows]
    if as_csv:
        sys.stdout.write(csv_text(columns, cells))
        return
    titles = [name.replace("_", " ") for name in columns]
    out.table(titles, cells, unbroken=["version", *(name.replace("_", " ") for name in COUNTS)])


def _is_unknown(admin: AdminClient, tenant: str) -> bool:
    """The usage of a tenant that was deleted is kept, so the server answers for one that never was, too."""
    try:
        admin.call("GET", f"/tenants/{segment(tenant)}")
    except CommandFailed as error:  # a tenant's own key may not ask
        return isinstance(error.body, dict) and error.body.get("code") == "tenant_not_found"
    return False
