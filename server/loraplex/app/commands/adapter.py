"""`loraplex adapter`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

import typer

from loraplex.app.commands.pull import pull
from loraplex.app.commands.shared.adapter_folder import open_adapter
from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.confirm import YesOption, confirm
from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.options import TenantOption, admin_command, split_version
from loraplex.app.commands.shared.paths import segment
from loraplex.app.commands.shared.release_view import targets_text
from loraplex.app.commands.shared.report import report_fields
from loraplex.app.commands.shared.upload import upload_progress
from loraplex.app.output import Output, moment, size
from loraplex.serving.output.formats import ReasoningFormatName, ToolFormatName

FILES = ("adapter_config.json", "adapter_model.safetensors")
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="Such as support or support@v2", show_default=False)
]

ToolFormatOption = Annotated[
    str | None,
    typer.Option(
        "--tool-format",
        metavar="FORMAT",
        help=f"How it writes calls of tools: {', '.join(get_args(ToolFormatName))} (default: as the base model)",
        show_default=False,
    ),
]
ReasoningFormatOption = Annotated[
    str | None,
    typer.Option(
        "--reasoning-format",
        metavar="FORMAT",
        help=f"How it writes reasoning: {', '.join(get_args(ReasoningFormatName))} (default: as the base model)",
        show_default=False,
    ),
]
AloraOption = Annotated[
    str | None,
    typer.Option(
        "--alora",
        metavar="CHOICE",
        help="What an activated LoRA does with a prompt without its invocation: refuse, append (put it at the end) or "
        "base (answer as the base model) (default: refuse)",
        show_default=False,
    ),
]

WaitOption = Annotated[
    bool,
    typer.Option(
        "--wait/--no-wait",
        help="Wait until the server has checked the version's numbers; without, see its state later",
    ),
]
TagsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        help="A tag that the adapter gets beside those it has; may be repeated",
        show_default=False,
    ),
]


def create_adapter_commands() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True, help="Upload, import, fetch, list, show, tag, delete and pin adapters."
    )
    app.command("push", help="Upload a PEFT directory as the next version of NAME.")(admin_command(push))
    app.command("import", help="Have the server fetch NAME's next version from an allowed place.")(
        admin_command(import_)
    )
    app.command("pull", help="Fetch a version's files into a directory, as they were uploaded.")(
        admin_command(pull)
    )
    app.command("list", help="List a tenant's adapters.")(admin_command(list_))
    app.command("show", help="Show an adapter and its versions, or one version with its report.")(
        admin_command(show)
    )
    app.command("tag", help="Give an adapter these tags, in place of those it has.")(admin_command(tag))
    app.command("delete", help="Delete an adapter, or one version of it.")(admin_command(delete))
    app.command("pin", help="Keep a version on the device.")(admin_command(pin))
    app.command("unpin", help="Let a version leave the device again.")(admin_command(unpin))
    return app


def push(
    admin: AdminClient,
    out: Output,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name", show_default=False)],
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help=f"A directory with {FILES[0]} and {FILES[1]}", show_default=False),
    ],
    tenant: TenantOption,
    tool_format: ToolFormatOption = None,
    reasoning_format: ReasoningFormatOption = None,
    alora: AloraOption = None,
    wait: WaitOption = True,
    tags: TagsOption = None,
) -> None:
    _check_directory(name, directory)
    given = _serving(tool_format, reasoning_format, alora)
    with contextlib.ExitStack() as stack:
        folder, files = open_adapter(directory, stack)
        shown = stack.enter_context(upload_progress(files, is_quiet=out.as_json))
        data = {"serving": json.dumps(given)} if given else None
        status, made = admin.send("POST", _versions(tenant, name, wait, tags), files=shown, data=data)
    if folder != directory and not out.as_json:
        out.line(f"{name}: of {directory}, {folder.name} was pushed")
    _show_made(admin, out, tenant, status, made, tags)


def import_(
    admin: AdminClient,
    out: Output,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name", show_default=False)],
    source: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="file:///DIR of the server, s3://BUCKET/PREFIX or hf://ORG/NAME@COMMIT, below its --adapter-sources",
            show_default=False,
        ),
    ],
    tenant: TenantOption,
    tool_format: ToolFormatOption = None,
    reasoning_format: ReasoningFormatOption = None,
    alora: AloraOption = None,
    wait: WaitOption = True,
    tags: TagsOption = None,
) -> None:
    body = {"source": source, "serving": _serving(tool_format, reasoning_format, alora)}
    status, made = admin.send("POST", _versions(tenant, name, wait, tags), json=body)
    _show_made(admin, out, tenant, status, made, tags)


def _versions(tenant: str, name: str, wait: bool, tags: list[str] | None) -> str:
    """The address of an upload. Tags are checked before: a client that still sends may miss the answer. Raises
    CommandFailed."""
    if tags:
        # They bring SQLAlchemy, which no other command on this page needs.
        from loraplex.control.adapter_tags import check_tags
        from loraplex.control.errors import InvalidValue

        try:
            check_tags(tags)
        except InvalidValue as error:
            raise CommandFailed(error.message) from None
    query = [*(() if wait else [("wait", "false")]), *([("tags", ",".join(tags))] if tags else [])]
    return f"{_adapter(tenant, name)}/versions{'?' if query else ''}{urlencode(query)}"


def _serving(tool_format: str | None, reasoning_format: str | None, alora: str | None) -> dict[str, str]:
    serving = {"tool_format": tool_format, "reasoning_format": reasoning_format, "alora": alora}
    return {key: value for key, value in serving.items() if value is not None}


def _show_made(
    admin: AdminClient, out: Output, tenant: str, status: int, made: dict[str, Any], tags: list[str] | None
) -> None:
    if out.as_json:
        out.json(made)
        return
    name, version = made["name"], made["version"]
    if status == 202:
        out.line(f"{name}: stored as {version}; its numbers are being checked")
    elif status == 200:
        out.line(f"{name}: these bytes are there already, as {version}")
    else:
        out.line(f"{name}: accepted as {version}")
    out.fields(_version_fields(made))
    if status == 202:
        look = f"loraplex adapter show {name}@{version}{admin.tenant_option(tenant)}"
        out.line(f"{version} takes no traffic before it is ready. To look at its state: {look}")
    else:
        out.line(_traffic(admin, tenant, made))
    if tags:
        out.line(f"{name}: tagged {' '.join(tags)}")


def _check_directory(name: str, directory: Path) -> None:
    if directory.is_dir():
        return
    if Path(name).is_dir():
        raise CommandFailed(f"'{name}' is a directory: write NAME first, then DIR.")
    reason = "is a file" if directory.exists() else "does not exist"
    raise CommandFailed(
        f"{directory} {reason}; DIR is a directory with {FILES[0]} and {FILES[1]}, as PEFT's save_pretrained writes "
        "them."
    )


def _traffic(admin: AdminClient, tenant: str, made: dict[str, Any]) -> str:
    """The traffic of a pushed version, and the command that changes it."""
    name, version, of_tenant = made["name"], made["version"], admin.tenant_option(tenant)
    try:
        release = admin.call("GET", _adapter(tenant, name))["release"]
    except CommandFailed:  # a key may push without reading; promote needs no other version's name
        command = f"loraplex release promote {name} {version}{of_tenant}"
        return f"The first version takes all traffic; a later one takes none until it is released: {command}"
    weights = {t["version"]: t["weight"] for t in release["targets"] if t["weight"]} if release else {}
    if version in weights:
        share = 100 * weights[version] / sum(weights.values())
        rest = " Nothing is left to do." if share == 100 else ""
        return f"{version} serves now: it takes {share:.3g}% of the traffic of {name}.{rest}"
    shares = " ".join(f"{target}={weight}" for target, weight in _with_a_tenth(weights, version).items())
    released = f"; {targets_text(release['targets'])} serves" if weights else ""
    return (
        f"{version} takes no traffic yet{released}. To release it: "
        f"loraplex release set {name} {shares}{of_tenant}"
    )


def _with_a_tenth(weights: Mapping[str, int], version: str) -> dict[str, int]:
    """`weights` in their proportions, and a tenth of the sum for `version`: in percent where these are whole."""
    total = sum(weights.values())
    if not total:
        return {version: 100}
    if any(weight * 90 % total for weight in weights.values()):
        return {**{target: weight * 9 for target, weight in weights.items()}, version: total}
    return {**{target: weight * 90 // total for target, weight in weights.items()}, version: 10}


def list_(admin: AdminClient, out: Output, tenant: TenantOption) -> None:
    rows = list(admin.pages(f"/tenants/{segment(tenant)}/adapters"))
    out.rows(
        rows,
        ["adapter", "versions", "latest", "released", "created"],
        lambda r: [
            r["name"],
            r["num_versions"],
            r["latest_version"],
            _targets(r["release"]),
            moment(r["created_at"]),
        ],
        unbroken=["versions", "latest"],
    )


def show(admin: AdminClient, out: Output, adapter: NameArgument, tenant: TenantOption) -> None:
    name, version = split_version(adapter)
    if version is not None:
        found = admin.call("GET", f"{_adapter(tenant, name)}/versions/{segment(version)}")
        if out.as_json:
            out.json(found)
        else:
            out.fields(_version_fields(found))
        return
    found = admin.call("GET", _adapter(tenant, name))
    versions = list(admin.pages(f"{_adapter(tenant, name)}/versions"))
    if out.as_json:
        out.json(found | {"versions": versions})
        return
    fields = {"adapter": found["name"], "released": _targets(found["release"])}
    out.fields(fields | ({"tags": " ".join(found["tags"])} if found["tags"] else {}))
    out.table(
        ["version", "state", "rank", "targets", "size", "pinned", "digest", "created"],
        (
            [
                v["version"],
                v["state"],
                v["rank"],
                v["targets"],
                size(v["bytes"]),
                v["pinned"],
                v["digest"][:12],
                moment(v["created_at"]),
            ]
            for v in versions
        ),
        unbroken=["version", "rank", "size", "pinned", "digest"],
    )


def tag(
    admin: AdminClient,
    out: Output,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name", show_default=False)],
    tenant: TenantOption,
    tags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TAG",
            help="At most 8 of a-z, 0-9, '.', '_' and '-'; without one it has no tags",
            show_default=False,
        ),
    ] = None,
) -> None:
    found = admin.call("PATCH", _adapter(tenant, name), json={"tags": tags or []})
    out.done(found, f"{name}: {' '.join(found['tags']) or 'no tags'}")


def delete(
    admin: AdminClient, out: Output, adapter: NameArgument, tenant: TenantOption, yes: YesOption = False
) -> None:
    name, version = split_version(adapter)
    what = f"adapter {name} with all its versions" if version is None else f"version {version} of {name}"
    confirm(f"Delete {what}?", yes)
    path = _adapter(tenant, name)
    admin.call("DELETE", path if version is None else f"{path}/versions/{segment(version)}")
    out.done(
        {"name": name, "version": version, "deleted": True}, f"{what} deleted; requests that run on it finish"
    )


def pin(admin: AdminClient, out: Output, adapter: NameArgument, tenant: TenantOption) -> None:
    _pin(admin, out, adapter, tenant, "PUT", "pinned")


def unpin(admin: AdminClient, out: Output, adapter: NameArgument, tenant: TenantOption) -> None:
    _pin(admin, out, adapter, tenant, "DELETE", "unpinned")


def _pin(admin: AdminClient, out: Output, adapter: str, tenant: str, method: str, what: str) -> None:
    name, version = split_version(adapter)
    if version is None:
        raise CommandFailed(f"say which version, such as {name}@v1.")
    admin.call(method, f"{_adapter(tenant, name)}/versions/{segment(version)}/pin")
    out.done({"name": name, "version": version, "pinned": method == "PUT"}, f"{name}@{version} {what}")


def _adapter(tenant: str, name: str) -> str:
    return f"/tenants/{segment(tenant)}/adapters/{segment(name)}"


def _targets(release: dict[str, Any] | None) -> str:
    return "-" if release is None else targets_text(release["targets"])


def _version_fields(version: dict[str, Any]) -> dict[str, Any]:
    fields = {**version, "bytes": size(version["bytes"])}
    report = report_fields(fields.pop("report", None))
    serving = fields.pop("serving")
    without = serving.pop("alora")
    fields |= {key: value or "as the base" for key, value in serving.items()}
    if fields.pop("invocation"):
        invocation = " ".join(map(str, version["invocation"]))
        fields |= {"invocation": invocation, "without it": without or "refuse"}
    return fields | {f"report: {name}": text for name, text in report.items()}
