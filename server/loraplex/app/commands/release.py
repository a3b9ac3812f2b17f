"""`loraplex release`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.options import TenantOption, admin_command
from loraplex.app.commands.shared.paths import segment
from loraplex.app.commands.shared.release_plan import parse_guard, parse_schedule, parse_shadow
from loraplex.app.commands.shared.release_view import (
    Json,
    by_text,
    how_text,
    is_compared,
    release_tables,
    state_line,
    targets_text,
    watch,
)
from loraplex.app.commands.shared.values import check_version, parse_targets
from loraplex.app.output import Output

WATCH_S = 1.0
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name", show_default=False)]


def create_release_commands() -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, help="Say which versions of an adapter take its traffic.")
    app.command("set", help="Share the traffic, as in: set support v1=90 v2=10.")(admin_command(set_))
    app.command("show", help="Show which versions take the traffic, and how they compare.")(
        admin_command(show)
    )
    app.command("pause", help="Keep a running release as it is: no next step, no guard.")(
        admin_command(pause)
    )
    app.command("resume", help="Begin a paused release's step again.")(admin_command(resume))
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
    guard: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=MARGIN,...",
            help="Go back by itself where the newest version is worse: default, or such as error_rate=0.01,ttft",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT:TIME,...",
            help="Steps of the newest version, such as 1%:10m,10%:1h,50%:1h; then all",
        ),
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION:SAMPLE[:keep_texts]",
            help="Compare a version on a sample of the requests, unseen: v3:0.1",
        ),
    ] = None,
) -> None:
    if "=" in name:
        raise CommandFailed(f"'{name}' is no name: write NAME first, then VERSION=WEIGHT, such as v1=90.")
    body: dict[str, Any] = {"targets": parse_targets(targets)}
    if sticky is not None:
        body["sticky"] = sticky
    if guard is not None:
        body["guard"] = parse_guard(guard)
    if schedule is not None:
        body["schedule"] = parse_schedule(schedule)
    if shadow is not None:
        body["shadow"] = parse_shadow(shadow)
    _show(out, admin.call("PUT", _path(tenant, name), json=body))


def show(
    admin: AdminClient,
    out: Output,
    name: NameArgument,
    tenant: TenantOption,
    is_watched: Annotated[
        bool, typer.Option("--watch", help="Show it each second until it has ended, or Ctrl-C")
    ] = False,
) -> None:
    path = _path(tenant, name)

    def read() -> tuple[Json, Json | None]:
        release = admin.call("GET", path)
        return release, admin.call("GET", f"{path}/comparison") if is_compared(release) else None

    if not is_watched:
        release, comparison = read()
        if out.as_json:
            out.json(release | {"comparison": comparison})
        else:
            out.render(*release_tables(release, comparison))
        return
    if out.as_json:
        raise CommandFailed("--watch or --json, not both.")
    try:
        _watch(out, read)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def pause(admin: AdminClient, out: Output, name: NameArgument, tenant: TenantOption) -> None:
    _show(out, admin.call("POST", f"{_path(tenant, name)}/pause"))


def resume(admin: AdminClient, out: Output, name: NameArgument, tenant: TenantOption) -> None:
    _show(out, admin.call("POST", f"{_path(tenant, name)}/resume"))


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
    reasons = [r["reason"] for r in rows]
    out.rows(
        rows,
        ["revision", "since", "by", "how", "targets", "sticky", *(["reason"] if any(reasons) else [])],
        lambda r: [
            r["revision"],
            r["created_at"],
            by_text(r),
            how_text(r),
            targets_text(r["targets"]),
            r["sticky"],
            *([r["reason"]] if any(reasons) else []),
        ],
        unbroken=["revision", "since"],
    )


def _path(tenant: str, name: str) -> str:
    return f"/tenants/{segment(tenant)}/adapters/{segment(name)}/release"


def _show(out: Output, release: Json) -> None:
    if out.as_json:
        out.json(release)
    else:
        out.render(*release_tables(release, None))


def _watch(out: Output, read: Callable[[], tuple[Json, Json | None]]) -> None:
    wait = partial(time.sleep, WATCH_S)
    if out.is_terminal:
        with out.redrawing() as draw:
            watch(read, lambda *found: draw(*release_tables(*found)), wait)
        return
    shown: str | None = None

    def print_line(release: Json, comparison: Json | None) -> None:
        nonlocal shown
        line = state_line(release, comparison)
        if line != shown:
            out.line(line)
            sys.stdout.flush()
            shown = line

    watch(read, print_line, wait)
