"""`loraplex release`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.options import TenantOption, admin_command
from loraplex.app.commands.shared.paths import segment
from loraplex.app.commands.shared.values import check_version, parse_target
from loraplex.app.output import Output

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name", show_default=False)]


def create_release_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Say which versions of an adapter take its traffic.")
    app.command("set", help="Share the traffic, as in: set support v1=90 v2=10.")(admin_command(set_))
    app.command("show", help="Show which versions take the traffic.")(admin_command(show))
    app.command("promote", help="Give all the traffic to one version.")(admin_command(promote))
    app.command("rollback", help="Go back to the release before this one; again: one further.")(
        admin_command(rollback)
    )
    app.command("history", help="List the releases, the newest first: who made them, and how.")(
        admin_command(history)
    )
    return app


def set_(
    admin: AdminClient,
    out: Output,
    name: NameArgument,
    targets: Annotated[
        list[str], typer.Argument(metavar="VERSION=WEIGHT...", help="Such as v1=90 v2=10", show_default=False)
    ],
    tenant: TenantOption,
    sticky: Annotated[
        str | None, typer.Option(help="Keep a user, or a key, on one version: user, key or none")
    ] = None,
) -> None:
    if "=" in name:
        raise CommandFailed(f"'{name}' is no name: write NAME first, then VERSION=WEIGHT, such as v1=90.")
    body: dict[str, Any] = {"targets": [parse_target(item) for item in targets]}
    if sticky is not None:
        body["sticky"] = sticky
    _show(out, admin.call("PUT", _path(tenant, name), json=body))


def show(admin: AdminClient, out: Output, name: NameArgument, tenant: TenantOption) -> None:
    _show(out, admin.call("GET", _path(tenant, name)))


def promote(
    admin: AdminClient,
    out: Output,
    name: NameArgument,
    tenant: TenantOption,
    version: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="Default: the latest that is ready")
    ] = None,
) -> None:
    body = {} if version is None else {"version": check_version(version)}
    _show(out, admin.call("POST", f"{_path(tenant, name)}/promote", json=body))


def rollback(
    admin: AdminClient,
    out: Output,
    name: NameArgument,
    tenant: TenantOption,
    to: Annotated[
        int | None,
        typer.Option(metavar="REVISION", help="The revision to restore; 'release history' lists them"),
    ] = None,
) -> None:
    body = {} if to is None else {"to": to}
    restored = admin.call("POST", f"{_path(tenant, name)}/rollback", json=body)
    if not out.as_json:
        for skip in restored["skipped"]:
            out.line(f"revision {skip['revision']} skipped: {skip['reason']}")
    _show(out, restored)


def history(admin: AdminClient, out: Output, name: NameArgument, tenant: TenantOption) -> None:
    rows = list(admin.pages(f"{_path(tenant, name)}/history"))
    if out.as_json:
        out.json({"data": rows})
        return
    out.table(
        ["revision", "since", "by", "how", "targets", "sticky"],
        (
            [r["revision"], r["created_at"], _by(r), _how(r), targets_text(r["targets"]), r["sticky"]]
            for r in rows
        ),
        unbroken=["revision", "since"],
    )


def _path(tenant: str, name: str) -> str:
    return f"/tenants/{segment(tenant)}/adapters/{segment(name)}/release"


def _show(out: Output, release: dict[str, Any]) -> None:
    if out.as_json:
        out.json(release)
        return
    out.fields(
        {
            "revision": release["revision"],
            "since": release["created_at"],
            "by": _by(release),
            "how": _how(release),
            "sticky": release["sticky"],
        }
    )
    total = sum(t["weight"] for t in release["targets"]) or 1
    out.table(
        ["version", "weight", "share"],
        ([t["version"], t["weight"], f"{100 * t['weight'] / total:.1f}%"] for t in release["targets"]),
    )


def targets_text(targets: list[dict[str, Any]]) -> str:
    """Such as `v1=90 v2=10`."""
    return " ".join(f"{target['version']}={target['weight']}" for target in targets) or "-"


def _by(release: dict[str, Any]) -> str | None:
    """The actor that made it, as far as that is known."""
    actor = release["actor"]
    return f"key {release['actor_key_id']}" if actor == "key" else actor


def _how(release: dict[str, Any]) -> str | None:
    """Such as `set`, or `rollback to 2`."""
    restores = release["restores"]
    return release["origin"] if restores is None else f"{release['origin']} to {restores}"
