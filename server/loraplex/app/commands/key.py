"""`loraplex key`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.errors import CommandFailed, WrongUsage
from loraplex.app.commands.shared.options import KeyLimitChanges, NewKeyLimits, TenantOption, admin_command
from loraplex.app.commands.shared.paths import segment
from loraplex.app.commands.shared.values import ALL_SCOPES, check_scopes, parse_limits, parse_time
from loraplex.app.output import Output, moment
from loraplex.control.types import SCOPES

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="The key's id, or its name", show_default=False)
]
_SCOPES_HELP = f"One of {', '.join(SCOPES)}, or all of them: {ALL_SCOPES}"


def create_key_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Create, list, change, rotate and revoke a tenant's keys.")
    app.command("create", help="Create a key; its secret is shown this once.")(admin_command(create))
    app.command("list", help="List a tenant's keys, without their secrets.")(admin_command(list_))
    app.command("show", help="Show one key; with a tenant's own key, that one.")(admin_command(show))
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
        typer.Option(metavar="<scope>", help=f"{_SCOPES_HELP}; may be repeated [default: inference]"),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<model>", help="A model that it may use; may be repeated [default: all of the tenant's]"
        ),
    ] = None,
    limit: NewKeyLimits = None,
    expires_at: Annotated[
        str | None,
        typer.Option(metavar="<time>", help="Such as 2030-01-31 or 2030-01-31T18:00:00Z [default: never]"),
    ] = None,
) -> None:
    admin.require_operator("key create")
    body: dict[str, Any] = {"name": name, "scopes": check_scopes(scope), "models": model}
    body["expires_at"] = parse_time("--expires-at", expires_at)
    body["limits"] = parse_limits(limit, of_key=True) or None
    body = {key: value for key, value in body.items() if value}
    made = admin.call("POST", f"/tenants/{segment(tenant)}/keys", json=body)
    _show_secret(out, made, f"key {made['id']} of tenant {tenant} is created. This is its secret")


def list_(admin: AdminClient, out: Output, tenant: TenantOption) -> None:
    rows = _keys(admin, tenant)
    out.rows(
        rows,
        ["key", "name", "scopes", "models", "limits", "state", "last used"],
        lambda r: [
            r["id"],
            r["name"],
            r["scopes"],
            r["models"],
            r["limits"],
            _state(r),
            moment(r["last_used_at"]),
        ],
        unbroken=["key"],
    )


def show(
    admin: AdminClient,
    out: Output,
    tenant: TenantOption,
    key: Annotated[
        str | None,
        typer.Argument(metavar="[KEY]", help="The key's id, or its name (default: the key that asks)"),
    ] = None,
) -> None:
    rows = _keys(admin, tenant)
    if not admin.access.is_key and key is None:
        raise WrongUsage("Missing argument 'KEY': an admin token has no key of its own")
    if key is not None:
        wanted = _key_id(rows, key)
        rows = [row for row in rows if row["id"] == wanted]
    if not rows:
        raise CommandFailed(f"the tenant '{tenant}' has no key '{key}'; see 'loraplex key list'.")
    out.record(rows[0])


def _keys(admin: AdminClient, tenant: str) -> list[dict[str, Any]]:
    """The tenant's keys; with one of them, that one alone: a key learns nothing of others."""
    if admin.access.is_key:
        return [admin.caller()["key"]]
    return list(admin.pages(f"/tenants/{segment(tenant)}/keys"))


def _key_id(rows: Sequence[dict[str, Any]], given: str) -> str:
    """The id of the key with this id, else of the one that has this name and is not revoked. What no key has is the
    server's to refuse. Raises CommandFailed where several have the name."""
    if any(row["id"] == given for row in rows):
        return given
    named = [row for row in rows if row["name"] == given and row["state"] != "revoked"]
    if len(named) > 1:
        listed = ", ".join(row["id"] for row in named)
        raise CommandFailed(
            f"{len(named)} keys have the name '{given}': give the id of one of them, {listed}."
        )
    return str(named[0]["id"]) if named else given


