"""`loraplex tenant`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.confirm import YesOption, confirm
from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.options import LimitChanges, NewLimits, admin_command
from loraplex.app.commands.shared.paths import segment
from loraplex.app.commands.shared.values import parse_limits
from loraplex.app.output import Output, moment, size

TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id", show_default=False)]


def create_tenant_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Create, list, show, change and delete tenants.")
    app.command("create", help="Create a tenant.")(admin_command(create))
    app.command("list", help="List all tenants.")(admin_command(list_))
    app.command("show", help="Show one tenant.")(admin_command(show))
    app.command("update", help="Change a tenant; what is not named stays.")(admin_command(update))
    app.command("delete", help="Delete a tenant with its keys and adapters.")(admin_command(delete))
    return app


def create(
    admin: AdminClient,
    out: Output,
    tenant: TenantArgument,
    display_name: Annotated[str | None, typer.Option(help="A name for people")] = None,
    weight: Annotated[float | None, typer.Option(help="Its share relative to other tenants' (1)")] = None,
    limit: NewLimits = None,
) -> None:
    body: dict[str, Any] = {"id": tenant}
    if display_name is not None:
        body["display_name"] = display_name
    if weight is not None:
        body["weight"] = weight
    if limits := parse_limits(limit):
        body["limits"] = limits
    made = admin.call("POST", "/tenants", json=body)
    out.done(
        made,
        f"tenant {made['id']} created; make it a key with: loraplex key create --tenant {made['id']} "
        "(with --scope all for one that pushes adapters too)",
    )


def list_(admin: AdminClient, out: Output) -> None:
    rows = list(admin.pages("/tenants"))
    out.rows(
        rows,
        ["tenant", "display name", "weight", "limits", "created"],
        lambda r: [r["id"], r["display_name"], f"{r['weight']:g}", r["limits"], moment(r["created_at"])],
        unbroken=["weight"],
    )


def show(admin: AdminClient, out: Output, tenant: TenantArgument) -> None:
    out.record(admin.call("GET", f"/tenants/{segment(tenant)}"))


def update(
    admin: AdminClient,
    out: Output,
    tenant: TenantArgument,
    display_name: Annotated[str | None, typer.Option(help="A name for people; '' for none")] = None,
    weight: Annotated[float | None, typer.Option(help="Its share relative to other tenants'")] = None,
    limit: LimitChanges = None,
) -> None:
    body: dict[str, Any] = {}
    if display_name is not None:
        body["display_name"] = display_name or None
    if weight is not None:
        body["weight"] = weight
    if limits := parse_limits(limit):
        body["limits"] = limits
    if not body:
        raise CommandFailed("nothing to change: give --display-name, --weight or --limit.")
    out.record(admin.call("PATCH", f"/tenants/{segment(tenant)}", json=body))


def delete(admin: AdminClient, out: Output, tenant: TenantArgument, yes: YesOption = False) -> None:
    confirm(f"Delete tenant {tenant} with all its keys and adapters?", yes)
    told = admin.call("DELETE", f"/tenants/{segment(tenant)}")
    if out.as_json:
        out.json(told)
        return
    erased, kept = told["erased"], told["kept"]
    out.line(f"tenant {tenant} deleted; its id is not given again")
    out.line(
        f"erased: {erased['keys']} keys, {erased['adapters']} adapters ({erased['versions']} versions, "
        f"{size(erased['artifact_bytes'])} freed), {erased['audit_texts']} texts in the audit log"
    )
    if erased["files"] or erased["batches"]:
        told_files = f"{erased['files']} files ({size(erased['file_bytes'])})"
        out.line(f"erased: {told_files} and {erased['batches']} batches, complete or not")
    if kept["usage_since"] is not None:
        out.line(f"kept: its usage since {kept['usage_since']}, to be billed")
    out.line(f"kept: {kept['audit_rows']} audit rows, without texts")
    if kept["shared_artifacts"]:
        out.line(f"kept: {kept['shared_artifacts']} adapters' files, which other tenants have too")
