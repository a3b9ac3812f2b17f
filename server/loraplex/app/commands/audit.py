"""`loraplex audit`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loraplex.app.commands.server import with_settings
from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.options import admin_command
from loraplex.app.commands.shared.values import parse_time
from loraplex.app.output import Output, moment
from loraplex.app.settings import Settings

_ANCHOR = typer.Option(
    None, "--anchor", metavar="SEQ:HASH", help="What an earlier verify printed, kept elsewhere since"
)
_JSON = typer.Option(False, "--json", help="Print JSON")


def create_audit_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Read the audit log, and check that nobody changed it.")
    app.command("list", help="List who changed what, the latest first.")(admin_command(list_))
    app.command("verify", help="Check that nothing in the log was changed or cut off.")(
        with_settings(_verify, only=("data_dir", "database_url"), anchor=_ANCHOR, as_json=_JSON)
    )
    return app


def list_(
    admin: AdminClient,
    out: Output,
    tenant: Annotated[str | None, typer.Option(help="About this tenant, or by its keys")] = None,
    actor: Annotated[str | None, typer.Option(help="By admin, local, or a key's id")] = None,
    action: Annotated[str | None, typer.Option(help="Of this kind, such as key.create")] = None,
    outcome: Annotated[str | None, typer.Option(help="That was done, refused or failed")] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="<time>", help="From then on, such as 2030-01-31 or 2030-01-31T18:00:00Z"),
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="<time>", help="Before then")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many rows")] = 50,
) -> None:
    given = {
        "tenant": tenant,
        "actor": actor,
        "action": action,
        "outcome": outcome,
        "start": parse_time("--start", start),
        "end": parse_time("--end", end),
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
                moment(r["time"]),
                _who(r),
                r["source"],
                r["action"],
                r["target"],
                r["outcome"] if r["code"] is None else f"{r['outcome']} ({r['code']})",
            ]
            for r in page["data"]
        ),
        unbroken=["row", "action"],
    )


def _who(row: dict[str, Any]) -> str:
    if row["actor"] != "key":
        return str(row["actor"])
    return f"{row['actor_tenant_id']}, key {row['actor_key_id']}"


def _verify(settings: Settings, *, anchor: str | None, as_json: bool) -> None:
    from loraplex.app.commands.audit_verify import verify_log

    verify_log(settings, anchor=anchor, as_json=as_json)