def _state(key: dict[str, Any]) -> str:
    if key["state"] == "revoked":
        return f"revoked {moment(key['revoked_at'])}"
    if key["expires_at"] is None:
        return str(key["state"])
    return f"{'expired' if key['state'] == 'expired' else 'until'} {moment(key['expires_at'])}"


def update(
    admin: AdminClient,
    out: Output,
    key: KeyArgument,
    tenant: TenantOption,
    name: Annotated[str | None, typer.Option(help="A name for people; '' for none")] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(metavar="<scope>", help=f"Its scopes from now on: {_SCOPES_HELP}; may be repeated"),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="<model>", help="The models that it may use from now on; may be repeated"),
    ] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may use all of the tenant's")] = False,
    limit: KeyLimitChanges = None,
    expires_at: Annotated[
        str | None,
        typer.Option(
            metavar="<time>", help="Such as 2030-01-31 or 2030-01-31T18:00:00Z; none: it does not end"
        ),
    ] = None,
) -> None:
    admin.require_operator("key update")
    if model and all_models:
        raise CommandFailed("--model and --all-models contradict each other: give one of them.")
    body: dict[str, Any] = {}
    if name is not None:
        body["name"] = name or None
    if scope:
        body["scopes"] = check_scopes(scope)
    if model or all_models:
        body["models"] = model or None
    if limits := parse_limits(limit, of_key=True):
        body["limits"] = limits
    if expires_at is not None:
        body["expires_at"] = None if expires_at.lower() == "none" else parse_time("--expires-at", expires_at)
    if not body:
        raise CommandFailed(
            "nothing to change: give --name, --scope, --model, --all-models, --limit or --expires-at."
        )
    out.record(admin.call("PATCH", _path(admin, tenant, key), json=body))


def rotate(
    admin: AdminClient,
    out: Output,
    key: KeyArgument,
    tenant: TenantOption,
    grace_seconds: Annotated[
        int, typer.Option(min=0, help="How long the old secret still works; with 0 it stops at once")
    ] = 0,
) -> None:
    admin.require_operator("key rotate")
    path = f"{_path(admin, tenant, key)}/rotate"
    made = admin.call("POST", path, json={"grace_seconds": grace_seconds})
    _show_secret(out, made, f"key {made['id']} has a new secret")
    if out.as_json:
        return
    if made["previous_valid_until"] is None:
        out.note(
            "The old secret no longer works. To keep it for a while at the next rotation, give --grace-seconds, "
            "such as 3600."
        )
    else:
        out.note(f"The old secret works until {moment(made['previous_valid_until'])}.")
    if made["state"] == "expired":
        of_tenant = admin.tenant_option(tenant)
        out.note(
            f"The key has expired at {moment(made['expires_at'])}, and the new secret with it. To let it serve again: "
            f"loraplex key update {made['id']}{of_tenant} --expires-at none, or a time to come."
        )


def revoke(admin: AdminClient, out: Output, key: KeyArgument, tenant: TenantOption) -> None:
    admin.require_operator("key revoke")
    path = _path(admin, tenant, key)
    admin.call("DELETE", path)
    key_id = path.rpartition("/")[2]
    out.done({"id": key_id, "revoked": True}, f"key {key_id} revoked")


def _path(admin: AdminClient, tenant: str, key: str) -> str:
    return f"/tenants/{segment(tenant)}/keys/{segment(_key_id(_keys(admin, tenant), key))}"


def _show_secret(out: Output, made: dict[str, Any], what: str) -> None:
    """The secret alone on stdout, so that a script can take it, and the words on stderr."""
    if out.as_json:
        out.json(made)
        return
    out.note(f"{what}; it cannot be shown again:")
    out.line(made["secret"])
