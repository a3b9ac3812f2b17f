"""The options that every administrative command takes, declared once."""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.app.commands.shared.access import Given, choose_access
from loraplex.app.commands.shared.client import AdminClient
from loraplex.app.commands.shared.errors import CommandFailed, json_failures
from loraplex.app.commands.shared.values import KEY_LIMITS, LIMITS
from loraplex.app.output import Output

DEFAULT_ADMIN_URL = "http://127.0.0.1:8001"
DEFAULT_URL = "http://127.0.0.1:8000"

TenantOption = Annotated[
    str,
    typer.Option("--tenant", "-t", help="The tenant's id; not needed with its own key", show_default=False),
]
"""The command gets the key's tenant where the option is not given."""


def _limit_option(names: Sequence[str], first: str = "May be repeated;") -> Any:
    return typer.Option("--limit", metavar="NAME=VALUE", help=f"{first} NAME is one of {', '.join(names)}")


_CHANGES = "May be repeated; NAME=none takes a limit away."
NewLimits = Annotated[list[str] | None, _limit_option(LIMITS)]
LimitChanges = Annotated[list[str] | None, _limit_option(LIMITS, _CHANGES)]
NewKeyLimits = Annotated[list[str] | None, _limit_option(KEY_LIMITS)]
KeyLimitChanges = Annotated[list[str] | None, _limit_option(KEY_LIMITS, _CHANGES)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON")]


def _data_url(context: typer.Context, url: str) -> str:
    return _at_port(context, "url", url, "LORAPLEX_PORT", "/v1")


def _admin_url(context: typer.Context, url: str) -> str:
    return _at_port(context, "admin_url", url, "LORAPLEX_ADMIN_PORT", "/admin/v1")


def _at_port(context: typer.Context, name: str, url: str, variable: str, path: str) -> str:
    """The address that was given, without the path of the routes, which a client's base URL has and the commands add
    themselves. The default has the port that this variable gives the server, too."""
    source, port = context.get_parameter_source(name), os.environ.get(variable, "")
    if (
        source is not None and source.name == "DEFAULT" and port.isdecimal()
    ):  # a container's link has a URL there
        url = f"{url.rpartition(':')[0]}:{port}"
    return url.rstrip("/").removesuffix(path)


UrlOption = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="LORAPLEX_URL",
        help="The data plane, with or without /v1; the default's port follows LORAPLEX_PORT",
        callback=_data_url,
    ),
]
_API_KEY = typer.Option("--api-key", envvar="LORAPLEX_API_KEY", help="A tenant's key", show_default=False)
ApiKeyOption = Annotated[str, _API_KEY]

_TENANTS: dict[str, tuple[Any, Any]] = {
    "url": (UrlOption, DEFAULT_URL),
    "api_key": (Annotated[str | None, _API_KEY], None),
}
"""Options of the commands that a tenant's own key may run too."""
_SHARED: dict[str, tuple[Any, Any]] = {
    "admin_url": (
        Annotated[
            str,
            typer.Option(
                "--admin-url",
                envvar="LORAPLEX_ADMIN_URL",
                help="The admin plane; the default's port follows LORAPLEX_ADMIN_PORT",
                callback=_admin_url,
            ),
        ],
        DEFAULT_ADMIN_URL,
    ),
    "admin_token": (
        Annotated[
            str | None,
            typer.Option(
                "--admin-token",
                envvar="LORAPLEX_ADMIN_TOKEN",
                help="The admin token",
                show_default=False,
            ),
        ],
        None,
    ),
    "data_dir": (
        Annotated[
            Path | None,
            typer.Option(
                "--data-dir",
                envvar="LORAPLEX_DATA_DIR",
                help="The server's data directory; its admin-token is used when none is given",
                show_default=False,
            ),
        ],
        None,
    ),
    "as_json": (JsonOption, False),
}


def admin_command(run: Callable[..., None], *, of_all_tenants: bool = False) -> Callable[..., None]:
    """A command around `run(admin, out, **its own options)`, with the shared options added to its own. One that has a
    `TenantOption` is for tenants too: without an admin token it talks to the data port with the tenant's key, and gets
    the key's tenant where none is given. With `of_all_tenants` an admin token needs no tenant."""
    hints = typing.get_type_hints(run, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(run).parameters.items()
        if name not in ("admin", "out")
    ]
    is_for_tenants = of_all_tenants or hints.get("tenant") == TenantOption
    options = _SHARED | (_TENANTS if is_for_tenants else {})
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]

    @functools.wraps(run)
    def command(ctx: typer.Context, **given: Any) -> None:
        chosen = {name: given.pop(name) for name in options}
        out = Output(chosen.pop("as_json"))
        with json_failures(out):
            access = choose_access(Given(**chosen, is_option=functools.partial(_is_option, ctx)))
            with AdminClient(access) as admin:
                if is_for_tenants and (access.is_key or not of_all_tenants):
                    given["tenant"] = admin.tenant(given["tenant"])
                run(admin, out, **given)

    own = [
        parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            **(
                {"annotation": _optional(TenantOption), "default": None}
                if parameter.annotation == TenantOption
                else {}
            ),
        )
        for parameter in own
    ]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *own, *shared]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _optional(option: Any) -> Any:
    return Annotated[str | None, *typing.get_args(option)[1:]]


def _is_option(ctx: typer.Context, name: str) -> bool:
    """Whether the command line gives it, not the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def split_version(given: str) -> tuple[str, str | None]:
    """`NAME` or `NAME@v3`."""
    name, at, version = given.partition("@")
    if not name or (at and not version):
        raise CommandFailed(f"'{given}': write an adapter as NAME or NAME@v1.")
    return name, version or None
