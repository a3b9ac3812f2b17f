"""`loraplex audit`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loraplex.app.commands.client import AdminClient
from loraplex.app.commands.options import admin_command
from loraplex.app.commands.output import Output
from loraplex.app.server_commands import with_settings
from loraplex.app.settings import Settings

_ANCHOR = typer.Option(
    None, "--anchor", metavar="SEQ:HASH", help="What an earlier verify printed, kept elsewhere since"
)
_JSON = typer.Option(False, "--json", help="Print JSON")


def create_audit_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Read the audit log, and check that nobody changed it.")
    app.command("list", help="List who changed what, the latest first.")(admin_command(list_))
    app.command(
        "verify", help="Read the whole log from the database, and check that nothing was changed or cut off."
    )(with_settings(_verify, "data_dir", "database_url", anchor=_ANCHOR, as_json=_JSON))
    return app


def list_(
    admin: AdminClient,
    out: Output,
    tenant: Annotated[str | None, typer.Option(help="About this tenant, or by its keys")] = None,
    actor: Annotated[str | None, typer.Option(help="admin, local, or a key's id")] = None,
    action: Annotated[str | None, typer.Option(help="Such as key.create")] = None,
    outcome: Annotated[str | None, typer.Option(help="done, refused or failed")] = None,
    start: Annotated[str | None, typer.Option(help="From here on, such as 2030-01-31T00:00:00Z")] = None,
    end: Annotated[str | None, typer.Option(help="Before this")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many rows")] = 50,
) -> None:
    given = {
        "tenant": tenant,
        "actor": actor,
        "action": action,
        "outcome": outcome,
        "start": start,
        "end": end,
    }
    params = {name: value for name, value in given.items() if value is not None} | {"limit": str(limit)}
    page = admin.call("GET", "/audit", params=params)
    if out.as_json:
        out.json(page)
        return
    out.table(
        ["row", "time", "who", "from", "action", "target", "outcome"],
        (
            [
                r["seq"],
                r["time"],
                _who(r),
                r["source"],
                r["action"],
                r["target"],
                r["outcome"] if r["code"] is None else f"{r['outcome']} ({r['code']})",
            ]
            for r in page["data"]
        ),
    )


def _who(row: dict[str, Any]) -> str:
    if row["actor"] != "key":
        return str(row["actor"])
    return f"{row['actor_tenant_id']}, key {row['actor_key_id']}"


def _verify(settings: Settings, *, anchor: str | None, as_json: bool) -> None:
    from loraplex.app.commands.audit_verify import verify_log

    verify_log(settings, anchor=anchor, as_json=as_json)
