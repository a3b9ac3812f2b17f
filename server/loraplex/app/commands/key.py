"""`loraplex key`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loraplex.app.commands.client import AdminClient
from loraplex.app.commands.errors import CommandFailed
from loraplex.app.commands.options import LimitChanges, TenantOption, admin_command, parse_limits
from loraplex.app.commands.output import Output
from loraplex.app.commands.paths import segment

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key's id", show_default=False)]


def create_key_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Create, list, change, rotate and revoke a tenant's keys.")
    app.command("create", help="Create a key; its secret is shown this once.")(admin_command(create))
    app.command("list", help="List a tenant's keys, without their secrets.")(admin_command(list_))
    app.command("update", help="Change a key; what is not named stays.")(admin_command(update))
    app.command("rotate", help="Replace a key's secret; the old one works for the grace time.")(
        admin_command(rotate)
    )
    app.command("revoke", help="Revoke a key at once.")(admin_command(revoke))
    return app


def create(
    admin: AdminClient,
    out: Output,
    tenant: TenantOption,
    name: Annotated[str | None, typer.Option(help="A name for people")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="inference (default), adapters:read, adapters:write, usage:read; may be repeated"),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may use (default: all of the tenant's)")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Such as requests_per_minute=60")
    ] = None,
    expires_at: Annotated[str | None, typer.Option(help="RFC 3339, such as 2030-01-31T00:00:00Z")] = None,
) -> None:
    body: dict[str, Any] = {"name": name, "scopes": scope, "models": model, "expires_at": expires_at}
    body["limits"] = parse_limits(limit) or None
    body = {key: value for key, value in body.items() if value}
    made = admin.call("POST", f"/tenants/{segment(tenant)}/keys", json=body)
    _show_secret(out, made, "created")


def list_(admin: AdminClient, out: Output, tenant: TenantOption) -> None:
    rows = list(admin.pages(f"/tenants/{segment(tenant)}/keys"))
    if out.as_json:
        out.json({"data": rows})
        return
    out.table(
        ["key", "name", "scopes", "models", "limits", "expires", "revoked", "last used", "created"],
        (
            [
                r["id"],
                r["name"],
                r["scopes"],
                r["models"],
                r["limits"],
                r["expires_at"],
                r["revoked_at"],
                r["last_used_at"],
                r["created_at"],
            ]
            for r in rows
        ),
    )


def update(
    admin: AdminClient,
    out: Output,
    key: KeyArgument,
    tenant: TenantOption,
    name: Annotated[str | None, typer.Option(help="A name for people; '' for none")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="Its scopes from now on; may be repeated")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="The models that it may use from now on; may be repeated")
    ] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may use all of the tenant's")] = False,
    limit: LimitChanges = None,
    expires_at: Annotated[
        str | None, typer.Option(help="RFC 3339, such as 2030-01-31T00:00:00Z; 'none': it does not end")
    ] = None,
) -> None:
    if model and all_models:
        raise CommandFailed("--model and --all-models contradict each other: give one of them.")
    body: dict[str, Any] = {}
    if name is not None:
        body["name"] = name or None
    if scope:
        body["scopes"] = scope
    if model or all_models:
        body["models"] = model or None
    if limits := parse_limits(limit):
        body["limits"] = limits
    if expires_at is not None:
        body["expires_at"] = None if expires_at.lower() == "none" else expires_at
    if not body:
        raise CommandFailed(
            "nothing to change: give --name, --scope, --model, --all-models, --limit or --expires-at."
        )
    changed = admin.call("PATCH", f"/tenants/{segment(tenant)}/keys/{segment(key)}", json=body)
    if out.as_json:
        out.json(changed)
    else:
        out.fields(changed)


def rotate(
    admin: AdminClient,
    out: Output,
    key: KeyArgument,
    tenant: TenantOption,
    grace_seconds: Annotated[int, typer.Option(min=0, help="How long the old secret still works")] = 0,
) -> None:
    path = f"/tenants/{segment(tenant)}/keys/{segment(key)}/rotate"
    made = admin.call("POST", path, json={"grace_seconds": grace_seconds})
    _show_secret(out, made, "rotated")


def revoke(admin: AdminClient, out: Output, key: KeyArgument, tenant: TenantOption) -> None:
    admin.call("DELETE", f"/tenants/{segment(tenant)}/keys/{segment(key)}")
    if out.as_json:
        out.json({"id": key, "revoked": True})
    else:
        out.line(f"key {key} revoked")


def _show_secret(out: Output, made: dict[str, Any], what: str) -> None:
    if out.as_json:
        out.json(made)
        return
    out.line(f"key {made['id']} {what}. Its secret, which cannot be shown again:")
    out.line(made["secret"])
